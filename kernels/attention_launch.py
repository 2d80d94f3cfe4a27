"""Launchers of the attention: one call in groups of heads, forward and backward."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import config, gate, levels
from .attention_backward import attention_dkdv_kernel, attention_dq_kernel, row_kernel
from .attention_forward import attention_forward_kernel
from .frames_launch import FrameGradients, Frames, frames_backward, make_frames, part_of_ends
from .operands import (
    Operands,
    groups,
    readable,
    readable_like,
    streamed_keys,
    streamed_queries,
    strides,
    with_positive_scale,
)
from .records import SegmentEnds


def _attention_arguments(x: Operands, frames: Frames | None, tile: config.Tiles) -> dict[str, Any]:
    """Returns the arguments that the three attention kernels share."""
    T = x.q.shape[1]
    return {
        "q_ptr": x.q,
        "k_ptr": x.k,
        "v_ptr": x.v,
        "intra_ptr": frames.intra if frames else x.q,
        "gate_ptr": x.gate if x.gate is not None else x.q,
        "offset_ptr": x.gate_offset if x.gate_offset is not None else x.q,
        "start_ptr": x.document_start if x.document_start is not None else x.q,
        **strides(("q", x.q), ("k", x.k), ("v", x.v)),
        "T": T,
        "HQ": x.q.shape[2],
        "num_chunks": levels.cdiv(T, tile.rows),
        "num_levels": levels.num_levels(T),
        "total_rows": levels.total_rows(T),
        "GROUP": x.group,
        "CHUNK": tile.rows,
        **tile.options,
        **x.widths,
        **x.value_widths,
        **x.flags,
    }


def _keys(x: Operands, frames: Frames | None, tile: config.Tiles) -> dict[str, Any]:
    """Returns what the passes of a query tile read beside it."""
    k = frames.k_levels if frames else x.k.transpose(1, 2)
    return {
        "q_levels_ptr": frames.q_levels if frames else x.q,
        **streamed_keys(k, x.v, x.gate, tile),
    }


def forward(inputs: Operands, out: Tensor, ends: SegmentEnds | None = None) -> Tensor:
    """Writes out [B, T, HQ, DV], and the `ends` of a segment. Returns the natural log-sum-exp
    [B, HQ, T] in fp32.
    """
    B, T, HQ, _ = inputs.q.shape
    lse = torch.empty(B, HQ, T, dtype=torch.float32, device=inputs.q.device)
    k, scale = with_positive_scale(inputs.k, inputs.scale)
    inputs = replace(inputs, k=readable(k))
    for group in groups(inputs, backward=False):
        x = inputs.part(*group)
        frames = None if x.w is None else make_frames(x, ends and part_of_ends(ends, *group))
        batch, _, queries = group
        part = out[batch, :, queries]
        tile = config.forward_tiles(*x.case)
        attention_forward_kernel[(levels.cdiv(T, tile.rows), part.shape[0] * part.shape[2])](
            **_attention_arguments(x, frames, tile),
            **_keys(x, frames, tile),
            out_ptr=part,
            lse_ptr=lse[batch, queries],
            **strides(("o", part)),
            scale=scale,
        )
    if ends is not None and inputs.scale < 0:
        ends.k_end.neg_()
    return lse


@dataclass
class Gradients:
    """Holds what the backward writes: gradients [B, T, heads, ...] of the inputs, and the row and
    column sums [B, HQ, T] of those of the logits if there is a gate.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor | None
    beta: Tensor | None
    row_sum: Tensor | None
    col_sum: Tensor | None

    @staticmethod
    def empty(x: Operands) -> "Gradients":
        B, T, HQ, _ = x.q.shape
        # with reflections descriptors load dq and dk again
        q, k = (t.new_empty(t.shape) if x.w is None else readable_like(t) for t in (x.q, x.k))
        w, beta = (None if t is None else t.new_empty(t.shape) for t in (x.w, x.beta))
        sums = (None, None) if x.gate is None else x.gate.new_empty(2, B, HQ, T).unbind()
        return Gradients(q, k, x.v.new_empty(x.v.shape), w, beta, *sums)

    def part(self, batch: slice, heads: slice, queries: slice) -> "Gradients":
        return Gradients(
            self.q[batch, :, queries],
            self.k[batch, :, heads],
            self.v[batch, :, heads],
            None if self.w is None else self.w[batch, :, heads],
            None if self.beta is None else self.beta[batch, :, heads],
            None if self.row_sum is None else self.row_sum[batch, queries],
            None if self.col_sum is None else self.col_sum[batch, queries],
        )

    def log_gate(self) -> Tensor | None:
        """Returns the gradient of the log gates [B, T, HQ], or None without a gate."""
        if self.row_sum is None or self.col_sum is None:
            return None
        return gate.gradient(self.row_sum, self.col_sum)

    def of_inputs(self) -> tuple[Tensor | None, ...]:
        """Returns dq, dk, dv, dw, dbeta, dlog_gate; None where the input is absent."""
        q, k = self.q.contiguous(), self.k.contiguous()
        return q, k, self.v, self.w, self.beta, self.log_gate()


