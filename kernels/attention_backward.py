"""Gradients of the attention over the dyadic squares.

With p = exp(logits - lse), delta = rowsum(d_out * out) and everything in the frame of its level:

    ds = p * (d_out v^T - delta)        d logits
    dv = p^T d_out                      dq = scale ds k         dk = scale ds^T q
    dG_i = rowsum_i(ds) - colsum_i(ds)  of the running gate sum G

Two passes, neither with atomics: one program per query tile (dq of every level, the gradient of the
local logits, row sums), one per key tile (dk of every level, dv, column sums). dq and dk of a level
are those of its squares alone; the sweep's backward joins the levels.
"""

import triton
import triton.language as tl

from .attention_forward import diagonal_logits, load_gate, load_keys, load_query_pair
from .tiles import GATE_SPAN, RUNTIME, load_full_tile, load_tile, rows_of_level, store_tile


@triton.jit(do_not_specialize=RUNTIME)
def delta_kernel(
    out_ptr, d_out_ptr, delta_ptr, stride_ob, stride_ot, stride_oh, stride_gb, stride_gt, stride_gh,
    T, HQ, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta [B, HQ, T] = rowsum(out * d_out), fp32."""
    m0, q_head = tl.program_id(0) * BLOCK_M, tl.program_id(1)
    b, hq = (q_head // HQ).to(tl.int64), q_head % HQ
    out = load_tile(
        out_ptr + b * stride_ob + hq * stride_oh, m0, stride_ot, T, BLOCK_M, BLOCK_DV, HEAD_DIM_V
    )
    d_out = load_tile(
        d_out_ptr + b * stride_gb + hq * stride_gh, m0, stride_gt, T, BLOCK_M, BLOCK_DV, HEAD_DIM_V
    )
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    rows = m0 + tl.arange(0, BLOCK_M)
    tl.store(delta_ptr + q_head.to(tl.int64) * T + rows, delta, mask=rows < T)


@triton.jit
def query_gradient(
    dq, row_sum, q, d_out, lse, delta, k_ptr, v_ptr, gate_ptr, offset_ptr, stride_kt, stride_vt, lo,
    hi, gate_q, gate_ref, first_key, T, scale, K_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_DOC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq (without scale) and row sums of ds over the keys lo ... hi - 1. WHOLE: no tile passes the
    end T.
    """
    for start in range(lo, hi, BLOCK_N):
        k = load_keys(k_ptr, start, stride_kt, T, BLOCK_N, BLOCK_D, K_WIDTH, WHOLE)
        v = load_keys(v_ptr, start, stride_vt, T, BLOCK_N, BLOCK_DV, HEAD_DIM_V, WHOLE)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_GATE:
            keys = start + tl.arange(0, BLOCK_N)
            s += (
                gate_q[:, None] - load_gate(gate_ptr, offset_ptr, keys, start, T, gate_ref)[None, :]
            )
        p = tl.math.exp2(s - lse[:, None])
        if HAS_DOC:
            p = tl.where(start + tl.arange(0, BLOCK_N)[None, :] >= first_key[:, None], p, 0.0)
        if not WHOLE:
            p = tl.where((start + tl.arange(0, BLOCK_N) < T)[None, :], p, 0.0)
        ds = p * (tl.dot(d_out, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        if HAS_GATE:
            row_sum += tl.sum(ds, 1)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq, row_sum


@triton.jit(do_not_specialize=RUNTIME)
def attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, q_levels_ptr, k_levels_ptr, local_ptr, gate_ptr, offset_ptr, start_ptr,
    lse_ptr, delta_ptr, d_out_ptr, dq_ptr, dq_levels_ptr, d_local_ptr, row_sum_ptr, stride_qb,
    stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_gb, stride_gt, stride_gh, stride_dqb, stride_dqt, stride_dqh, T, HQ, num_chunks,
    num_levels, total_rows, scale, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_PATH: tl.constexpr, HAS_GATE: tl.constexpr,
    HAS_DOC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Pass of one query tile. With reflections dq goes to the levels, without them to dq itself."""
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    q_head = tl.program_id(1)
    b, hq = (q_head // HQ).to(tl.int64), q_head % HQ
    h = hq // GROUP
    head = ((q_head // HQ) * (HQ // GROUP) + h).to(tl.int64)
    q_head = q_head.to(tl.int64)
    q_ptr += b * stride_qb + hq * stride_qh
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    q_levels_ptr += q_head * total_rows * BLOCK_D
    dq_levels_ptr += q_head * total_rows * BLOCK_D
    k_levels_ptr += head * total_rows * BLOCK_D
    local_ptr += q_head * num_chunks * CHUNK * CHUNK
    d_local_ptr += q_head * num_chunks * CHUNK * CHUNK
    gate_ptr += q_head * T
    offset_ptr += q_head * tl.cdiv(T, GATE_SPAN)
    logit_scale = scale * 1.4426950408889634

    row = tl.arange(0, BLOCK_M)
    rows = m0 + row
    gate_ref = tl.load(offset_ptr + m0 // GATE_SPAN) if HAS_GATE else 0.0
    gate_q = row.to(tl.float32)
    first_key = rows
    document = 0
    if HAS_GATE:
        gate_q = load_gate(gate_ptr, offset_ptr, rows, m0, T, gate_ref)
    if HAS_DOC:
        first_key = tl.load(start_ptr + b * T + rows, mask=rows < T, other=0)
        document = tl.load(start_ptr + b * T + m0)
    lse = (
        tl.load(lse_ptr + q_head * T + rows, mask=rows < T, other=float("inf")) * 1.4426950408889634
    )
    delta = tl.load(delta_ptr + q_head * T + rows, mask=rows < T, other=0.0)
    d_out = load_tile(
        d_out_ptr + b * stride_gb + hq * stride_gh, m0, stride_gt, T, BLOCK_M, BLOCK_DV, HEAD_DIM_V
    )

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if HAS_PATH:
        q = load_query_pair(q_levels_ptr, m0, T, BLOCK_D, CHUNK, BLOCK_M)
    else:
        q = load_tile(q_ptr, m0, stride_qt, T, BLOCK_M, BLOCK_D, HEAD_DIM)

    for part in tl.static_range(BLOCK_M // CHUNK):
        s = diagonal_logits(
            q, q, k_ptr, k_levels_ptr, local_ptr, m0, part, stride_kt, T, HEAD_DIM, BLOCK_D, CHUNK,
            BLOCK_M, HAS_PATH, PRECISION,
        )  # fmt: skip
        s *= logit_scale
        keys = m0 + part * CHUNK + tl.arange(0, CHUNK)
        if HAS_GATE:
            s += gate_q[:, None] - load_gate(gate_ptr, offset_ptr, keys, m0, T, gate_ref)[None, :]
        visible = (keys[None, :] <= rows[:, None]) & (rows < T)[:, None]
        if HAS_DOC:
            visible &= keys[None, :] >= first_key[:, None]
        p = tl.where(visible, tl.math.exp2(s - lse[:, None]), 0.0)
        v = load_tile(v_ptr, m0 + part * CHUNK, stride_vt, T, CHUNK, BLOCK_DV, HEAD_DIM_V)
        ds = p * (tl.dot(d_out, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        if HAS_GATE:
            row_sum += tl.sum(ds, 1)
        if HAS_PATH:
            own = (row // CHUNK == part) & (rows < num_chunks * CHUNK)
            pointers = (
                d_local_ptr + rows.to(tl.int64)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
            )
            tl.store(pointers, ds * scale, mask=own[:, None])
            if (BLOCK_M > CHUNK) and (part == 0):
                limit = tl.where(m0 + CHUNK < T, m0 // 2 + CHUNK, 0)
                k = load_tile(k_levels_ptr, m0 // 2, BLOCK_D, limit, CHUNK, BLOCK_D, BLOCK_D)
                square = tl.where(own[:, None], 0.0, ds).to(k.dtype)
                pair = tl.dot(square, k, input_precision=PRECISION) * scale
                pointers = (
                    dq_levels_ptr
                    + (m0 // 2 + row - CHUNK)[:, None] * BLOCK_D
                    + tl.arange(0, BLOCK_D)[None, :]
                )
                mask = (row >= CHUNK) & (rows < num_chunks * CHUNK)
                tl.store(pointers, pair.to(dq_levels_ptr.dtype.element_ty), mask=mask[:, None])
        else:
            k = load_tile(k_ptr, m0 + part * CHUNK, stride_kt, T, CHUNK, BLOCK_D, HEAD_DIM)
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)

    if HAS_PATH:
        row_base = 0
        for level in range(0, num_levels):
            half = CHUNK << level
            block = m0 // half
            if (half >= BLOCK_M) & (block % 2 == 1):
                left = (block - 1) * half
                shift = row_base - left // 2
                here = row_base + left // 2 + m0 - block * half
                end = row_base + left // 2 + num_chunks * CHUNK - block * half
                q = load_tile(q_levels_ptr, here, BLOCK_D, end, BLOCK_M, BLOCK_D, BLOCK_D)
                lo = tl.maximum(left, document // BLOCK_N * BLOCK_N)
                dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                dq, row_sum = query_gradient(
                    dq, row_sum, q, d_out, lse, delta, k_levels_ptr + tl.cast(shift, tl.int64) *
                    BLOCK_D, v_ptr, gate_ptr, offset_ptr, BLOCK_D, stride_vt, lo, block * half,
                    gate_q, gate_ref, first_key, T, logit_scale, BLOCK_D, BLOCK_D, HEAD_DIM_V,
                    BLOCK_DV, BLOCK_N, True, HAS_GATE, HAS_DOC, PRECISION,
                )  # fmt: skip
                store_tile(dq_levels_ptr, here, BLOCK_D, end, dq * scale, BLOCK_M, BLOCK_D, BLOCK_D)
            row_base += rows_of_level(T, level, CHUNK)
    else:
        dq, row_sum = query_gradient(
            dq, row_sum, q, d_out, lse, delta, k_ptr, v_ptr, gate_ptr, offset_ptr, stride_kt,
            stride_vt, document // BLOCK_N * BLOCK_N, m0, gate_q, gate_ref, first_key, T,
            logit_scale, HEAD_DIM, BLOCK_D, HEAD_DIM_V, BLOCK_DV, BLOCK_N, True, HAS_GATE, HAS_DOC,
            PRECISION,
        )  # fmt: skip
        store_tile(
            dq_ptr + b * stride_dqb + hq * stride_dqh,
            m0,
            stride_dqt,
            T,
            dq * scale,
            BLOCK_M,
            BLOCK_D,
            HEAD_DIM,
        )
    if HAS_GATE:
        tl.store(row_sum_ptr + q_head * T + rows, row_sum, mask=rows < T)


@triton.jit
def key_gradient(
    dk, dv, col_sum, s, v, q, d_out, lse, delta, visible, square, MASKED: tl.constexpr,
    NEEDS_DK: tl.constexpr, HAS_GATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of transposed base-2 logits s [N, M]: adds to dk (without scale), dv and the column
    sums of ds.

    MASKED: only `visible` pairs count at all, and only those of `square` reach dk.
    """
    p = tl.math.exp2(s - lse[None, :])
    if MASKED:
        p = tl.where(visible, p, 0.0)
    dv = tl.dot(p.to(d_out.dtype), d_out, dv, input_precision=PRECISION)
    if NEEDS_DK or HAS_GATE:
        ds = p * (tl.dot(v, tl.trans(d_out), input_precision=PRECISION) - delta[None, :])
        if HAS_GATE:
            col_sum += tl.sum(ds, 1)
        if NEEDS_DK:
            if MASKED:
                ds = tl.where(square, ds, 0.0)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv, col_sum


@triton.jit
def load_rows(lse_ptr, delta_ptr, rows, T):
    """Base-2 log-sum-exp and delta of query rows; a row past the end gets probability zero."""
    lse = tl.load(lse_ptr + rows, mask=rows < T, other=float("inf")) * 1.4426950408889634
    return lse, tl.load(delta_ptr + rows, mask=rows < T, other=0.0)


@triton.jit
def key_pass(
    dk, dv, col_sum, k, v, q_ptr, d_out_ptr, lse_ptr, delta_ptr, gate_ptr, offset_ptr, start_ptr,
    stride_q, stride_gt, lo, hi, T, keys, gate_k, gate_ref, scale, Q_WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    WHOLE: tl.constexpr, HAS_GATE: tl.constexpr, HAS_DOC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The query rows lo ... hi - 1 of one head, all of them after the keys. WHOLE: no tile passes
    the end T.
    """
    for m in range(lo, hi, BLOCK_M):
        rows = m + tl.arange(0, BLOCK_M)
        if WHOLE:
            q = load_full_tile(q_ptr, m, stride_q, BLOCK_M, BLOCK_D, Q_WIDTH)
            d_out = load_full_tile(d_out_ptr, m, stride_gt, BLOCK_M, BLOCK_DV, HEAD_DIM_V)
            lse = tl.load(lse_ptr + rows) * 1.4426950408889634
            delta = tl.load(delta_ptr + rows)
        else:
            q = load_tile(q_ptr, m, stride_q, T, BLOCK_M, BLOCK_D, Q_WIDTH)
            d_out = load_tile(d_out_ptr, m, stride_gt, T, BLOCK_M, BLOCK_DV, HEAD_DIM_V)
            lse, delta = load_rows(lse_ptr, delta_ptr, rows, T)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
        if HAS_GATE:
            gate_q = load_gate(gate_ptr, offset_ptr, rows, m, T, gate_ref)
            s += gate_q[None, :] - gate_k[:, None]
        visible = True
        if HAS_DOC:
            first_key = tl.load(start_ptr + rows, mask=rows < T, other=0)
            visible = keys[:, None] >= first_key[None, :]
        dk, dv, col_sum = key_gradient(
            dk,
            dv,
            col_sum,
            s,
            v,
            q,
            d_out,
            lse,
            delta,
            visible,
            visible,
            HAS_DOC,
            True,
            HAS_GATE,
            PRECISION,
        )
    return dk, dv, col_sum


@triton.jit(do_not_specialize=RUNTIME)
def attention_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, q_levels_ptr, k_levels_ptr, local_ptr, gate_ptr, offset_ptr, start_ptr,
    end_ptr, lse_ptr, delta_ptr, d_out_ptr, dk_ptr, dv_ptr, dk_levels_ptr, col_sum_ptr, stride_qb,
    stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_gb, stride_gt, stride_gh, stride_dkb, stride_dkt, stride_dkh, stride_dvb, stride_dvt,
    stride_dvh, T, HQ, num_chunks, num_levels, total_rows, scale, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_PATH: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_DOC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Pass of one key tile over every query head of its group; logits are transposed, [BLOCK_N,
    rows].
    """
    n0 = tl.program_id(0) * BLOCK_N
    head = tl.program_id(1)
    H = HQ // GROUP
    b, h = (head // H).to(tl.int64), head % H
    q_head = ((head // H) * HQ + h * GROUP).to(tl.int64)
    head = head.to(tl.int64)
    q_ptr += b * stride_qb + h * GROUP * stride_qh
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    d_out_ptr += b * stride_gb + h * GROUP * stride_gh
    q_levels_ptr += q_head * total_rows * BLOCK_D
    k_levels_ptr += head * total_rows * BLOCK_D
    dk_levels_ptr += head * total_rows * BLOCK_D
    local_ptr += q_head * num_chunks * CHUNK * CHUNK
    lse_ptr += q_head * T
    delta_ptr += q_head * T
    spans = tl.cdiv(T, GATE_SPAN)
    gate_ptr += q_head * T
    offset_ptr += q_head * spans
    col_sum_ptr += q_head * T
    start_ptr += b * T
    logit_scale = scale * 1.4426950408889634

    key = tl.arange(0, BLOCK_N)
    keys = n0 + key
    v = load_tile(v_ptr, n0, stride_vt, T, BLOCK_N, BLOCK_DV, HEAD_DIM_V)
    reach = T
    if HAS_DOC:
        reach = tl.load(end_ptr + b * T + tl.minimum(n0 + BLOCK_N, T) - 1)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if HAS_PATH:
        pair_end = tl.where((n0 + CHUNK < T) & (BLOCK_N > CHUNK), n0 // 2 + CHUNK, 0)
        k = load_tile(k_levels_ptr, n0 // 2, BLOCK_D, pair_end, BLOCK_N, BLOCK_D, BLOCK_D)
    else:
        k = load_tile(k_ptr, n0, stride_kt, T, BLOCK_N, BLOCK_D, HEAD_DIM)

    for g in tl.range(GROUP, num_stages=1):
        col_sum = tl.zeros([BLOCK_N], tl.float32)
        gate_ref = tl.load(offset_ptr + g * spans + n0 // GATE_SPAN) if HAS_GATE else 0.0
        gate_k = key.to(tl.float32)
        if HAS_GATE:
            gate_k = tl.load(gate_ptr + g * T + keys, mask=keys < T, other=0.0)
        for part in tl.static_range(BLOCK_N // CHUNK):
            m0 = n0 + part * CHUNK
            rows = m0 + tl.arange(0, CHUNK)
            lse, delta = load_rows(lse_ptr + g * T, delta_ptr + g * T, rows, T)
            d_out = load_tile(
                d_out_ptr + g * stride_gh, m0, stride_gt, T, CHUNK, BLOCK_DV, HEAD_DIM_V
            )
            own = (key // CHUNK == part)[:, None]
            if HAS_PATH:
                pointers = (
                    local_ptr
                    + (g * num_chunks * CHUNK + rows)[None, :] * CHUNK
                    + (key % CHUNK)[:, None]
                )
                s = tl.load(pointers, mask=own & (rows < T)[None, :], other=0.0)
                limit = tl.where(part > 0, n0 // 2 + T - m0, 0)
                q = load_tile(
                    q_levels_ptr + tl.cast(g, tl.int64) * total_rows * BLOCK_D,
                    n0 // 2,
                    BLOCK_D,
                    limit,
                    CHUNK,
                    BLOCK_D,
                    BLOCK_D,
                )
                if part > 0:
                    s = tl.where(own, s, tl.dot(k, tl.trans(q), input_precision=PRECISION))
            else:
                q = load_tile(q_ptr + g * stride_qh, m0, stride_qt, T, CHUNK, BLOCK_D, HEAD_DIM)
                s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            s *= logit_scale
            if HAS_GATE:
                gate_q = load_gate(gate_ptr + g * T, offset_ptr + g * spans, rows, n0, T, gate_ref)
                s += gate_q[None, :] - gate_k[:, None]
            visible = (keys[:, None] <= rows[None, :]) & (rows < T)[None, :]
            if HAS_DOC:
                first_key = tl.load(start_ptr + rows, mask=rows < T, other=0)
                visible &= keys[:, None] >= first_key[None, :]
            # the local logits' dk is the chunk backward's; only the square between two chunks
            # enters here
            square = visible if not HAS_PATH else visible & (own == 0)
            dk, dv, col_sum = key_gradient(
                dk, dv, col_sum, s, v, q, d_out, lse, delta, visible, square, True, (not HAS_PATH)
                or part > 0, HAS_GATE, PRECISION,
            )  # fmt: skip
        if not HAS_PATH:
            lo = n0 + BLOCK_N
            middle = tl.maximum(lo, tl.minimum(reach, T // BLOCK_M * BLOCK_M))
            for whole in tl.static_range(2):
                dk, dv, col_sum = key_pass(
                    dk, dv, col_sum, k, v, q_ptr + g * stride_qh, d_out_ptr + g * stride_gh, lse_ptr
                    + g * T, delta_ptr + g * T, gate_ptr + g * T, offset_ptr + g * spans, start_ptr,
                    stride_qt, stride_gt, lo if whole == 0 else middle, middle if whole == 0 else
                    reach, T, keys, gate_k, gate_ref, logit_scale, HEAD_DIM, BLOCK_D, HEAD_DIM_V,
                    BLOCK_DV, BLOCK_M, whole == 0, HAS_GATE, HAS_DOC, PRECISION,
                )  # fmt: skip
        if HAS_GATE:
            tl.store(col_sum_ptr + g * T + keys, col_sum, mask=keys < T)

    if HAS_PATH:
        if BLOCK_N > CHUNK:
            store_tile(
                dk_levels_ptr, n0 // 2, BLOCK_D, pair_end, dk * scale, BLOCK_N, BLOCK_D, BLOCK_D
            )
        row_base = 0
        for level in range(0, num_levels):
            half = CHUNK << level
            right = (n0 // half + 1) * half
            if (half >= BLOCK_N) & (n0 // half % 2 == 0) & (right < T):
                here = row_base + (right - half) // 2 + n0 % half
                end = row_base + (right + half) // 2
                shift = tl.cast(row_base + (right - half) // 2 - right, tl.int64)
                k = load_tile(k_levels_ptr, here, BLOCK_D, end, BLOCK_N, BLOCK_D, BLOCK_D)
                dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
                for g in tl.range(GROUP, num_stages=1):
                    col_sum = tl.zeros([BLOCK_N], tl.float32)
                    gate_ref = (
                        tl.load(offset_ptr + g * spans + n0 // GATE_SPAN) if HAS_GATE else 0.0
                    )
                    gate_k = key.to(tl.float32)
                    if HAS_GATE:
                        gate_k = tl.load(gate_ptr + g * T + keys)
                    hi = tl.minimum(right + half, reach)
                    middle = tl.maximum(right, tl.minimum(hi, T // BLOCK_M * BLOCK_M))
                    for whole in tl.static_range(2):
                        dk, dv, col_sum = key_pass(
                            dk, dv, col_sum, k, v, q_levels_ptr + (g * total_rows + shift) *
                            BLOCK_D, d_out_ptr + g * stride_gh, lse_ptr + g * T, delta_ptr + g * T,
                            gate_ptr + g * T, offset_ptr + g * spans, start_ptr, BLOCK_D, stride_gt,
                            right if whole == 0 else middle, middle if whole == 0 else hi, T, keys,
                            gate_k, gate_ref, logit_scale, BLOCK_D, BLOCK_D, HEAD_DIM_V, BLOCK_DV,
                            BLOCK_M, whole == 0, HAS_GATE, HAS_DOC, PRECISION,
                        )  # fmt: skip
                    if HAS_GATE:
                        tl.debug_barrier()  # the sums so far were stored by other threads
                        col_sum += tl.load(col_sum_ptr + g * T + keys)
                        tl.store(col_sum_ptr + g * T + keys, col_sum)
                store_tile(dk_levels_ptr, here, BLOCK_D, end, dk * scale, BLOCK_N, BLOCK_D, BLOCK_D)
            row_base += rows_of_level(T, level, CHUNK)
    else:
        store_tile(
            dk_ptr + b * stride_dkb + h * stride_dkh,
            n0,
            stride_dkt,
            T,
            dk * scale,
            BLOCK_N,
            BLOCK_D,
            HEAD_DIM,
        )
    store_tile(
        dv_ptr + b * stride_dvb + h * stride_dvh,
        n0,
        stride_dvt,
        T,
        dv,
        BLOCK_N,
        BLOCK_DV,
        HEAD_DIM_V,
    )
