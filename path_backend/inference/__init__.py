"""Inference: a cache that closes groups, prefill in chunks of any sizes, decode, rollback."""

from path_backend.inference.cache import PathCache
from path_backend.inference.spec import (
    CacheError,
    CacheMismatchError,
    CacheSpec,
    CapacityError,
    RollbackError,
)

__all__ = [
    "CacheError",
    "CacheMismatchError",
    "CacheSpec",
    "CapacityError",
    "PathCache",
    "RollbackError",
]
