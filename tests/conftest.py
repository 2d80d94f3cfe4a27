import os

import pytest
import torch

torch.set_num_threads(1)

# Read when the kernels are imported. Without a GPU they run, on tensors of the CPU, in Triton's
# interpreter; only implementation="triton" asks for them there.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
