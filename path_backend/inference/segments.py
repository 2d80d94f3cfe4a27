"""The segment functions of `Backend`, from plain torch or from the kernels."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from path_backend import ops
from path_backend.arguments import CrossSegment, Inputs, SegmentEnds, SegmentForward
from path_backend.eager import segments as eager


class Segments:
    """One form of the segment functions, chosen once for a call."""

    def __init__(self, inputs: Inputs, implementation: str):
        self.implementation = implementation
        self.module: ModuleType = ops._backend(inputs.q.device, implementation, inputs, eager)

    @property
    def is_torch(self) -> bool:
        """Whether this is plain torch, which computes and returns what its inputs' dtype holds."""
        return self.module is eager

    def attention(self, inputs: Inputs, scale: float) -> Tensor:
        """Returns out [B, T, HQ, DV] of a whole sequence, as a training forward does."""
        return torch.ops.path_backend.attention(*inputs, scale, self.implementation)[0]

    def ends(self, inputs: Inputs) -> SegmentEnds:
        """`Backend.segment_ends`."""
        return SegmentEnds(*self.module.block_frames(*inputs[:2], *inputs[3:5]))

    def forward(self, inputs: Inputs, scale: float) -> SegmentForward:
        """`Backend.segment_forward`."""
        out, lse, *ends = self.module.block_forward(*inputs, scale)
        return SegmentForward(out, lse, SegmentEnds(*ends))

    def cross_forward(self, pair: CrossSegment, scale: float, out: Tensor, lse: Tensor) -> None:
        """`Backend.cross_segment_forward`."""
        self.module.rectangle_forward(*pair, scale, out, lse)
