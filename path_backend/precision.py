"""Which precision a part of the model is computed in."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Returns a context without autocast on x's device; a device that has none needs none."""
    if not torch.amp.is_autocast_available(x.device.type):  # meta
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def at_least_float32(x: Tensor) -> Tensor:
    """Returns x in fp32, or as it is in fp64."""
    return x if x.dtype == torch.float64 else x.float()
