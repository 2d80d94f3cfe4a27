"""Queries and keys carried from frame to frame through the levels, and the upsweep that makes the
products which carry them.

    right block:  q <- P_left q          (row form  q P_left^T)
    left block:   k <- P_right^T k       (row form  k P_right)
    P <- P_left P_right

A program owns the queries (or keys) of one chunk and carries them in fp32 through every level, so
that each stored level is rounded once.

The tokens may be a segment of a longer sequence: a right child in all that lies before it, a left
child in all that comes after. Its own product is made, its queries are carried to its start and its
keys to its end; blocks cut off by its end have products too (missing tokens reflect nothing).
"""

import triton
import triton.language as tl

from .chunk import load_factors
from .levels import blocks_of_level, rows_of_level
from .products import dot, maybe_transposed, move_in_units, unit_rows
from .tiles import kernel, load_head_tile, load_product, store_tile, tile_pointers


@kernel
def upsweep_kernel(
    product_ptr, start_ptr, T, H, level, child_base, parent_base, total_blocks,
    BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, HAS_DOC: tl.constexpr,
    SEGMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Goes one level up: a TILE x TILE part of P_parent = P_left P_right, if it has a reader."""
    block, head, tile = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    half = CHUNK << level
    if not crossed(start_ptr, head // H, block * half, half, T, HAS_DOC, SEGMENT):
        return
    r0, c0 = tile // (BLOCK_D // TILE) * TILE, tile % (BLOCK_D // TILE) * TILE
    left_ptr = product_ptr + (head * total_blocks + child_base + 2 * block) * BLOCK_D * BLOCK_D
    parent_ptr = product_ptr + (head * total_blocks + parent_base + block) * BLOCK_D * BLOCK_D
    left = tl.load(tile_pointers(left_ptr, r0, BLOCK_D, TILE, BLOCK_D))
    right = tl.load(tile_pointers(left_ptr + c0, BLOCK_D, BLOCK_D, BLOCK_D, TILE))
    product = dot(left, right, PRECISION)
    store_tile(parent_ptr + c0, r0, BLOCK_D, BLOCK_D, product, TILE, TILE, TILE)


@triton.jit
def query_moves(block, half, document, SEGMENT: tl.constexpr):
    """Returns whether queries of a right block of `half` tokens attend to keys before its sibling,
    as all of a segment do. Wherever they lie right once more above, that block begins with the
    sibling.
    """
    return ((block - 1) * half > document) | SEGMENT


@triton.jit
def key_moves(block, half, reach, SEGMENT: tl.constexpr):
    """Returns whether queries after the sibling of a left block of `half` tokens attend to its
    keys.
    """
    return ((block + 2) * half < reach) | SEGMENT


@triton.jit
def crossed(start_ptr, b, first, half, T, HAS_DOC: tl.constexpr, SEGMENT: tl.constexpr):
    """Returns whether anything moves by the product of the `half` tokens at `first`: one document
    holds the tokens before and after them. That of the block's halves is read then, too.
    """
    after = first + half
    if SEGMENT:
        return after > 0
    elif HAS_DOC:
        return tl.load(start_ptr + b * T + after, mask=after < T, other=after) < first
    else:
        return (first > 0) & (after < T)


@triton.jit
def carry_rows(
    t, product_tiles, b, h, levels_ptr, bound, end_ptr, stride_et, first, T, num_levels, total_rows,
    QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores QUERIES t at the start of their chunk, at every level where they lie right of a token
    from `bound` on, or keys at its end, where they lie left of one before `bound`; with end_ptr
    also at that end of the segment. Reflections and their products make no row longer: rows in
    units stay within fp16's range at every level.
    """
    t, size = unit_rows(t)
    row_base = 0
    block_base = 0
    for level in range(num_levels):
        half = CHUNK << level
        block = (first // CHUNK) >> level
        if QUERIES:
            stored = (block % 2 == 1) & (block * half > bound)
        else:
            stored = (block % 2 == 0) & ((block + 1) * half < bound)
        if stored:
            if QUERIES:
                moves = query_moves(block, half, bound, end_ptr is not None)
                sibling = block_base + block - 1
            else:
                moves = key_moves(block, half, bound, end_ptr is not None)
                sibling = block_base + block + 1
            here = row_base + (block // 2 - block) * half + first
            store_tile(levels_ptr, here, BLOCK_D, total_rows, t * size, CHUNK, BLOCK_D, BLOCK_D)
            if moves:
                product = load_product(product_tiles, b, h, sibling, BLOCK_D)
                t = move_in_units(t, maybe_transposed(product, QUERIES), PRECISION)
        row_base += rows_of_level(T, level, CHUNK)
        block_base += blocks_of_level(T, level, CHUNK)
    if end_ptr is not None:
        store_tile(end_ptr, first, stride_et, T, t * size, CHUNK, BLOCK_D, HEAD_DIM)


@kernel
def carry_kernel(
    q_tiles, k_tiles, w_tiles, beta_ptr, inverse_ptr, product_tiles, q_levels_ptr, k_levels_ptr,
    intra_ptr, start_ptr, end_ptr, q_start_ptr, k_end_ptr, stride_bb, stride_bt, stride_bh,
    stride_sb, stride_st, stride_sh, stride_eb, stride_et, stride_eh, T, H, num_chunks, num_levels,
    total_rows, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr, HAS_DOC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Carries a chunk, side by side: the keys; of every query head of the group the queries, with
    the intra-chunk logits [C, C] (fp32, unscaled).
    """
    chunk, g = tl.program_id(0) // (GROUP + 1), tl.program_id(0) % (GROUP + 1)
    head = tl.program_id(1)
    b, h = (head // H).to(tl.int64), head % H
    q_head = (head * GROUP + g).to(tl.int64)
    head = head.to(tl.int64)
    first = chunk * CHUNK
    document = 0
    reach = T  # no query at or after this position attends to the chunk
    if HAS_DOC:  # ahead of what takes long
        document = tl.load(start_ptr + b * T + first)
        reach = tl.load(end_ptr + b * T + tl.minimum(first + CHUNK, T) - 1)
    offs = tl.arange(0, CHUNK)
    upper = offs[:, None] < offs[None, :]
    w, x = load_factors(
        w_tiles, beta_ptr + b * stride_bb + h * stride_bh, inverse_ptr, chunk, num_chunks, b, h,
        head, stride_bt, T, BLOCK_D, CHUNK,
    )  # fmt: skip
    k = load_head_tile(k_tiles, b, h, first, T, CHUNK, BLOCK_D)
    up = tl.where(upper, dot(k, tl.trans(w), PRECISION), 0.0)
    if g < GROUP:
        q = load_head_tile(q_tiles, b, h * GROUP + g, first, T, CHUNK, BLOCK_D)
        low = tl.where(upper, 0.0, dot(q, tl.trans(w), PRECISION))
        a = dot(low, tl.trans(x), PRECISION)
        intra = dot(q, tl.trans(k), PRECISION) - dot(a, tl.trans(up), PRECISION)
        intra_ptr += (q_head * num_chunks + chunk) * CHUNK * CHUNK
        tl.store(tile_pointers(intra_ptr, 0, CHUNK, CHUNK, CHUNK), intra)
        if q_start_ptr is not None:
            q_start_ptr += b * stride_sb + (h * GROUP + g) * stride_sh
        carry_rows(
            q.to(tl.float32) - dot(a, w, PRECISION), product_tiles, b, h,
            q_levels_ptr + q_head * total_rows * BLOCK_D, document, q_start_ptr, stride_st, first,
            T, num_levels, total_rows, True, HEAD_DIM, BLOCK_D, CHUNK, PRECISION,
        )  # fmt: skip
    else:
        if k_end_ptr is not None:
            k_end_ptr += b * stride_eb + h * stride_eh
        carry_rows(
            k.to(tl.float32) - dot(dot(up, x, PRECISION), w, PRECISION), product_tiles, b, h,
            k_levels_ptr + head * total_rows * BLOCK_D, reach, k_end_ptr, stride_et, first, T,
            num_levels, total_rows, False, HEAD_DIM, BLOCK_D, CHUNK, PRECISION,
        )  # fmt: skip
