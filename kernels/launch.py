"""Forward and backward of the operator. The only module of the kernels that the operator calls.

Shapes: q [B, T, HQ, D], k and w [B, T, H, D], v [B, T, H, DV], beta [B, T, H] and log_gate [B, T,
HQ] in fp32, document_start [B, T] int32. Last dimensions may have any stride; they are copied if it
is not 1.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from . import config, tiles
from .attention_backward import attention_dkdv_kernel, attention_dq_kernel, row_kernel
from .attention_forward import attention_forward_kernel
from .frames import FrameGradients, Frames, frames_backward, make_frames
from .inputs import LOG2_E, Inputs, dense, groups, padded, prepare, strides
from .tiles import CHUNK

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
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype {q.dtype} is not bfloat16, float16 or float32"
    limit = 256 if w is None else MAX_HEAD_DIM
    for name, width in (("q", q.shape[-1]), ("v", v.shape[-1])):
        if width > limit:
            return f"{name} has head width {width}, the kernels hold at most {limit}"
    return None


def _attention_arguments(x: Inputs, frames: Frames | None, tile: config.Tiles) -> dict[str, Any]:
    """What the three attention kernels share."""
    T = x.q.shape[1]
    return {
        "q_ptr": x.q,
        "k_ptr": x.k,
        "v_ptr": x.v,
        "q_levels_ptr": frames.q_levels if frames else x.q,
        "k_levels_ptr": frames.k_levels if frames else x.k,
        "local_ptr": frames.local if frames else x.q,
        "gate_ptr": x.gate if x.gate is not None else x.q,
        "offset_ptr": x.gate_offset if x.gate_offset is not None else x.q,
        "start_ptr": x.document_start if x.document_start is not None else x.q,
        **strides(("q", x.q), ("k", x.k), ("v", x.v)),
        "T": T,
        "HQ": x.q.shape[2],
        "num_chunks": triton.cdiv(T, CHUNK),
        "num_levels": tiles.num_levels(T),
        "total_rows": tiles.total_rows(T),
        "GROUP": x.group,
        "CHUNK": CHUNK,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **x.widths,
        **x.value_widths,
        **x.flags,
    }


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
    B, T, HQ, _ = q.shape
    out = q.new_empty(B, T, HQ, v.shape[3])
    lse = torch.empty(B, HQ, T, dtype=torch.float32, device=q.device)
    inputs = prepare(q, k, v, w, beta, log_gate, document_start, scale)
    for batch, heads in groups(inputs, backward=False):
        x = inputs.part(batch, heads)
        queries = slice(heads.start * x.group, heads.stop * x.group)
        frames = None if w is None else make_frames(x)
        block = max(x.width, padded(v.shape[3]))
        tile = config.forward_tiles(q.dtype, block, frames is not None)
        part = out[batch, :, queries]
        attention_forward_kernel[(triton.cdiv(T, CHUNK), part.shape[0] * part.shape[2])](
            **_attention_arguments(x, frames, tile),
            BLOCK_N=tile.stream,
            out_ptr=part,
            lse_ptr=lse[batch, queries],
            **strides(("o", part)),
            scale=scale * LOG2_E,
        )
    return out, lse


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
) -> tuple[Tensor, ...]:
    """dq, dk, dv, dw, dbeta, dlog_gate; empty tensors where the input is absent.

    fp16 inputs are differentiated in fp32 storage and tf32 products, which hold fp16 values
    exactly: a mean loss over a million tokens has gradients of 1e-7, where fp16 has no digits left.
    """
    dtype = q.dtype
    if dtype == torch.float16:
        d_out, q, k, v, out = (t.float() for t in (d_out, q, k, v, out))
        w = None if w is None else w.float()
    d_out = dense(d_out)
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    dw = q.new_empty(0) if w is None else w.new_empty(w.shape)
    d_beta = lse.new_empty(0) if beta is None else lse.new_empty(beta.shape)
    row_sum = col_sum = lse
    if log_gate is not None:
        row_sum, col_sum = torch.empty_like(lse), torch.empty_like(lse)
    inputs = prepare(q, k, v, w, beta, log_gate, document_start, scale)
    for batch, heads in groups(inputs, backward=True):
        queries = slice(heads.start * inputs.group, heads.stop * inputs.group)
        _backward_group(
            inputs.part(batch, heads),
            d_out[batch, :, queries],
            out[batch, :, queries],
            lse[batch, queries],
            dq[batch, :, queries],
            dk[batch, :, heads],
            dv[batch, :, heads],
            None if w is None else dw[batch, :, heads],
            None if beta is None else d_beta[batch, :, heads],
            row_sum[batch, queries],
            col_sum[batch, queries],
        )
    d_gate = lse.new_empty(0)
    if log_gate is not None:
        # fp64: the suffix sum of a million signed terms; reversed as total minus prefix
        d_sum = (row_sum - col_sum).double()
        d_gate = (
            (d_sum.sum(-1, keepdim=True) - d_sum.cumsum(-1) + d_sum)
            .float()
            .transpose(1, 2)
            .contiguous()
        )
    return dq.to(dtype), dk.to(dtype), dv.to(dtype), dw.to(dtype), d_beta, d_gate


def _backward_group(
    x: Inputs,
    d_out: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dw: Tensor | None,
    d_beta: Tensor | None,
    row_sum: Tensor,
    col_sum: Tensor,
) -> None:
    B, T, HQ, D = x.q.shape
    H, width = x.k.shape[2], x.width
    frames = None if x.w is None else make_frames(x)
    chunks, block = triton.cdiv(T, CHUNK), max(width, padded(x.v.shape[3]))
    rows = lse.new_empty(B, HQ, chunks * CHUNK, 2)
    row_kernel[(chunks, B * HQ)](
        out_ptr=out,
        d_out_ptr=d_out,
        lse_ptr=lse,
        gate_ptr=x.gate,
        rows_ptr=rows,
        **strides(("o", out), ("g", d_out)),
        T=T,
        HQ=HQ,
        num_chunks=chunks,
        CHUNK=CHUNK,
        HAS_GATE=x.gate is not None,
        **x.value_widths,
    )
    grads = FrameGradients.empty(x) if frames else None
    shared = {
        "rows_ptr": rows,
        "d_out_ptr": d_out,
        "scale": x.scale,
        "product_ptr": frames.products if frames else x.q,
        "moved_rows": tiles.moved_rows(T),
        "total_blocks": tiles.total_blocks(T),
        "MOVE": x.precision,
        **strides(("g", d_out)),
    }
    tile = config.query_tiles(x.q.dtype, block)
    attention_dq_kernel[(chunks, B * HQ)](
        **_attention_arguments(x, frames, tile),
        **shared,
        **strides(("dq", dq)),
        dq_ptr=grads.q_start if grads else dq,
        dq_moved_ptr=grads.q_moved if grads else dq,
        d_local_ptr=grads.local if grads else dq,
        row_sum_ptr=row_sum,
        BLOCK_N=tile.stream,
    )
    tile = config.key_tiles(x.q.dtype, block)
    attention_dkdv_kernel[(chunks, B * H)](
        **_attention_arguments(x, frames, tile),
        **shared,
        **strides(("dk", dk), ("dv", dv)),
        end_ptr=x.document_end if x.document_end is not None else x.q,
        dk_ptr=grads.k_end if grads else dk,
        dk_moved_ptr=grads.k_moved if grads else dk,
        dv_ptr=dv,
        col_sum_ptr=col_sum,
        BLOCK_M=tile.stream,
    )
    if frames and grads and dw is not None and d_beta is not None:
        frames_backward(x, frames, grads, dq, dk, dw, d_beta)
