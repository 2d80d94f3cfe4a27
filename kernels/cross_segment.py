"""Attention between two segments of a sequence: queries of one, keys of an earlier one, in one
frame. The passes are those of the off-diagonal blocks; documents alone hide keys.

    logits = scale q_i . k_j + gate_q_i + gate_k_j

The gate comes in log2 units and as -gate_k, which makes it the difference of sums that the passes
know. first_key never decreases from one query to the next, so that the queries which see any key,
or those which see some key tile, are the first ones.
"""

import triton.language as tl

from .attention_backward import (
    KeyGradient,
    KeyRows,
    Queries,
    QueryGradient,
    QueryRows,
    key_pass,
    load_rows,
    query_pass,
)
from .attention_forward import Keys, Softmax, attend
from .products import as_product
from .tiles import LN_2, LOG2_E, kernel, load_tile, store_tile


@kernel
def cross_segment_forward_kernel(
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
    m_i = tl.load(lse_ptr + rows, mask=rows < limit, other=float("-inf")) * LOG2_E
    state = Softmax(acc, tl.where(m_i == float("-inf"), 0.0, 1.0), m_i)
    middle = tl.maximum(lo, TK // BLOCK_N * BLOCK_N)
    for full in tl.static_range(2):
        state = attend(
            state, q, k_tiles, v_tiles, Keys(gate_tiles, None, b, h, hq), 0,
            lo if full == 0 else middle, middle if full == 0 else TK, gate_q, 0.0, first_key, TK,
            scale, BLOCK_D, BLOCK_DV, BLOCK_N, full == 0, HAS_GATE, HAS_DOC, PRECISION,
        )  # fmt: skip
    out = state.acc / state.l_i[:, None]
    store_tile(out_ptr, m0, stride_ot, limit, out, ROWS, BLOCK_DV, HEAD_DIM_V)
    lse = (state.m_i + tl.math.log2(state.l_i)) * LN_2
    tl.store(lse_ptr + rows, lse, mask=rows < limit)


@kernel
def cross_segment_dq_kernel(
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
    of_rows = QueryRows(d_out, bias, delta, 0.0, first_key)
    dq = as_product(tl.zeros([ROWS, BLOCK_D], tl.float32))
    grads = QueryGradient(dq, tl.zeros([ROWS], tl.float32))
    middle = tl.maximum(lo, TK // BLOCK_N * BLOCK_N)
    for full in tl.static_range(2):
        grads = query_pass(
            grads, q, of_rows, k_tiles, v_tiles, Keys(gate_tiles, None, b, h, hq), 0,
            lo if full == 0 else middle, middle if full == 0 else TK, TK, scale * LOG2_E, BLOCK_D,
            BLOCK_DV, BLOCK_N, full == 0, HAS_GATE, HAS_DOC, PRECISION, STAGES,
        )  # fmt: skip
    store_tile(dq_ptr, m0, stride_dqt, TQ, grads.dq * scale, ROWS, BLOCK_D, HEAD_DIM)
    if HAS_GATE:
        tl.store(d_gate_q_ptr + q_head * TQ + rows, grads.row_sum, mask=rows < TQ)


@kernel
def cross_segment_dkdv_kernel(
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
        group_rows_ptr = rows_ptr + q_head * tl.cdiv(TQ, ROWS) * ROWS * 2
        dk, dv, col_sum = key_pass(
            KeyGradient(dk, dv, col_sum), KeyRows(k, v, keys, gate_k, 0.0),
            q_tiles, d_out_tiles, Queries(group_rows_ptr, None, first_ptr, b, hq), 0, 0, reach, TQ,
            scale * LOG2_E, BLOCK_D, BLOCK_DV, BLOCK_M, False, HAS_GATE, HAS_DOC, PRECISION, STAGES,
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
