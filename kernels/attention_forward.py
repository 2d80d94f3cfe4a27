"""Softmax attention over the off-diagonal blocks of the dyadic levels: FlashAttention whose q and k
change frame between levels.

A program owns the queries of one chunk of one head. The diagonal tile takes its logits from the
intra-chunk logits; every level at which the chunk lies in a right block adds plain dense
attention to the left sibling's keys. Without reflections the same passes run over the original q
and k.

Gate: G is a running sum, in log2 units. It is kept as fp32 sums from the start of each GATE_SPAN
tokens and fp64 offsets of these spans, so that differences of near pairs are as precise at any
position: to 2^-24 of what one span forgets.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .levels import rows_of_level
from .tiles import (
    GATE_SPAN,
    LN_2,
    Source,
    gate_rows,
    kernel,
    load_full_tile,
    load_head_row,
    load_head_tile,
    load_tile,
    store_tile,
    tile_pointers,
)


class Softmax(NamedTuple):
    """The running softmax of a tile of query rows."""

    acc: tl.tensor  # [M, DV], values weighted by exp2(logit - m_i)
    l_i: tl.tensor  # [M], sum of these weights
    m_i: tl.tensor  # [M], largest logit so far, base 2


class Keys(NamedTuple):
    """Heads whose keys pass by a query tile, and their gates. The gate's offsets may be None.

    Tiles of k and v are no part of it: Triton 3.6 loses the strides that are compiled into a source
    inside a tuple, and 3.7 makes values of them in an assignment.
    """

    gate_tiles: Source
    offset_ptr: tl.tensor
    b: tl.tensor
    h: tl.tensor
    hq: tl.tensor


class Place(NamedTuple):
    """The query rows of a program: the first one, its batch, query head and key head."""

    m0: tl.tensor
    b: tl.tensor
    hq: tl.tensor
    h: tl.tensor
    q_head: tl.tensor  # b HQ + hq


class Documents(NamedTuple):
    """Starts of the documents of a tile of query rows: of each row, of the first, of the last."""

    first_key: tl.tensor
    first: tl.tensor
    last: tl.tensor


@triton.jit
def place_of_queries(HQ, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """Returns the `Place` of a program. Those with the most keys start first."""
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * CHUNK
    q_head = tl.program_id(1)
    b, hq = (q_head // HQ).to(tl.int64), q_head % HQ
    return Place(m0, b, hq, hq // GROUP, q_head.to(tl.int64))


@triton.jit
def load_documents(start_ptr, at, rows, T, CHUNK: tl.constexpr, HAS_DOC: tl.constexpr):
    """Returns the `Documents` of the rows of a program; without documents all is one."""
    first_key = rows
    first = 0
    last = 0
    if HAS_DOC:
        first_key = tl.load(start_ptr + at.b * T + rows, mask=rows < T, other=0)
        first = tl.load(start_ptr + at.b * T + at.m0)
        last = tl.load(start_ptr + at.b * T + tl.minimum(at.m0 + CHUNK, T) - 1)
    return Documents(first_key, first, last)


@triton.jit
def softmax_step(state, s, scale, row, v, HAS_DOC: tl.constexpr, PRECISION: tl.constexpr):
    """Merges one tile of base-2 logits s scale + row [M, N] and values v [N, DV] into the running
    softmax. The scale, not negative, is left to one FMA with the row's part.
    """
    acc, l_i, m_i = state
    m_new = tl.maximum(m_i, tl.max(s, 1) * scale + row)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new) if HAS_DOC else m_new
    alpha = tl.math.exp2(m_i - m_safe)
    p = tl.math.exp2(s * scale - (m_safe - row)[:, None])
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return Softmax(acc, l_i, m_new)


@triton.jit
def gate_between(offset_ptr, first_key, gate_ref):
    """Returns the gate sum of the whole spans from the one of first_key to the one that starts at
    gate_ref, or zero where the sums have no offsets.
    """
    if offset_ptr is None:
        return 0.0
    else:
        return (gate_ref - tl.load(offset_ptr + first_key // GATE_SPAN)).to(tl.float32)


@triton.jit
def seen_from(last_document, lo, hi, BLOCK_N: tl.constexpr, HAS_DOC: tl.constexpr):
    """Returns from which tile of the keys lo ... hi - 1 on queries of documents that begin at
    last_document or before see all of them.
    """
    if HAS_DOC:
        first = tl.cdiv(last_document, BLOCK_N) * BLOCK_N
        return tl.minimum(tl.maximum(first, lo), tl.maximum(lo, hi))
    else:
        return lo


@triton.jit
def attend(
    state, q, k_tiles, v_tiles, keys, shift, lo, hi, gate_q, gate_ref, first_key, T, scale,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_DOC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to the `Softmax` dense attention to the `Keys` lo ... hi - 1, all visible but for
    documents; key j is row j + shift of its source. FULL: no tile passes the end T.

    The gate's offset is loaded a tile ahead by hand: the compiler's pipeline would put it into
    shared memory, 16 bytes too many for two programs on an SM at width 128.
    """
    between = gate_between(keys.offset_ptr, lo, gate_ref) if HAS_GATE else 0.0
    limit = None if FULL else T
    for start in range(lo, hi, BLOCK_N):
        k = load_head_tile(k_tiles, keys.b, keys.h, start + shift, limit, BLOCK_N, BLOCK_D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        row = gate_q
        if HAS_GATE:
            s = s * scale - load_head_row(keys.gate_tiles, keys.b, keys.hq, start, BLOCK_N)
            row = gate_q + between
            between = gate_between(keys.offset_ptr, start + BLOCK_N, gate_ref)
        if HAS_DOC:
            s = tl.where(
                start + tl.arange(0, BLOCK_N)[None, :] >= first_key[:, None], s, float("-inf")
            )
        if not FULL:
            s = tl.where((start + tl.arange(0, BLOCK_N) < T)[None, :], s, float("-inf"))
        v = load_head_tile(v_tiles, keys.b, keys.h, start, limit, BLOCK_N, BLOCK_DV)
        state = softmax_step(
            state, s, 1.0 if HAS_GATE else scale, row if HAS_GATE else 0.0, v, HAS_DOC, PRECISION
        )
    return state


@triton.jit
def diagonal_logits(
    q, k_ptr, intra_ptr, m0, stride_kt, T, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr, HAS_PATH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns the unscaled logits of a chunk with itself; not yet masked."""
    if HAS_PATH:
        return tl.load(tile_pointers(intra_ptr, m0, CHUNK, CHUNK, CHUNK))
    else:
        k = load_tile(k_ptr, m0, stride_kt, T, CHUNK, BLOCK_D, HEAD_DIM)
        return tl.dot(q, tl.trans(k), input_precision=PRECISION)


@kernel
def attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, q_levels_ptr, k_tiles, v_tiles, intra_ptr, gate_ptr, gate_tiles,
    offset_ptr, start_ptr, out_ptr, lse_ptr, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt,
    stride_kh, stride_vb, stride_vt, stride_vh, stride_ob, stride_ot, stride_oh, T, HQ, num_chunks,
    num_levels, total_rows, scale, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_PATH: tl.constexpr, HAS_GATE: tl.constexpr, HAS_DOC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes output and natural log-sum-exp of a chunk. `scale` > 0 and the gate are in log2
    units.
    """
    at = place_of_queries(HQ, GROUP, CHUNK)
    m0, b, hq, h, q_head = at
    q_ptr += b * stride_qb + hq * stride_qh
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    q_levels_ptr += q_head * total_rows * BLOCK_D
    intra_ptr += q_head * num_chunks * CHUNK * CHUNK
    gate_ptr += q_head * gate_rows(T)
    offset_ptr += q_head * tl.cdiv(T, GATE_SPAN)

    row = tl.arange(0, CHUNK)
    rows = m0 + row
    gate_ref = tl.load(offset_ptr + m0 // GATE_SPAN) if HAS_GATE else 0.0
    gate_q = row.to(tl.float32)
    if HAS_GATE:
        gate_q = tl.load(gate_ptr + rows, mask=rows < T, other=0.0)
    documents = load_documents(start_ptr, at, rows, T, CHUNK, HAS_DOC)

    state = Softmax(
        tl.zeros([CHUNK, BLOCK_DV], tl.float32),
        tl.zeros([CHUNK], tl.float32),
        tl.full([CHUNK], float("-inf"), tl.float32),
    )
    q = load_tile(q_ptr, m0, stride_qt, T, CHUNK, BLOCK_D, HEAD_DIM)
    s = diagonal_logits(
        q, k_ptr, intra_ptr, m0, stride_kt, T, HEAD_DIM, BLOCK_D, CHUNK, HAS_PATH, PRECISION
    )
    if HAS_GATE:
        s = s * scale - gate_q[None, :]
    visible = rows[None, :] <= rows[:, None]
    if HAS_DOC:
        visible &= rows[None, :] >= documents.first_key[:, None]
    s = tl.where(visible, s, float("-inf"))
    v = load_tile(v_ptr, m0, stride_vt, T, CHUNK, BLOCK_DV, HEAD_DIM_V)
    state = softmax_step(
        state, s, 1.0 if HAS_GATE else scale, gate_q if HAS_GATE else 0.0, v, HAS_DOC, PRECISION
    )

    if HAS_PATH:
        row_base = 0
        for level in range(0, num_levels):
            half = CHUNK << level
            block = (m0 // CHUNK) >> level
            if (block % 2 == 1) & (block * half > documents.first):
                left = (block - 1) * half
                shift = row_base - left // 2
                here = row_base + left // 2 + m0 - block * half
                q_here = load_full_tile(q_levels_ptr, here, BLOCK_D, CHUNK, BLOCK_D, BLOCK_D)
                lo = tl.maximum(left, documents.first // BLOCK_N * BLOCK_N)
                middle = seen_from(documents.last, lo, block * half, BLOCK_N, HAS_DOC)
                for seen in tl.static_range(0 if HAS_DOC else 1, 2):
                    if seen or lo < middle:  # an empty loop still asks for its first tiles
                        state = attend(
                            state, q_here, k_tiles, v_tiles, Keys(gate_tiles, offset_ptr, b, h, hq),
                            shift, middle if seen else lo, block * half if seen else middle, gate_q,
                            gate_ref, documents.first_key, T, scale, BLOCK_D, BLOCK_DV, BLOCK_N,
                            True, HAS_GATE, not seen, PRECISION,
                        )  # fmt: skip
            row_base += rows_of_level(T, level, CHUNK)
    elif m0 > 0:  # a branch, so that the diagonal's tiles and the loop's share their memory
        state = attend(
            state, q, k_tiles, v_tiles, Keys(gate_tiles, offset_ptr, b, h, hq), 0,
            documents.first // BLOCK_N * BLOCK_N, m0, gate_q, gate_ref, documents.first_key, T,
            scale, BLOCK_D, BLOCK_DV, BLOCK_N, True, HAS_GATE, HAS_DOC, PRECISION,
        )  # fmt: skip

    out_ptr += b * stride_ob + hq * stride_oh
    out = state.acc / state.l_i[:, None]
    store_tile(out_ptr, m0, stride_ot, T, out, CHUNK, BLOCK_DV, HEAD_DIM_V)
    lse = (state.m_i + tl.math.log2(state.l_i)) * LN_2
    tl.store(lse_ptr + q_head * T + rows, lse, mask=rows < T)
