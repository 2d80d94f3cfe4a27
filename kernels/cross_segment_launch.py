"""Launchers of the attention between two segments: see cross_segment.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import config
from .constants import LOG2_E
from .cross_segment import (
    cross_segment_dkdv_kernel,
    cross_segment_dq_kernel,
    cross_segment_forward_kernel,
)
from .levels import cdiv
from .operands import (
    in_gradient_dtype,
    readable,
    streamed_keys,
    streamed_queries,
    strides,
    with_positive_scale,
)
from .tiles import padded

if TYPE_CHECKING:
    from path_backend.arguments import CrossSegment


def _shared(q: Tensor, k: Tensor, v: Tensor, first_key: Tensor | None, rows: int) -> dict[str, Any]:
    """Returns the arguments that the three kernels share."""
    return {
        "first_ptr": q if first_key is None else first_key.contiguous(),
        "TQ": q.shape[1],
        "TK": k.shape[1],
        "HQ": q.shape[2],
        "GROUP": q.shape[2] // k.shape[2],
        "HEAD_DIM": q.shape[3],
        "BLOCK_D": padded(q.shape[3]),
        "HEAD_DIM_V": v.shape[3],
        "BLOCK_DV": padded(v.shape[3]),
        "ROWS": rows,
        "HAS_DOC": first_key is not None,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
    }


def _padded_to_tiles(x: Tensor, rows: int, value: float = 0.0) -> Tensor:
    """Returns a copy of x [..., T] with `value` up to the end of its last tile. Never x itself:
    that of one head may have strides that no descriptor takes.
    """
    whole = x.new_full((*x.shape[:-1], cdiv(x.shape[-1], rows) * rows), value)
    whole[..., : x.shape[-1]] = x
    return whole


def _gates_of_keys(gate_k: Tensor | None, rows: int) -> Tensor | None:
    """Returns -gate_k in log2 units, [B, HQ, whole tiles]."""
    return None if gate_k is None else _padded_to_tiles((gate_k * -LOG2_E).float(), rows)


def cross_segment_forward(pair: CrossSegment, scale: float, out: Tensor, lse: Tensor) -> None:
    """Merges attention of q [B, TQ, HQ, D] to k [B, TK, H, D], v [B, TK, H, DV] into the running
    out [B, TQ, HQ, DV] and lse [B, HQ, TQ], fp32 (lse may be -inf where out is zero).

    logits = scale q_i . k_j + gate_q_i + gate_k_j, natural, gate_q [B, HQ, TQ] and gate_k [B, HQ,
    TK]; query i sees the keys from first_key[b, i] on (int32, non-decreasing, of any size). Last
    dimensions of out and lse are contiguous. Rows that see nothing keep their bits.
    """
    q, k, v, gate_q, gate_k, first_key = pair
    assert out.stride(-1) == 1 and lse.stride(-1) == 1, (out.stride(), lse.stride())
    B, TQ, HQ, D = q.shape
    width = padded(max(D, v.shape[3]))
    # no keys of a diagonal take shared memory, as with reflections
    tile = config.forward_tiles(q.dtype, width, True, gate_k is not None, first_key is not None)
    k, scale = with_positive_scale(k, scale)
    q, k, v = readable(q), readable(k), readable(v)
    cross_segment_forward_kernel[(cdiv(TQ, tile.rows), B * HQ)](
        **_shared(q, k, v, first_key, tile.rows),
        **streamed_keys(k.transpose(1, 2), v, _gates_of_keys(gate_k, tile.rows), tile),
        **strides(("q", q), ("o", out)),
        q_ptr=q,
        HAS_GATE=gate_k is not None,
        gate_q_ptr=None if gate_q is None else (gate_q * LOG2_E).float().contiguous(),
        out_ptr=out,
        lse_ptr=lse,
        stride_lb=lse.stride(0),
        stride_lh=lse.stride(1),
        scale=scale,
        **tile.options,
    )


def cross_segment_backward(
    d_out: Tensor, pair: CrossSegment, lse: Tensor, delta: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns dq, dk, dv in fp32 and d_gate_q, d_gate_k like the gates (None without).

    lse and delta = rowsum(d_out * out), [B, HQ, TQ], are those of the finished rows.
    """
    gate_q, gate_k, first_key = pair.gate_q, pair.gate_k, pair.first_key
    q, k, v = (readable(in_gradient_dtype(x)) for x in pair[:3])
    d_out = readable(d_out.to(q.dtype))
    B, TQ, HQ, D = q.shape
    TK, H, DV = v.shape[1:]
    dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    case = q.dtype, padded(max(D, DV)), False, gate_k is not None, first_key is not None
    query_tile, key_tile = config.query_tiles(*case), config.key_tiles(*case)
    rows = query_tile.rows
    d_gate_q = d_gate_k = None
    bias = lse * -LOG2_E
    if gate_q is not None and gate_k is not None:
        d_gate_q, d_gate_k = lse.new_empty(gate_q.shape), lse.new_empty(gate_k.shape)
        bias = bias + (gate_q * LOG2_E).float()
    terms = _padded_to_tiles(bias, rows, float("-inf")), _padded_to_tiles(delta, rows)
    gates = _gates_of_keys(gate_k, rows)
    shared = {
        **_shared(q, k, v, first_key, rows),
        "HAS_GATE": gates is not None,
        "rows_ptr": torch.stack(terms, -1),
        "scale": scale,
    }
    cross_segment_dq_kernel[(cdiv(TQ, rows), B * HQ)](
        **shared,
        **streamed_keys(k.transpose(1, 2), v, gates, query_tile),
        **strides(("q", q), ("g", d_out), ("dq", dq)),
        q_ptr=q,
        d_out_ptr=d_out,
        dq_ptr=dq,
        d_gate_q_ptr=d_gate_q,
        STAGES=config.early_loads(query_tile),
        **query_tile.options,
    )
    reach = None
    if first_key is not None:
        last_keys = torch.arange(0, TK, rows, device=q.device, dtype=torch.int32)
        last_keys = (last_keys + (rows - 1)).repeat(B, 1)
        reach = torch.searchsorted(first_key.contiguous(), last_keys, right=True, out_int32=True)
    cross_segment_dkdv_kernel[(cdiv(TK, rows), B * H)](
        **shared,
        **strides(("k", k), ("v", v), ("dk", dk), ("dv", dv)),
        **streamed_queries(q.transpose(1, 2), d_out, key_tile),
        k_ptr=k,
        v_ptr=v,
        gate_k_ptr=gates,
        reach_ptr=reach,
        dk_ptr=dk,
        dv_ptr=dv,
        d_gate_k_ptr=d_gate_k,
        STAGES=config.early_loads(key_tile),
        **key_tile.options,
    )
    if gate_q is None or gate_k is None or d_gate_q is None or d_gate_k is None:
        return dq, dk, dv, None, None
    return dq, dk, dv, d_gate_q.to(gate_q.dtype), d_gate_k.to(gate_k.dtype)