def backward(
    inputs: Operands,
    d_out: Tensor,
    out: Tensor,
    lse: Tensor,
    grads: Gradients,
    d_ends: SegmentEnds | None = None,
) -> None:
    """Writes `grads`, from d(out) and from the gradients of the ends of a segment."""
    d_out, out, lse = readable(d_out.to(inputs.q.dtype)), readable(out), lse.contiguous()
    for group in groups(inputs, backward=True):
        batch, _, queries = group
        _backward_group(
            inputs.part(*group),
            d_out[batch, :, queries],
            out[batch, :, queries],
            lse[batch, queries],
            grads.part(*group),
            d_ends and part_of_ends(d_ends, *group),
        )


def _backward_group(
    x: Operands,
    d_out: Tensor,
    out: Tensor,
    lse: Tensor,
    grads: Gradients,
    d_ends: SegmentEnds | None,
) -> None:
    B, T, HQ, _ = x.q.shape
    query_tile = config.query_tiles(*x.case)
    key_tile = config.key_tiles(*x.case)
    chunks = levels.cdiv(T, query_tile.rows)
    frames = None if x.w is None else make_frames(x)
    rows = lse.new_empty(B, HQ, chunks * query_tile.rows, 2)
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
        CHUNK=query_tile.rows,
        HAS_GATE=x.gate is not None,
        **x.value_widths,
    )
    of_frames = FrameGradients.empty(x) if frames else None
    from_start, from_end = (d_ends.q_start, d_ends.k_end) if d_ends else (None, None)
    shared = {
        "rows_ptr": rows,
        "d_out_ptr": d_out,
        "scale": x.scale,
        "product_tiles": frames.product_tiles() if frames else None,
        "moved_rows": levels.moved_rows(T, x.is_segment),
        "total_blocks": levels.total_blocks(T),
        "MOVE": x.precision,
        **strides(("g", d_out)),
    }
    attention_dq_kernel[(chunks, B * HQ)](
        **_attention_arguments(x, frames, query_tile),
        **_keys(x, frames, query_tile),
        **shared,
        **strides(("e", from_start), ("dq", grads.q)),
        incoming_ptr=from_start,
        dq_ptr=grads.q,
        dq_moved_ptr=of_frames.q_moved if of_frames else grads.q,
        d_intra_ptr=of_frames.intra if of_frames else grads.q,
        row_sum_ptr=lse if grads.row_sum is None else grads.row_sum,
        STAGES=config.early_loads(query_tile),
        SPLIT=config.architecture().split_documents,
    )
    attention_dkdv_kernel[(chunks, B * x.k.shape[2])](
        **_attention_arguments(x, frames, key_tile),
        k_levels_ptr=frames.k_levels if frames else x.k,
        **streamed_queries(frames.q_levels if frames else x.q.transpose(1, 2), d_out, key_tile),
        **shared,
        **strides(("e", from_end), ("dk", grads.k), ("dv", grads.v)),
        incoming_ptr=from_end,
        end_ptr=x.document_end if x.document_end is not None else x.q,
        dk_ptr=grads.k,
        dk_moved_ptr=of_frames.k_moved if of_frames else grads.k,
        dv_ptr=grads.v,
        col_sum_ptr=lse if grads.col_sum is None else grads.col_sum,
        STAGES=config.early_loads(key_tile),
    )
    if frames and of_frames:
        frames_backward(
            x,
            frames,
            of_frames,
            grads.q,
            grads.k,
            grads.w,
            grads.beta,
            d_ends.product if d_ends else None,
        )
