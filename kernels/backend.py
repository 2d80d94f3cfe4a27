"""Forward and backward of the operator, and of one piece of a sequence that is cut into pieces. The
only module of the kernels that operators call.

Shapes: q [B, T, HQ, D], k and w [B, T, H, D], v [B, T, H, DV], beta [B, T, H] and log_gate [B, T,
HQ] in fp32, document_start [B, T] int32. Tensors may have any strides; what the kernels cannot read
is copied (`inputs.dense`).
"""

import torch
from torch import Tensor

from . import config
from .attention_launch import Gradients, backward, forward
from .cross_segment import rectangle_backward, rectangle_forward
from .frames_launch import Ends, make_frames
from .operands import dense, differentiable, groups, prepare
from .tiles import padded

__all__ = [
    "attention_backward",
    "attention_forward",
    "block_backward",
    "block_forward",
    "block_frames",
    "rectangle_backward",
    "rectangle_forward",
    "unsupported_reason",
]

MAX_HEAD_DIM = 128
"""Products P are D x D tiles held by one program."""


def unsupported_reason(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_gate: Tensor | None,
    document_start: Tensor | None,
) -> str | None:
    """Why the kernels do not cover this case, or None if they do."""
    if torch.version.hip is not None or config.capability() < (8, 0):
        return "they need an NVIDIA GPU of compute capability 8.0 or newer"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype {q.dtype} is not bfloat16, float16 or float32"
    limit = 256 if w is None else MAX_HEAD_DIM
    for name, width in (("q", q.shape[-1]), ("v", v.shape[-1])):
        if width > limit:
            return f"{name} has head width {width}, the kernels hold at most {limit}"
    need = config.needed_memory(q.dtype, padded(max(q.shape[-1], v.shape[-1])), w is not None)
    if need > config.SMALL and need > (there := config.shared_memory()):
        return f"{q.dtype} takes {need} KiB of shared memory at this head width, there are {there}"
    return None


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_gate: Tensor | None,
    document_start: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out [B, T, HQ, DV] in q's dtype and the natural log-sum-exp [B, HQ, T] in fp32."""
    out = q.new_empty(*q.shape[:3], v.shape[3])
    return out, forward(prepare(q, k, v, w, beta, log_gate, document_start, scale), out)


def attention_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_gate: Tensor | None,
    document_start: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor | None, ...]:
    """dq, dk, dv, dw, dbeta, dlog_gate; None where the input is absent."""
    dtype = q.dtype
    q, k, v = (differentiable(x) for x in (q, k, v))
    w = None if w is None else differentiable(w)
    inputs = prepare(q, k, v, w, beta, log_gate, document_start, scale)
    grads = Gradients.empty(inputs)
    backward(inputs, d_out, out, lse, grads)
    *vectors, d_beta, d_gate = grads.of_inputs()
    return *(None if x is None else x.to(dtype) for x in vectors), d_beta, d_gate


def block_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_gate: Tensor | None,
    document_start: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """One piece of a longer sequence: attention inside it, and what other pieces need of it.

    out [B, T, HQ, DV] and lse [B, HQ, T] in fp32; q_start = H_1 ... H_i q_i and k_end =
    (H_{j+1} ... H_T)^T k_j in the dtype of q; product = H_1 ... H_T [B, H, D, D] in fp32. Without
    reflections these are q, k, None.
    """
    inputs = prepare(q, k, v, w, beta, log_gate, document_start, scale, piece=w is not None)
    out = q.new_empty(*q.shape[:3], v.shape[3], dtype=torch.float32)
    if w is None:
        return out, forward(inputs, out), q, k, None
    ends = Ends.empty(inputs)
    return out, forward(inputs, out, ends), ends.q_start, ends.k_end, ends.product


def block_frames(
    q: Tensor, k: Tensor, w: Tensor | None, beta: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The last three results of `block_forward`, without its attention."""
    if w is None:
        return q, k, None
    inputs = prepare(q, k, k, w, beta, None, None, 1.0, piece=True)
    ends = Ends.empty(inputs)
    for group in groups(inputs, backward=False):
        make_frames(inputs.part(*group), ends.part(*group))
    return ends.q_start, ends.k_end, ends.product


def block_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_gate: Tensor | None,
    document_start: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    dq_start: Tensor,
    dk_end: Tensor,
    d_product: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """As `attention_backward`, of one piece. dv, and without reflections dq and dk, are in fp32;
    others are too for fp16 inputs.

    out and lse are those over all pieces; dq_start, dk_end, d_product are what comes from other
    pieces, in fp32. dv and dlog_gate are those of the pairs inside the piece.
    """
    q, k, v = (differentiable(x) for x in (q, k, v))
    w = None if w is None else differentiable(w)
    scale = scale or 1e-20  # dq and dk are summed without it: what comes in is divided by it
    inputs = prepare(q, k, v, w, beta, log_gate, document_start, scale, piece=w is not None)
    grads = Gradients.empty(inputs)
    grads.v = torch.empty_like(grads.v, dtype=torch.float32)
    if d_product is None:
        grads.q, grads.k = (torch.empty_like(x, dtype=torch.float32) for x in (grads.q, grads.k))
        backward(inputs, d_out, out, lse, grads)
        grads.q += dq_start
        grads.k += dk_end
    else:
        d_ends = Ends(dense(dq_start), dense(dk_end), d_product)
        backward(inputs, d_out, out, lse, grads, d_ends)
    return grads.of_inputs()
