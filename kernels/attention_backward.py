"""Gradients of the attention over the off-diagonal blocks of the dyadic levels.

With p = exp(logits - lse), delta = rowsum(d_out * out) and everything in the frame of its level:

    ds = p * (d_out v^T - delta)        d logits
    dv = p^T d_out                      dq = scale ds k         dk = scale ds^T q
    dG_i = rowsum_i(ds) - colsum_i(ds)  of the running gate sum G

Two passes, neither with atomics: one program per query chunk (dq, the gradient of the intra-chunk
logits, row sums), one per key chunk (dk, dv, column sums). Levels come from the top down, so that
dq and dk move along: with what came back from above, P the sibling's product,

    right block:  q+ = P q      dq = P^T dq+ + that of its keys          dP += dq+ q^T
    left block:   k+ = P^T k    dk = P dk+   + that of its queries       dP += k dk+^T

dq+ and dk+ are kept for dP; at the end dq and dk are the gradients of q_start and k_end. Nothing
comes from above the last level, but to a segment of a longer sequence: from the other segments.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .attention_forward import (
    Keys,
    diagonal_logits,
    gate_between,
    load_documents,
    place_of_queries,
    seen_from,
)
from .carry import key_moves, query_moves
from .levels import blocks_of_level, rows_of_level
from .products import as_product, move
from .tiles import (
    GATE_SPAN,
    LOG2_E,
    gate_rows,
    kernel,
    load_full_tile,
    load_head_row,
    load_head_tile,
    load_product,
    load_tile,
    store_tile,
)


@kernel
def row_kernel(
    out_ptr, d_out_ptr, lse_ptr, gate_ptr, rows_ptr, stride_ob, stride_ot, stride_oh, stride_gb,
    stride_gt, stride_gh, T, HQ, num_chunks, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Computes bias = gate - lse in log2 units and delta = rowsum(out * d_out) of every row, side
    by side. Past the end bias is -inf, so that such a row of a chunk gets probability zero.
    """
    m0, q_head = tl.program_id(0) * CHUNK, tl.program_id(1)
    b, hq = (q_head // HQ).to(tl.int64), q_head % HQ
    out_ptr += b * stride_ob + hq * stride_oh
    d_out_ptr += b * stride_gb + hq * stride_gh
    out = load_tile(out_ptr, m0, stride_ot, T, CHUNK, BLOCK_DV, HEAD_DIM_V)
    d_out = load_tile(d_out_ptr, m0, stride_gt, T, CHUNK, BLOCK_DV, HEAD_DIM_V)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    rows = m0 + tl.arange(0, CHUNK)
    q_head = q_head.to(tl.int64)
    lse = tl.load(lse_ptr + q_head * T + rows, mask=rows < T, other=float("inf"))
    bias = lse * -LOG2_E
    if HAS_GATE:
        bias += tl.load(gate_ptr + q_head * gate_rows(T) + rows, mask=rows < T, other=0.0)
    rows_ptr += q_head * num_chunks * CHUNK * 2
    tl.store(rows_ptr + rows * 2, bias)
    tl.store(rows_ptr + rows * 2 + 1, delta)


@triton.jit
def load_rows(rows_ptr, first, ROWS: tl.constexpr):
    """Loads bias and delta of consecutive query rows. Side by side they are elements enough for the
    compiler to copy each once; alone, every warp would fetch all of them.
    """
    pair = tl.load(rows_ptr + (first + tl.arange(0, ROWS))[:, None] * 2 + tl.arange(0, 2)[None, :])
    return tl.split(pair)


class QueryGradient(NamedTuple):
    """Sums of the dq pass for a tile of query rows."""

    dq: tl.tensor  # [M, D], without scale
    row_sum: tl.tensor  # [M], of ds


class QueryRows(NamedTuple):
    """Query rows of the dq pass, beside q: see `load_rows`, `Documents`."""

    d_out: tl.tensor
    bias: tl.tensor
    delta: tl.tensor
    gate_ref: tl.tensor
    first_key: tl.tensor


@triton.jit
def query_step(
    grads, s, rows, k, v, start, T, BLOCK_N: tl.constexpr, FULL: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_DOC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes one tile of base-2 logits s [M, N], less log-sum-exp, and adds to the `QueryGradient`.
    FULL: the tile does not pass the end T.
    """
    dq, row_sum = grads
    p = tl.math.exp2(s)
    if HAS_DOC:
        p = tl.where(start + tl.arange(0, BLOCK_N)[None, :] >= rows.first_key[:, None], p, 0.0)
    if not FULL:
        p = tl.where((start + tl.arange(0, BLOCK_N) < T)[None, :], p, 0.0)
    ds = p * (tl.dot(rows.d_out, tl.trans(v), input_precision=PRECISION) - rows.delta[:, None])
    if HAS_GATE:
        row_sum += tl.sum(ds, 1)
    dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return QueryGradient(dq, row_sum)


@triton.jit
def query_pass(
    grads, q, rows, k_tiles, v_tiles, keys, shift, lo, hi, T, scale, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr, HAS_GATE: tl.constexpr,
    HAS_DOC: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds to the `QueryGradient` of the rows that of the `Keys` lo ... hi - 1: see `attend`.

    Unless STAGES is None, the loads of the next tile are issued before the second half of this
    one's work, at the loop's end otherwise: the compiler puts a branch (always taken) behind them.
    """
    limit = None if FULL else T
    for start in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
        k = load_head_tile(k_tiles, keys.b, keys.h, start + shift, limit, BLOCK_N, BLOCK_D)
        v = load_head_tile(v_tiles, keys.b, keys.h, start, limit, BLOCK_N, BLOCK_DV)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_GATE:
            between = gate_between(keys.offset_ptr, start, rows.gate_ref)
            row = (rows.bias + between)[:, None]
            s += row - load_head_row(keys.gate_tiles, keys.b, keys.hq, start, BLOCK_N)
        else:
            s += rows.bias[:, None]
        if STAGES is None or start < hi:
            grads = query_step(
                grads, s, rows, k, v, start, T, BLOCK_N, FULL, HAS_GATE, HAS_DOC, PRECISION
            )
    return grads


@kernel
def attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, q_levels_ptr, k_tiles, v_tiles, intra_ptr, product_tiles, gate_ptr,
    gate_tiles, offset_ptr, start_ptr, rows_ptr, d_out_ptr, incoming_ptr, dq_ptr, dq_moved_ptr,
    d_intra_ptr, row_sum_ptr, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh, stride_gb, stride_gt, stride_gh, stride_eb, stride_et,
    stride_eh, stride_dqb, stride_dqt, stride_dqh, T, HQ, num_chunks, num_levels, total_rows,
    moved_rows, total_blocks, scale, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_PATH: tl.constexpr, HAS_GATE: tl.constexpr, HAS_DOC: tl.constexpr,
    PRECISION: tl.constexpr, MOVE: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Computes dq of one query tile. It is that of q_start with reflections, of q without.
    `incoming` is the gradient of the queries at the start of the segment. SPLIT: keys that every
    row sees have a loop of their own, without a mask.
    """
    at = place_of_queries(HQ, GROUP, CHUNK)
    m0, b, hq, h, q_head = at
    q_ptr += b * stride_qb + hq * stride_qh
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    d_out_ptr += b * stride_gb + hq * stride_gh
    q_levels_ptr += q_head * total_rows * BLOCK_D
    dq_moved_ptr += q_head * moved_rows * BLOCK_D
    intra_ptr += q_head * num_chunks * CHUNK * CHUNK
    d_intra_ptr += q_head * num_chunks * CHUNK * CHUNK
    gate_ptr += q_head * gate_rows(T)
    offset_ptr += q_head * tl.cdiv(T, GATE_SPAN)
    logit_scale = scale * LOG2_E

    row = tl.arange(0, CHUNK)
    rows = m0 + row
    gate_ref = tl.load(offset_ptr + m0 // GATE_SPAN) if HAS_GATE else 0.0
    documents = load_documents(start_ptr, at, rows, T, CHUNK, HAS_DOC)
    bias, delta = load_rows(rows_ptr + q_head * num_chunks * CHUNK * 2, m0, CHUNK)
    d_out = load_tile(d_out_ptr, m0, stride_gt, T, CHUNK, BLOCK_DV, HEAD_DIM_V)
    of_rows = QueryRows(d_out, bias, delta, gate_ref, documents.first_key)

    dq = tl.zeros([CHUNK, BLOCK_D], tl.float32)
    row_sum = tl.zeros([CHUNK], tl.float32)
    q = load_tile(q_ptr, m0, stride_qt, T, CHUNK, BLOCK_D, HEAD_DIM)
    s = diagonal_logits(
        q, k_ptr, intra_ptr, m0, stride_kt, T, HEAD_DIM, BLOCK_D, CHUNK, HAS_PATH, PRECISION
    )
    s = s * logit_scale + bias[:, None]
    if HAS_GATE:
        s -= tl.load(gate_ptr + rows, mask=rows < T, other=0.0)[None, :]
    visible = (rows[None, :] <= rows[:, None]) & (rows < T)[:, None]
    if HAS_DOC:
        visible &= rows[None, :] >= documents.first_key[:, None]
    p = tl.where(visible, tl.math.exp2(s), 0.0)
    v = load_tile(v_ptr, m0, stride_vt, T, CHUNK, BLOCK_DV, HEAD_DIM_V)
    ds = p * (tl.dot(d_out, tl.trans(v), input_precision=PRECISION) - delta[:, None])
    if HAS_GATE:
        row_sum += tl.sum(ds, 1)

    if HAS_PATH:
        store_tile(d_intra_ptr, m0, CHUNK, m0 + CHUNK, ds * scale, CHUNK, CHUNK, CHUNK)
        SEGMENT: tl.constexpr = incoming_ptr is not None
        if SEGMENT:
            incoming_ptr += b * stride_eb + hq * stride_eh
            incoming = load_tile(incoming_ptr, m0, stride_et, T, CHUNK, BLOCK_D, HEAD_DIM)
            dq = as_product(incoming.to(tl.float32) / scale)
        row_base = total_rows
        block_base = total_blocks - 2
        for step in range(num_levels):
            level = num_levels - 1 - step
            half = CHUNK << level
            block = (m0 // CHUNK) >> level
            row_base -= rows_of_level(T, level, CHUNK)
            block_base -= blocks_of_level(T, level, CHUNK)
            if (block % 2 == 1) & ((block * half > documents.first) | SEGMENT):
                left = (block - 1) * half
                here = row_base + left // 2 + m0 - block * half
                q_here = load_full_tile(q_levels_ptr, here, BLOCK_D, CHUNK, BLOCK_D, BLOCK_D)
                if query_moves(block, half, documents.first, SEGMENT):
                    store_tile(
                        dq_moved_ptr, here, BLOCK_D, moved_rows, dq * scale, CHUNK, BLOCK_D, BLOCK_D
                    )
                    product = load_product(product_tiles, b, h, block_base + block - 1, BLOCK_D)
                    dq = move(dq, product, False, MOVE)
                shift = row_base - left // 2
                lo = tl.maximum(left, documents.first // BLOCK_N * BLOCK_N)
                middle = block * half
                if SPLIT or not HAS_DOC:
                    middle = seen_from(documents.last, lo, middle, BLOCK_N, HAS_DOC)
                for seen in tl.static_range(0 if HAS_DOC else 1, 2 if SPLIT or not HAS_DOC else 1):
                    if seen or lo < middle:  # an empty loop still asks for its first tiles
                        dq, row_sum = query_pass(
                            QueryGradient(dq, row_sum), q_here, of_rows,
                            k_tiles, v_tiles, Keys(gate_tiles, offset_ptr, b, h, hq), shift,
                            middle if seen else lo, block * half if seen else middle, T,
                            logit_scale, BLOCK_D, BLOCK_DV, BLOCK_N, True, HAS_GATE, not seen,
                            PRECISION, STAGES,
                        )  # fmt: skip
    else:
        k = load_tile(k_ptr, m0, stride_kt, T, CHUNK, BLOCK_D, HEAD_DIM)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        if m0 > 0:  # a branch, so that the diagonal's tiles and the loop's share their memory
            dq, row_sum = query_pass(
                QueryGradient(dq, row_sum), q, of_rows,
                k_tiles, v_tiles, Keys(gate_tiles, offset_ptr, b, h, hq), 0,
                documents.first // BLOCK_N * BLOCK_N, m0, T, logit_scale, BLOCK_D, BLOCK_DV,
                BLOCK_N, True, HAS_GATE, HAS_DOC, PRECISION, STAGES,
            )  # fmt: skip
    dq_ptr += b * stride_dqb + hq * stride_dqh
    store_tile(dq_ptr, m0, stride_dqt, T, dq * scale, CHUNK, BLOCK_D, HEAD_DIM)
    if HAS_GATE:
        tl.store(row_sum_ptr + q_head * T + rows, row_sum, mask=rows < T)


class KeyGradient(NamedTuple):
    """Sums of the dk, dv pass for a tile of keys."""

    dk: tl.tensor  # [N, D], without scale
    dv: tl.tensor  # [N, DV]
    col_sum: tl.tensor  # [N], of ds


class KeyRows(NamedTuple):
    """The keys of a program: their tiles, positions, gates and the offset of their span."""

    k: tl.tensor
    v: tl.tensor
    keys: tl.tensor
    gate_k: tl.tensor
    gate_ref: tl.tensor


class Queries(NamedTuple):
    """One head whose queries pass by a key tile; tiles of q and d_out apart, as with `Keys`."""

    rows_ptr: tl.tensor
    offset_ptr: tl.tensor
    start_ptr: tl.tensor
    b: tl.tensor
    q_head: tl.tensor


@triton.jit
def key_step(
    grads, s, v, q, d_out, delta, visible, MASKED: tl.constexpr, NEEDS_DK: tl.constexpr,
    HAS_GATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes one tile of transposed base-2 logits s [N, M], less log-sum-exp, and adds to the
    `KeyGradient`. MASKED: only `visible` pairs count.
    """
    dk, dv, col_sum = grads
    p = tl.math.exp2(s)
    if MASKED:
        p = tl.where(visible, p, 0.0)
    dv = tl.dot(p.to(d_out.dtype), d_out, dv, input_precision=PRECISION)
    if NEEDS_DK or HAS_GATE:
        ds = p * (tl.dot(v, tl.trans(d_out), input_precision=PRECISION) - delta[None, :])
        if HAS_GATE:
            col_sum += tl.sum(ds, 1)
        if NEEDS_DK:
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return KeyGradient(dk, dv, col_sum)


@triton.jit
def key_pass(
    grads, tile, q_tiles, d_out_tiles, queries, shift, lo, hi, T, scale, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr, HAS_GATE: tl.constexpr,
    HAS_DOC: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds to the `KeyGradient` of the tile's `KeyRows` that of the `Queries` lo ... hi - 1: all of
    them after the keys, or with CAUSAL not; query i is row i + shift of its source. Rows past the
    end have a bias of -inf. STAGES: see `query_pass`.
    """
    for m in tl.range(lo, hi, BLOCK_M, num_stages=STAGES):
        rows = m + tl.arange(0, BLOCK_M)
        b, q_head = queries.b, queries.q_head
        q = load_head_tile(q_tiles, b, q_head, m + shift, T + shift, BLOCK_M, BLOCK_D)
        d_out = load_head_tile(d_out_tiles, b, q_head, m, T, BLOCK_M, BLOCK_DV)
        bias, delta = load_rows(queries.rows_ptr, m, BLOCK_M)
        s = tl.dot(tile.k, tl.trans(q), input_precision=PRECISION) * scale + bias[None, :]
        if HAS_GATE:
            s -= (tile.gate_k + gate_between(queries.offset_ptr, m, tile.gate_ref))[:, None]
        visible = True
        if CAUSAL:
            visible = tile.keys[:, None] <= rows[None, :]
        if HAS_DOC:
            first_key = tl.load(queries.start_ptr + rows, mask=rows < T, other=0)
            visible &= tile.keys[:, None] >= first_key[None, :]
        if STAGES is None or m < hi:
            grads = key_step(
                grads, s, tile.v, q, d_out, delta, visible, HAS_DOC or CAUSAL, True, HAS_GATE,
                PRECISION,
            )  # fmt: skip
    return grads


@kernel
def attention_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, q_tiles, d_out_tiles, k_levels_ptr, intra_ptr, product_tiles, gate_ptr,
    offset_ptr, start_ptr, end_ptr, rows_ptr, d_out_ptr, incoming_ptr, dk_ptr, dv_ptr, dk_moved_ptr,
    col_sum_ptr, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb,
    stride_vt, stride_vh, stride_gb, stride_gt: tl.constexpr, stride_gh, stride_eb, stride_et,
    stride_eh, stride_dkb, stride_dkt, stride_dkh, stride_dvb, stride_dvt, stride_dvh, T, HQ,
    num_chunks, num_levels, total_rows, moved_rows, total_blocks, scale, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, HAS_PATH: tl.constexpr, HAS_GATE: tl.constexpr,
    HAS_DOC: tl.constexpr, PRECISION: tl.constexpr, MOVE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes dk and dv of one key tile over every query head of its group; logits are transposed,
    [CHUNK, rows]. dk is that of k_end with reflections, of k without. `incoming` is the gradient of
    the keys at the end of the segment.
    """
    n0 = tl.program_id(0) * CHUNK
    head = tl.program_id(1)
    H = HQ // GROUP
    b, h = (head // H).to(tl.int64), head % H
    q_head = ((head // H) * HQ + h * GROUP).to(tl.int64)
    head = head.to(tl.int64)
    q_ptr += b * stride_qb + h * GROUP * stride_qh
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    dv_ptr += b * stride_dvb + h * stride_dvh
    d_out_ptr += b * stride_gb + h * GROUP * stride_gh
    k_levels_ptr += head * total_rows * BLOCK_D
    dk_moved_ptr += head * moved_rows * BLOCK_D
    intra_ptr += q_head * num_chunks * CHUNK * CHUNK
    rows_ptr += q_head * num_chunks * CHUNK * 2
    spans = tl.cdiv(T, GATE_SPAN)
    gate_ptr += q_head * gate_rows(T)
    offset_ptr += q_head * spans
    col_sum_ptr += q_head * T
    start_ptr += b * T
    logit_scale = scale * LOG2_E

    key = tl.arange(0, CHUNK)
    keys = n0 + key
    v = load_tile(v_ptr, n0, stride_vt, T, CHUNK, BLOCK_DV, HEAD_DIM_V)
    k = load_tile(k_ptr, n0, stride_kt, T, CHUNK, BLOCK_D, HEAD_DIM)
    reach = T
    seen_until = T
    if HAS_DOC:
        reach = tl.load(end_ptr + b * T + tl.minimum(n0 + CHUNK, T) - 1)
        seen_until = tl.load(end_ptr + b * T + n0)  # by these queries every key
    dv = tl.zeros([CHUNK, BLOCK_DV], tl.float32)
    dk = tl.zeros([CHUNK, BLOCK_D], tl.float32)

    for g in tl.range(GROUP, num_stages=1):
        col_sum = tl.zeros([CHUNK], tl.float32)
        gate_ref = tl.load(offset_ptr + g * spans + n0 // GATE_SPAN) if HAS_GATE else 0.0
        gate_k = key.to(tl.float32)
        if HAS_GATE:
            gate_k = tl.load(gate_ptr + g * spans * GATE_SPAN + keys, mask=keys < T, other=0.0)
        group_rows_ptr = rows_ptr + g * num_chunks * CHUNK * 2
        if HAS_PATH:
            # the intra-chunk logits' dk is the chunk backward's
            first = (g * num_chunks * CHUNK + n0).to(tl.int64) * CHUNK
            s = tl.load(intra_ptr + first + key[None, :] * CHUNK + key[:, None])
            bias, delta = load_rows(group_rows_ptr, n0, CHUNK)
            s = s * logit_scale + bias[None, :]
            if HAS_GATE:
                s -= gate_k[:, None]
            visible = keys[:, None] <= keys[None, :]
            if HAS_DOC:
                first_key = tl.load(start_ptr + keys, mask=keys < T, other=0)
                visible &= keys[:, None] >= first_key[None, :]
            d_out = load_tile(
                d_out_ptr + g * stride_gh, n0, stride_gt, T, CHUNK, BLOCK_DV, HEAD_DIM_V
            )
            dk, dv, col_sum = key_step(
                KeyGradient(dk, dv, col_sum), s, v, d_out, d_out, delta, visible, True, False,
                HAS_GATE, PRECISION,
            )  # fmt: skip
        else:
            for part in tl.static_range(2):  # the diagonal, what follows
                dk, dv, col_sum = key_pass(
                    KeyGradient(dk, dv, col_sum),
                    KeyRows(k, v, keys, gate_k, gate_ref),
                    q_tiles, d_out_tiles,
                    Queries(group_rows_ptr, offset_ptr + g * spans, start_ptr, b, h * GROUP + g),
                    0, n0 + CHUNK if part else n0, reach if part else n0 + CHUNK, T, logit_scale,
                    BLOCK_D, BLOCK_DV, BLOCK_M, part == 0, HAS_GATE, HAS_DOC, PRECISION, STAGES,
                )  # fmt: skip
        if HAS_GATE:
            tl.store(col_sum_ptr + g * T + keys, col_sum, mask=keys < T)

    if HAS_PATH:
        SEGMENT: tl.constexpr = incoming_ptr is not None
        if SEGMENT:
            incoming_ptr += b * stride_eb + h * stride_eh
            incoming = load_tile(incoming_ptr, n0, stride_et, T, CHUNK, BLOCK_D, HEAD_DIM)
            dk = as_product(incoming.to(tl.float32) / scale)
        row_base = total_rows
        block_base = total_blocks - 2
        for step in range(num_levels):
            level = num_levels - 1 - step
            half = CHUNK << level
            block = (n0 // CHUNK) >> level
            right = (block + 1) * half
            row_base -= rows_of_level(T, level, CHUNK)
            block_base -= blocks_of_level(T, level, CHUNK)
            if (block % 2 == 0) & (right < (T if SEGMENT else reach)):
                here = row_base + (right - half) // 2 + n0 - block * half
                k_here = load_full_tile(k_levels_ptr, here, BLOCK_D, CHUNK, BLOCK_D, BLOCK_D)
                if key_moves(block, half, reach, SEGMENT):
                    store_tile(
                        dk_moved_ptr, here, BLOCK_D, moved_rows, dk * scale, CHUNK, BLOCK_D, BLOCK_D
                    )
                    product = load_product(product_tiles, b, h, block_base + block + 1, BLOCK_D)
                    dk = move(dk, product, True, MOVE)
                shift = row_base + (right - half) // 2 - right
                for g in tl.range(GROUP, num_stages=1):
                    col_sum = tl.zeros([CHUNK], tl.float32)
                    gate_ref = (
                        tl.load(offset_ptr + g * spans + n0 // GATE_SPAN) if HAS_GATE else 0.0
                    )
                    gate_k = key.to(tl.float32)
                    if HAS_GATE:
                        gate_k = tl.load(gate_ptr + g * spans * GATE_SPAN + keys)
                    hi = tl.minimum(right + half, reach)
                    middle = hi
                    if HAS_DOC:
                        middle = tl.maximum(right, tl.minimum(hi, seen_until // BLOCK_M * BLOCK_M))
                    for part in tl.static_range(2 if HAS_DOC else 1):
                        if part == 0 or middle < hi:  # an empty loop still asks for tiles
                            dk, dv, col_sum = key_pass(
                                KeyGradient(dk, dv, col_sum),
                                KeyRows(k_here, v, keys, gate_k, gate_ref),
                                q_tiles, d_out_tiles,
                                Queries(
                                    rows_ptr + g * num_chunks * CHUNK * 2, offset_ptr + g * spans,
                                    start_ptr, b, h * GROUP + g,
                                ), shift, middle if part else right, hi if part else middle, T,
                                logit_scale, BLOCK_D, BLOCK_DV, BLOCK_M, False, HAS_GATE, part == 1,
                                PRECISION, STAGES,
                            )  # fmt: skip
                    if HAS_GATE:
                        tl.debug_barrier()  # the sums so far were stored by other threads
                        col_sum += tl.load(col_sum_ptr + g * T + keys)
                        tl.store(col_sum_ptr + g * T + keys, col_sum)
    dk_ptr += b * stride_dkb + h * stride_dkh
    store_tile(dk_ptr, n0, stride_dkt, T, dk * scale, CHUNK, BLOCK_D, HEAD_DIM)
    store_tile(dv_ptr, n0, stride_dvt, T, dv, CHUNK, BLOCK_DV, HEAD_DIM_V)
