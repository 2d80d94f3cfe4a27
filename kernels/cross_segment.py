"""Attention between two pieces of a sequence: queries of one, keys of an earlier one, moved to one
frame. The passes are those of the squares, and every key is visible but for documents.

    logits = scale q_i . k_j + gate_q_i + gate_k_j

The gate comes in log2 units and as -gate_k, which makes it the difference of sums that the passes
know. first_key never decreases from one query to the next, so that the queries which see any key,
or those which see some key tile, are the first ones.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from . import config, tiles
from .attention_backward import key_pass, load_rows, query_gradient
from .attention_forward import attend
from .operands import (
    LOG2_E,
    dense,
    differentiable,
    positive,
    streamed_keys,
    streamed_queries,
    strides,
)
from .tiles import as_product, kernel, load_tile, padded, store_tile


@kernel
def rectangle_forward_kernel(
    q_ptr, k_tiles, v_tiles, gate_q_ptr, gate_tiles, first_ptr, out_ptr, lse_ptr, stride_qb,
    stride_qt, stride_qh, stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, TQ, TK, HQ, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, HAS_GATE: tl.constexpr,
    HAS_DOC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Merges ROWS queries into the running out and natural lse. `scale` is in log2 units."""
    m0, q_head = tl.program_id(0) * ROWS, tl.program_id(1)
    b, hq = (q_head // HQ).to(tl.int64), (q_head % HQ).to(tl.int64)
    h = hq // GROUP
    q_head = q_head.to(tl.int64)
    q_ptr += b * stride_qb + hq * stride_qh
    out_ptr += b * stride_ob + hq * stride_oh
    lse_ptr += b * stride_lb + hq * stride_lh
    rows = m0 + tl.arange(0, ROWS)
    lo = 0
    limit = TQ  # rows behind it see nothing and stay as they are
    first_key = rows
    if HAS_DOC:
        first_key = tl.load(first_ptr + b * TQ + rows, mask=rows < TQ, other=TK)
        lo = tl.maximum(tl.min(first_key, 0), 0) // BLOCK_N * BLOCK_N
        limit = m0 + tl.sum((first_key < TK).to(tl.int32), 0)
    gate_q = rows.to(tl.float32)
    if HAS_GATE:
        gate_q = tl.load(gate_q_ptr + q_head * TQ + rows, mask=rows < TQ, other=0.0)

    q = load_tile(q_ptr, m0, stride_qt, limit, ROWS, BLOCK_D, HEAD_DIM)
    acc = load_tile(out_ptr, m0, stride_ot, limit, ROWS, BLOCK_DV, HEAD_DIM_V)
    m_i = tl.load(lse_ptr + rows, mask=rows < limit, other=float("-inf")) * 1.4426950408889634
    l_i = tl.where(m_i == float("-inf"), 0.0, 1.0)
    middle = tl.maximum(lo, TK // BLOCK_N * BLOCK_N)
    for whole in tl.static_range(2):
        acc, l_i, m_i = attend(
            acc, l_i, m_i, q, k_tiles, v_tiles, gate_tiles, None, b, h, hq, 0,
            lo if whole == 0 else middle, middle if whole == 0 else TK, gate_q, 0.0, first_key, TK,
            scale, BLOCK_D, BLOCK_DV, BLOCK_N, whole == 0, HAS_GATE, HAS_DOC, PRECISION,
        )  # fmt: skip
    store_tile(out_ptr, m0, stride_ot, limit, acc / l_i[:, None], ROWS, BLOCK_DV, HEAD_DIM_V)
    lse = (m_i + tl.math.log2(l_i)) * 0.6931471805599453
    tl.store(lse_ptr + rows, lse, mask=rows < limit)


@kernel
def rectangle_dq_kernel(
    q_ptr, k_tiles, v_tiles, gate_tiles, first_ptr, rows_ptr, d_out_ptr, dq_ptr, d_gate_q_ptr,
    stride_qb, stride_qt, stride_qh, stride_gb, stride_gt, stride_gh, stride_dqb, stride_dqt,
    stride_dqh, TQ, TK, HQ, scale, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, HAS_GATE: tl.constexpr, HAS_DOC: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq and the gradient of gate_q of ROWS queries."""
    m0, q_head = tl.program_id(0) * ROWS, tl.program_id(1)
    b, hq = (q_head // HQ).to(tl.int64), (q_head % HQ).to(tl.int64)
    h = hq // GROUP
    q_head = q_head.to(tl.int64)
    q_ptr += b * stride_qb + hq * stride_qh
    d_out_ptr += b * stride_gb + hq * stride_gh
    dq_ptr += b * stride_dqb + hq * stride_dqh
    rows = m0 + tl.arange(0, ROWS)
    lo = 0
    first_key = rows
    if HAS_DOC:
        first_key = tl.load(first_ptr + b * TQ + rows, mask=rows < TQ, other=TK)
        lo = tl.maximum(tl.min(first_key, 0), 0) // BLOCK_N * BLOCK_N

    q = load_tile(q_ptr, m0, stride_qt, TQ, ROWS, BLOCK_D, HEAD_DIM)
    d_out = load_tile(d_out_ptr, m0, stride_gt, TQ, ROWS, BLOCK_DV, HEAD_DIM_V)
    bias, delta = load_rows(rows_ptr + q_head * tl.cdiv(TQ, ROWS) * ROWS * 2, m0, ROWS)
    dq = as_product(tl.zeros([ROWS, BLOCK_D], tl.float32))
    row_sum = tl.zeros([ROWS], tl.float32)
    middle = tl.maximum(lo, TK // BLOCK_N * BLOCK_N)
    for whole in tl.static_range(2):
        dq, row_sum = query_gradient(
            dq, row_sum, q, d_out, bias, delta, k_tiles, v_tiles, gate_tiles, None, b, h, hq, 0,
            lo if whole == 0 else middle, middle if whole == 0 else TK, 0.0, first_key, TK,
            scale * 1.4426950408889634, BLOCK_D, BLOCK_DV, BLOCK_N, whole == 0, HAS_GATE, HAS_DOC,
            PRECISION, STAGES,
        )  # fmt: skip
    store_tile(dq_ptr, m0, stride_dqt, TQ, dq * scale, ROWS, BLOCK_D, HEAD_DIM)
    if HAS_GATE:
        tl.store(d_gate_q_ptr + q_head * TQ + rows, row_sum, mask=rows < TQ)


@kernel
def rectangle_dkdv_kernel(
    q_tiles, d_out_tiles, k_ptr, v_ptr, gate_k_ptr, first_ptr, reach_ptr, rows_ptr, dk_ptr, dv_ptr,
    d_gate_k_ptr, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_dkb,
    stride_dkt, stride_dkh, stride_dvb, stride_dvt, stride_dvh, TQ, TK, HQ, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_DOC: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk, dv of ROWS keys over every query head of its group; the gradient of gate_k."""
    n0, head = tl.program_id(0) * ROWS, tl.program_id(1)
    H = HQ // GROUP
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    keys = n0 + tl.arange(0, ROWS)
    k = load_tile(k_ptr + b * stride_kb + h * stride_kh, n0, stride_kt, TK, ROWS, BLOCK_D, HEAD_DIM)
    v = load_tile(
        v_ptr + b * stride_vb + h * stride_vh, n0, stride_vt, TK, ROWS, BLOCK_DV, HEAD_DIM_V
    )
    reach = TQ  # no query from here on sees the tile
    if HAS_DOC:
        reach = tl.load(reach_ptr + b * tl.num_programs(0) + tl.program_id(0))
        first_ptr += b * TQ
    dk = as_product(tl.zeros([ROWS, BLOCK_D], tl.float32))
    dv = as_product(tl.zeros([ROWS, BLOCK_DV], tl.float32))
    for g in tl.range(GROUP, num_stages=1):
        hq = h * GROUP + g
        q_head = b * HQ + hq
        gate_k = keys.to(tl.float32)
        if HAS_GATE:
            gate_k = tl.load(gate_k_ptr + q_head * tl.cdiv(TK, ROWS) * ROWS + keys)
        col_sum = tl.zeros([ROWS], tl.float32)
        dk, dv, col_sum = key_pass(
            dk, dv, col_sum, k, v, q_tiles, d_out_tiles, rows_ptr + q_head * tl.cdiv(TQ, ROWS) *
            ROWS * 2, None, first_ptr, b, hq, 0, 0, reach, TQ, keys, gate_k, 0.0, scale *
            1.4426950408889634, BLOCK_D, BLOCK_DV, BLOCK_M, False, HAS_GATE, HAS_DOC, PRECISION,
            STAGES,
        )  # fmt: skip
        if HAS_GATE:
            tl.store(d_gate_k_ptr + q_head * TK + keys, col_sum, mask=keys < TK)
    store_tile(
        dk_ptr + b * stride_dkb + h * stride_dkh, n0, stride_dkt, TK, dk * scale, ROWS, BLOCK_D,
        HEAD_DIM,
    )  # fmt: skip
    store_tile(
        dv_ptr + b * stride_dvb + h * stride_dvh, n0, stride_dvt, TK, dv, ROWS, BLOCK_DV,
        HEAD_DIM_V,
    )  # fmt: skip


def _shared(q: Tensor, k: Tensor, v: Tensor, first_key: Tensor | None, rows: int) -> dict[str, Any]:
    """What the three kernels share."""
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


def _whole_tiles(x: Tensor, rows: int, value: float = 0.0) -> Tensor:
    """Copy of x [..., T] with `value` up to the end of its last tile. Never x itself: that of one
    head may have strides that no descriptor takes.
    """
    whole = x.new_full((*x.shape[:-1], tiles.cdiv(x.shape[-1], rows) * rows), value)
    whole[..., : x.shape[-1]] = x
    return whole


def _gates_of_keys(gate_k: Tensor | None, rows: int) -> Tensor | None:
    """-gate_k in log2 units, [B, HQ, whole tiles]."""
    return None if gate_k is None else _whole_tiles((gate_k * -LOG2_E).float(), rows)


def rectangle_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_q: Tensor | None,
    gate_k: Tensor | None,
    first_key: Tensor | None,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Merges attention of q [B, TQ, HQ, D] to k [B, TK, H, D], v [B, TK, H, DV] into the running
    out [B, TQ, HQ, DV] and lse [B, HQ, TQ], fp32 (lse may be -inf where out is zero).

    logits = scale q_i . k_j + gate_q_i + gate_k_j, natural, gate_q [B, HQ, TQ] and gate_k [B, HQ,
    TK]; query i sees the keys from first_key[b, i] on (int32, non-decreasing, of any size). Last
    dimensions of out and lse are contiguous. Rows that see nothing keep their bits.
    """
    assert out.stride(-1) == 1 and lse.stride(-1) == 1, (out.stride(), lse.stride())
    B, TQ, HQ, D = q.shape
    width = padded(max(D, v.shape[3]))
    # no keys of a diagonal take shared memory, as with reflections
    tile = config.forward_tiles(q.dtype, width, True, gate_k is not None, first_key is not None)
    k, scale = positive(k, scale)
    q, k, v = dense(q), dense(k), dense(v)
    rectangle_forward_kernel[(tiles.cdiv(TQ, tile.rows), B * HQ)](
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


def rectangle_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_q: Tensor | None,
    gate_k: Tensor | None,
    first_key: Tensor | None,
    lse: Tensor,
    delta: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """dq, dk, dv in fp32 and d_gate_q, d_gate_k like the gates (None without).

    lse and delta = rowsum(d_out * out), [B, HQ, TQ], are those of the finished rows.
    """
    q, k, v = (dense(differentiable(x)) for x in (q, k, v))
    d_out = dense(d_out.to(q.dtype))
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
    terms = _whole_tiles(bias, rows, float("-inf")), _whole_tiles(delta, rows)
    gates = _gates_of_keys(gate_k, rows)
    shared = {
        **_shared(q, k, v, first_key, rows),
        "HAS_GATE": gates is not None,
        "rows_ptr": torch.stack(terms, -1),
        "scale": scale,
    }
    rectangle_dq_kernel[(tiles.cdiv(TQ, rows), B * HQ)](
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
    rectangle_dkdv_kernel[(tiles.cdiv(TK, rows), B * H)](
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
