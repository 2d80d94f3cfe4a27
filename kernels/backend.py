"""The kernels as a `path_backend.arguments.Backend`: forward and backward of the operator, and of
one segment of a sequence that is cut into segments. The only module of the kernels that others
call.

Shapes: q [B, T, HQ, D], k and w [B, T, H, D], v [B, T, H, DV], beta [B, T, H] and log_gate [B, T,
HQ] in fp32, document_start [B, T] int32. Tensors may have any strides; what the kernels cannot read
is copied (`operands.readable`). Compute precision is fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import config
from .attention_launch import Gradients, backward, forward
from .cross_segment_launch import cross_segment_backward, cross_segment_forward
from .frames_launch import empty_ends, make_frames, part_of_ends
from .operands import groups, in_gradient_dtype, prepare, readable
from .records import SegmentEnds, SegmentForward
from .tiles import padded

if TYPE_CHECKING:
    from path_backend.arguments import Inputs

__all__ = [
    "attention_backward",
    "attention_forward",
    "cross_segment_backward",
    "cross_segment_forward",
    "segment_backward",
    "segment_ends",
    "segment_forward",
    "unsupported_reason",
]

MAX_HEAD_DIM = 128
"""Products P are D x D tiles held by one program."""


def unsupported_reason(inputs: Inputs) -> str | None:
    """Returns why the kernels do not cover this case, or None if they do."""
    if torch.version.hip is not None or config.capability() < (8, 0):
        return "they need an NVIDIA GPU of compute capability 8.0 or newer"
    q, v, path = inputs.q, inputs.v, inputs.w is not None
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype {q.dtype} is not bfloat16, float16 or float32"
    limit = MAX_HEAD_DIM if path else 256
    for name, width in (("q", q.shape[-1]), ("v", v.shape[-1])):
        if width > limit:
            return f"{name} has head width {width}, the kernels hold at most {limit}"
    need = config.needed_memory(q.dtype, padded(max(q.shape[-1], v.shape[-1])), path)
    if need > config.SMALL and need > (there := config.architecture().shared_memory):
        return f"{q.dtype} takes {need} KiB of shared memory at this head width, there are {there}"
    return None


def attention_forward(inputs: Inputs, scale: float) -> tuple[Tensor, Tensor]:
    """Returns out [B, T, HQ, DV] in q's dtype and the natural log-sum-exp [B, HQ, T] in fp32."""
    q = inputs.q
    out = q.new_empty(*q.shape[:3], inputs.v.shape[3])
    return out, forward(prepare(inputs, scale), out)


def attention_backward(
    d_out: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor | None, ...]:
    """Returns dq, dk, dv, dw, dbeta, dlog_gate, each in its input's dtype; None where that is
    absent.
    """
    x = prepare(_in_gradient_dtype(inputs), scale)
    grads = Gradients.empty(x)
    backward(x, d_out, out, lse, grads)
    *vectors, d_beta, d_gate = grads.of_inputs()
    return *(None if g is None else g.to(inputs.q.dtype) for g in vectors), d_beta, d_gate


def segment_ends(inputs: Inputs) -> SegmentEnds:
    """Returns the ends of a segment, without its attention: v, gates and documents have no part.

    q_start and k_end are in q's dtype, the product in fp32. Without reflections the ends are q, k
    and None.
    """
    q, k = inputs.q, inputs.k
    if inputs.w is None:
        return SegmentEnds(q, k, None)
    inputs = inputs._replace(v=k, log_gate=None, document_start=None)
    x = prepare(inputs, 1.0, is_segment=True)
    ends = empty_ends(x)
    for group in groups(x, backward=False):
        make_frames(x.part(*group), part_of_ends(ends, *group))
    return ends


def segment_forward(inputs: Inputs, scale: float) -> SegmentForward:
    """Returns attention inside a segment, out [B, T, HQ, DV] and lse [B, HQ, T] in fp32, and its
    ends, as `segment_ends`.
    """
    q, path = inputs.q, inputs.w is not None
    x = prepare(inputs, scale, is_segment=path)
    out = q.new_empty(*q.shape[:3], inputs.v.shape[3], dtype=torch.float32)
    if not path:
        return SegmentForward(out, forward(x, out), SegmentEnds(q, inputs.k, None))
    ends = empty_ends(x)
    return SegmentForward(out, forward(x, out, ends), ends)


def segment_backward(
    d_out: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, scale: float, d_ends: SegmentEnds
) -> tuple[Tensor | None, ...]:
    """Returns what `attention_backward` does, of one segment. dv, and without reflections dq and
    dk, are in fp32; others are too for fp16 inputs.

    out and lse are those over all segments; d_ends, in fp32, is what comes from other segments. dv
    and dlog_gate are those of the pairs inside the segment.
    """
    inputs = _in_gradient_dtype(inputs)
    scale = scale or 1e-20  # dq and dk are summed without it: what comes in is divided by it
    x = prepare(inputs, scale, is_segment=inputs.w is not None)
    grads = Gradients.empty(x)
    grads.v = torch.empty_like(grads.v, dtype=torch.float32)
    if d_ends.product is None:
        grads.q, grads.k = (torch.empty_like(g, dtype=torch.float32) for g in (grads.q, grads.k))
        backward(x, d_out, out, lse, grads)
        grads.q += d_ends.q_start
        grads.k += d_ends.k_end
    else:
        q_start, k_end = readable(d_ends.q_start), readable(d_ends.k_end)
        backward(x, d_out, out, lse, grads, SegmentEnds(q_start, k_end, d_ends.product))
    return grads.of_inputs()


def _in_gradient_dtype(inputs: Inputs) -> Inputs:
    q, k, v = (in_gradient_dtype(x) for x in inputs[:3])
    w = None if inputs.w is None else in_gradient_dtype(inputs.w)
    return inputs._replace(q=q, k=k, v=v, w=w)
