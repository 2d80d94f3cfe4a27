"""The `Backend` that computes a prefill: plain torch or the kernels."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from path_backend import ops
from path_backend.arguments import CrossSegment, Inputs, SegmentEnds, SegmentForward
from path_backend.eager import segments as eager


def choose(inputs: Inputs, implementation: str) -> Any:
    """Returns a `Backend` for these inputs, as `path_attention` chooses it."""
    chosen = getattr(ops, "choose_backend", None)
    if chosen is not None:
        return chosen(inputs, implementation)
    return _Blocks(ops._backend(inputs.q.device, implementation, inputs, eager))


def is_torch(backend: Any) -> bool:
    """Whether this is plain torch, which computes and returns what its inputs' dtype holds."""
    return "kernels" not in backend.__name__


class _Blocks:
    """The segment functions of a module that has them by their former names, tensor by tensor.

    To be removed when `ops.choose_backend` is there.
    """

    def __init__(self, module: ModuleType):
        self.module, self.__name__ = module, module.__name__

    def segment_ends(self, inputs: Inputs) -> SegmentEnds:
        return SegmentEnds(*self.module.block_frames(*inputs[:2], *inputs[3:5]))

    def segment_forward(self, inputs: Inputs, scale: float) -> SegmentForward:
        out, lse, *ends = self.module.block_forward(*inputs, scale)
        return SegmentForward(out, lse, SegmentEnds(*ends))

    def cross_segment_forward(
        self, pair: CrossSegment, scale: float, out: Tensor, lse: Tensor
    ) -> None:
        self.module.rectangle_forward(*pair, scale, out, lse)
