"""What a stock run of torchtitan needs here, and nothing of the attention: CPU, dataset, models.

torchtitan imports it by `[experimental] custom_import`.
"""

import tiny_models  # noqa: F401 (adds the flavors)

from path_backend.integration.data import text
from path_backend.integration.repairs import cpu

cpu.activate_without_accelerator()
text.register()
