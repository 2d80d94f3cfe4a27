"""PaTH attention: accumulated Householder reflections as a position encoding."""

import importlib.metadata

from path_backend.attention import context_parallel_attention, path_attention
from path_backend.beta import beta_from_logits
from path_backend.context_parallel.layout import Layout, layout_from_positions
from path_backend.layers.attention import PathAttention

__all__ = [
    "Layout",
    "PathAttention",
    "__version__",
    "beta_from_logits",
    "context_parallel_attention",
    "layout_from_positions",
    "path_attention",
]

try:
    __version__ = importlib.metadata.version("path-backend")
except importlib.metadata.PackageNotFoundError:  # a checkout on sys.path
    __version__ = "unknown"
