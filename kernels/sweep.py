"""The level sweep: queries and keys carried from frame to frame, and the tree of products that
carries them.

    right block:  q <- P_left q          (row form  q P_left^T)
    left block:   k <- P_right^T k       (row form  k P_right)
    P <- P_left P_right

A program owns the queries (or keys) of one or two chunks and carries them in fp32 through every
level, so that each stored level is rounded once. Level 0 moves by the chunk's factors W, X; higher
levels by D x D products.

WHOLE: the tokens are a piece of a longer sequence. Its own product is made, blocks cut off by its
end have products too (missing tokens reflect nothing), and the sweeps may carry queries to its
start and keys to its end.
"""

import triton
import triton.language as tl

from .chunk import load_factors
from .tiles import (
    RUNTIME,
    blocks_of_level,
    dot,
    load_square,
    load_tile,
    product_dot,
    round_product,
    rows_of_level,
    store_tile,
    tile_pointers,
)


@triton.jit(do_not_specialize=RUNTIME)
def block_product_kernel(
    w_ptr, beta_ptr, inverse_ptr, product_ptr, stride_wb, stride_wt, stride_wh, stride_bb,
    stride_bt, stride_bh, T, H, num_chunks, total_blocks, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, COLS: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """COLS columns of level 1: P = I - W0^T X0 (W0 - W0 W1^T X1 W1) - W1^T X1 W1 of two chunks."""
    block, head, c0 = tl.program_id(0), tl.program_id(1), tl.program_id(2) * COLS
    b, h = (head // H).to(tl.int64), head % H
    w_ptr += b * stride_wb + h * stride_wh
    beta_ptr += b * stride_bb + h * stride_bh
    w0, x0 = load_factors(
        w_ptr,
        beta_ptr,
        inverse_ptr,
        2 * block,
        num_chunks,
        head,
        stride_wt,
        stride_bt,
        T,
        HEAD_DIM,
        BLOCK_D,
        CHUNK,
    )
    w1, x1 = load_factors(
        w_ptr,
        beta_ptr,
        inverse_ptr,
        2 * block + 1,
        num_chunks,
        head,
        stride_wt,
        stride_bt,
        T,
        HEAD_DIM,
        BLOCK_D,
        CHUNK,
        WHOLE,
    )
    rows = 2 * block * CHUNK + tl.arange(0, CHUNK)
    cols = c0 + tl.arange(0, COLS)
    pointers = w_ptr + rows.to(tl.int64)[:, None] * stride_wt + cols[None, :]
    mask0 = (cols < HEAD_DIM)[None, :]
    mask1 = mask0
    if WHOLE:
        mask0 = mask0 & (rows < T)[:, None]
        mask1 = mask1 & (rows + CHUNK < T)[:, None]
    w0_cols = tl.load(pointers, mask=mask0, other=0.0)
    w1_cols = tl.load(pointers + CHUNK * stride_wt, mask=mask1, other=0.0)
    r1 = dot(x1, w1_cols, PRECISION)
    overlap = dot(w0, tl.trans(w1), PRECISION)
    r0 = dot(x0, w0_cols, PRECISION) - dot(dot(x0, overlap, PRECISION), r1, PRECISION)
    offs = tl.arange(0, BLOCK_D)
    product = tl.where(offs[:, None] == cols[None, :], 1.0, 0.0)
    product -= dot(tl.trans(w0), r0, PRECISION)
    product -= dot(tl.trans(w1), r1, PRECISION)
    product_ptr += (head.to(tl.int64) * total_blocks + block) * BLOCK_D * BLOCK_D
    tl.store(
        product_ptr + offs[:, None] * BLOCK_D + cols[None, :], round_product(product, PRECISION)
    )


@triton.jit(do_not_specialize=RUNTIME)
def tree_kernel(
    product_ptr, child_base, parent_base, total_blocks, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One level up: a TILE x TILE part of P_parent = P_left P_right."""
    block, head, tile = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    r0, c0 = tile // (BLOCK_D // TILE) * TILE, tile % (BLOCK_D // TILE) * TILE
    left_ptr = product_ptr + (head * total_blocks + child_base + 2 * block) * BLOCK_D * BLOCK_D
    acc = tl.zeros([TILE, TILE], tl.float32)
    for k in range(0, BLOCK_D, TILE):
        left = tl.load(tile_pointers(left_ptr + k, r0, BLOCK_D, TILE, TILE))
        right = tl.load(tile_pointers(left_ptr + c0, BLOCK_D + k, BLOCK_D, TILE, TILE))
        acc += dot(left, right, PRECISION)
    parent_ptr = product_ptr + (head * total_blocks + parent_base + block) * BLOCK_D * BLOCK_D
    tl.store(tile_pointers(parent_ptr + c0, r0, BLOCK_D, TILE, TILE), round_product(acc, PRECISION))


@triton.jit(do_not_specialize=RUNTIME)
def query_sweep_kernel(
    q_ptr, k_ptr, w_ptr, beta_ptr, inverse_ptr, product_ptr, levels_ptr, local_ptr, start_ptr,
    q_start_ptr, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_wb,
    stride_wt, stride_wh, stride_bb, stride_bt, stride_bh, stride_eb, stride_et, stride_eh, T, HQ,
    num_chunks, num_levels, total_rows, total_blocks, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, HAS_DOC: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Local logits [C, C] (fp32, unscaled) of one or two chunks, and their queries at every level
    where they lie right; with q_start_ptr also at the start of the piece.
    """
    first, q_head = tl.program_id(0) * ROWS, tl.program_id(1)
    b, hq = (q_head // HQ).to(tl.int64), q_head % HQ
    h = hq // GROUP
    head = (q_head // HQ) * (HQ // GROUP) + h
    q_head = q_head.to(tl.int64)
    w_ptr += b * stride_wb + h * stride_wh
    beta_ptr += b * stride_bb + h * stride_bh
    k_ptr += b * stride_kb + h * stride_kh
    local_ptr += q_head * num_chunks * CHUNK * CHUNK
    levels_ptr += q_head * total_rows * BLOCK_D
    rows = first + tl.arange(0, ROWS)
    col = tl.arange(0, CHUNK)
    pair = first // (2 * CHUNK) * 2
    q = load_tile(
        q_ptr + b * stride_qb + hq * stride_qh, first, stride_qt, T, ROWS, BLOCK_D, HEAD_DIM
    )
    t = q.to(tl.float32)
    for step in tl.static_range(2):
        chunk = pair + 1 - step
        if (chunk < num_chunks) & (chunk * CHUNK < first + ROWS):
            w, x = load_factors(
                w_ptr, beta_ptr, inverse_ptr, chunk, num_chunks, head, stride_wt, stride_bt, T,
                HEAD_DIM, BLOCK_D, CHUNK,
            )  # fmt: skip
            # rows before the chunk do not meet it, its own rows meet it causally, later rows wholly
            meets = rows[:, None] >= chunk * CHUNK + col[None, :]
            a = dot(tl.where(meets, dot(t, tl.trans(w), PRECISION), 0.0), tl.trans(x), PRECISION)
            t -= dot(a, w, PRECISION)
            if (ROWS > CHUNK) | (chunk * CHUNK == first):
                k = load_tile(k_ptr, chunk * CHUNK, stride_kt, T, CHUNK, BLOCK_D, HEAD_DIM)
                up = tl.where(col[:, None] < col[None, :], dot(k, tl.trans(w), PRECISION), 0.0)
                local = dot(q, tl.trans(k), PRECISION) - dot(a, tl.trans(up), PRECISION)
                pointers = local_ptr + rows.to(tl.int64)[:, None] * CHUNK + col[None, :]
                tl.store(pointers, local, mask=(rows // CHUNK == chunk)[:, None])
            if step == 0:
                level = levels_ptr + (rows - (pair // 2 + 1) * CHUNK)[:, None] * BLOCK_D
                own = (rows // CHUNK == chunk)[:, None]
                tl.store(
                    level + tl.arange(0, BLOCK_D)[None, :],
                    t.to(levels_ptr.dtype.element_ty),
                    mask=own,
                )
    document = 0
    if HAS_DOC:
        document = tl.load(start_ptr + b * T + pair * CHUNK)
    top = num_levels - 1 if q_start_ptr is None else num_levels
    row_base = rows_of_level(T, 0, CHUNK)
    block_base = head.to(tl.int64) * total_blocks
    for level in range(1, num_levels):
        half = CHUNK << level
        block = first // half
        if (block % 2 == 1) & (block * half > document):
            here = row_base + block // 2 * half + first % half
            store_tile(levels_ptr, here, BLOCK_D, total_rows, t, ROWS, BLOCK_D, BLOCK_D)
            if level < top:
                product = load_square(product_ptr, block_base + block - 1, BLOCK_D)
                t = product_dot(t, product, True, PRECISION)
        row_base += rows_of_level(T, level, CHUNK)
        block_base += blocks_of_level(T, half, WHOLE)
    if q_start_ptr is not None:
        q_start_ptr += b * stride_eb + hq * stride_eh
        store_tile(q_start_ptr, first, stride_et, T, t, ROWS, BLOCK_D, HEAD_DIM)


@triton.jit(do_not_specialize=RUNTIME)
def key_sweep_kernel(
    k_ptr, w_ptr, beta_ptr, inverse_ptr, product_ptr, levels_ptr, end_ptr, k_end_ptr, stride_kb,
    stride_kt, stride_kh, stride_wb, stride_wt, stride_wh, stride_bb, stride_bt, stride_bh,
    stride_eb, stride_et, stride_eh, T, H, num_chunks, num_levels, total_rows, total_blocks,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    HAS_DOC: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys of one or two chunks at every level where they lie left of a block that has a token;
    with k_end_ptr also at the end of the piece.
    """
    first, head = tl.program_id(0) * ROWS, tl.program_id(1)
    b, h = (head // H).to(tl.int64), head % H
    w_ptr += b * stride_wb + h * stride_wh
    beta_ptr += b * stride_bb + h * stride_bh
    levels_ptr += head.to(tl.int64) * total_rows * BLOCK_D
    rows = first + tl.arange(0, ROWS)
    col = tl.arange(0, CHUNK)
    pair = first // (2 * CHUNK) * 2
    if ((pair + 1) * CHUNK < T) | (k_end_ptr is not None):
        k = load_tile(
            k_ptr + b * stride_kb + h * stride_kh, first, stride_kt, T, ROWS, BLOCK_D, HEAD_DIM
        )
        t = k.to(tl.float32)
        for step in tl.static_range(2):
            chunk = pair + step
            if chunk * CHUNK >= first // CHUNK * CHUNK:
                w, x = load_factors(
                    w_ptr, beta_ptr, inverse_ptr, chunk, num_chunks, head, stride_wt, stride_bt, T,
                    HEAD_DIM, BLOCK_D, CHUNK, WHOLE,
                )  # fmt: skip
                meets = rows[:, None] < chunk * CHUNK + col[None, :]
                e = dot(tl.where(meets, dot(t, tl.trans(w), PRECISION), 0.0), x, PRECISION)
                t -= dot(e, w, PRECISION)
                if step == 0:
                    level = levels_ptr + (rows - pair // 2 * CHUNK)[:, None] * BLOCK_D
                    own = (rows // CHUNK == chunk)[:, None]
                    if WHOLE:
                        own = own & ((pair + 1) * CHUNK < T)
                    tl.store(
                        level + tl.arange(0, BLOCK_D)[None, :],
                        t.to(levels_ptr.dtype.element_ty),
                        mask=own,
                    )
        reach = T  # no query at or after this position attends to the tile
        if HAS_DOC:
            reach = tl.load(end_ptr + b * T + tl.minimum((pair + 2) * CHUNK, T) - 1)
        top = num_levels - 1 if k_end_ptr is None else num_levels
        row_base = rows_of_level(T, 0, CHUNK)
        block_base = head.to(tl.int64) * total_blocks
        for level in range(1, num_levels):
            half = CHUNK << level
            block = first // half
            right = (block + 1) * half
            last = right if WHOLE else right + half
            if (block % 2 == 0) & (right < reach):
                here = row_base + block // 2 * half + first % half
                store_tile(levels_ptr, here, BLOCK_D, total_rows, t, ROWS, BLOCK_D, BLOCK_D)
                if (level < top) & (last <= T):
                    product = load_square(product_ptr, block_base + block + 1, BLOCK_D)
                    t = product_dot(t, product, False, PRECISION)
            row_base += rows_of_level(T, level, CHUNK)
            block_base += blocks_of_level(T, half, WHOLE)
        if k_end_ptr is not None:
            k_end_ptr += b * stride_eb + h * stride_eh
            store_tile(k_end_ptr, first, stride_et, T, t, ROWS, BLOCK_D, HEAD_DIM)
