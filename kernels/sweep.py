"""The level sweep: queries and keys carried from frame to frame, and the tree of products that carries them.

    right block:  q <- P_left q          (row form  q P_left^T)
    left block:   k <- P_right^T k       (row form  k P_right)
    P <- P_left P_right

A program owns the queries (or keys) of two chunks and carries them in fp32 through every level, so that each
stored level is rounded once. Level 0 moves by the chunk's factors W, X; higher levels by D x D products, whose
loads a tile of two chunks halves.
"""

import triton
import triton.language as tl

from .chunk import load_factors
from .tiles import RUNTIME, dot, load_square, load_tile, product_dot, round_tf32, rows_of_level, store_tile


@triton.jit(do_not_specialize=RUNTIME)
def block_product_kernel(
    w_ptr, beta_ptr, inverse_ptr, product_ptr,
    stride_wb, stride_wt, stride_wh, stride_bb, stride_bt, stride_bh,
    T, H, num_chunks, total_blocks,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Level 1: P = I - W0^T X0 (W0 - W0 W1^T X1 W1) - W1^T X1 W1 of two chunks, rounded to tf32."""
    block, head = tl.program_id(0), tl.program_id(1)
    b, h = (head // H).to(tl.int64), head % H
    w_ptr += b * stride_wb + h * stride_wh
    beta_ptr += b * stride_bb + h * stride_bh
    w0, x0 = load_factors(
        w_ptr, beta_ptr, inverse_ptr, 2 * block, num_chunks, head, stride_wt, stride_bt, T, HEAD_DIM, BLOCK_D, CHUNK
    )
    w1, x1 = load_factors(
        w_ptr, beta_ptr, inverse_ptr, 2 * block + 1, num_chunks, head, stride_wt, stride_bt, T, HEAD_DIM, BLOCK_D, CHUNK
    )
    r1 = dot(x1, w1, PRECISION)
    overlap = dot(w0, tl.trans(w1), PRECISION)
    r0 = dot(x0, w0, PRECISION) - dot(
        dot(x0, overlap, PRECISION), r1, PRECISION
    )
    offs = tl.arange(0, BLOCK_D)
    product = tl.where(offs[:, None] == offs[None, :], 1.0, 0.0)
    product -= dot(tl.trans(w0), r0, PRECISION)
    product -= dot(tl.trans(w1), r1, PRECISION)
    index = head.to(tl.int64) * total_blocks + block
    store_tile(
        product_ptr, index * BLOCK_D, BLOCK_D, (index + 1) * BLOCK_D, round_tf32(product), BLOCK_D, BLOCK_D, BLOCK_D
    )


@triton.jit(do_not_specialize=RUNTIME)
def tree_kernel(
    product_ptr, child_base, parent_base, total_blocks,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One level up: P_parent = P_left P_right."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    child = head * total_blocks + child_base + 2 * block
    left = load_square(product_ptr, child, BLOCK_D)
    right = load_square(product_ptr, child + 1, BLOCK_D)
    parent = head * total_blocks + parent_base + block
    product = round_tf32(product_dot(left, right, PRECISION))
    store_tile(product_ptr, parent * BLOCK_D, BLOCK_D, (parent + 1) * BLOCK_D, product, BLOCK_D, BLOCK_D, BLOCK_D)


@triton.jit(do_not_specialize=RUNTIME)
def query_sweep_kernel(
    q_ptr, k_ptr, w_ptr, beta_ptr, inverse_ptr, product_ptr, levels_ptr, local_ptr, start_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    stride_wb, stride_wt, stride_wh, stride_bb, stride_bt, stride_bh,
    T, HQ, num_chunks, num_levels, total_rows, total_blocks,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    HAS_DOC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Local logits [C, C] (fp32, unscaled) of two chunks, and their queries at every level where they lie right."""
    ROWS: tl.constexpr = 2 * CHUNK
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
    row = tl.arange(0, ROWS)
    col = tl.arange(0, CHUNK)
    q = load_tile(q_ptr + b * stride_qb + hq * stride_qh, first, stride_qt, T, ROWS, BLOCK_D, HEAD_DIM)
    t = q.to(tl.float32)
    for step in tl.static_range(2):
        part = 1 - step
        chunk = first // CHUNK + part
        if chunk < num_chunks:
            w, x = load_factors(
                w_ptr, beta_ptr, inverse_ptr, chunk, num_chunks, head, stride_wt, stride_bt, T,
                HEAD_DIM, BLOCK_D, CHUNK,
            )  # fmt: skip
            # rows before the chunk do not meet it, its own rows meet it causally, later rows wholly
            meets = row[:, None] >= part * CHUNK + col[None, :]
            a = dot(tl.where(meets, dot(t, tl.trans(w), PRECISION), 0.0), tl.trans(x), PRECISION)
            t -= dot(a, w, PRECISION)
            k = load_tile(k_ptr, chunk * CHUNK, stride_kt, T, CHUNK, BLOCK_D, HEAD_DIM)
            up = tl.where(col[:, None] < col[None, :], dot(k, tl.trans(w), PRECISION), 0.0)
            local = dot(q, tl.trans(k), PRECISION) - dot(a, tl.trans(up), PRECISION)
            pointers = local_ptr + (first + row).to(tl.int64)[:, None] * CHUNK + col[None, :]
            tl.store(pointers, local, mask=(row // CHUNK == part)[:, None])
            if part == 1:
                square = levels_ptr + (first // 2 - CHUNK + row)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
                tl.store(square, t.to(levels_ptr.dtype.element_ty), mask=(row >= CHUNK)[:, None])
    document = 0
    if HAS_DOC:
        document = tl.load(start_ptr + b * T + first)
    row_base = rows_of_level(T, 0, CHUNK)
    block_base = head.to(tl.int64) * total_blocks
    for level in range(1, num_levels):
        half = CHUNK << level
        block = first // half
        if (block % 2 == 1) & (block * half > document):
            here = row_base + block // 2 * half + first % half
            store_tile(levels_ptr, here, BLOCK_D, total_rows, t, ROWS, BLOCK_D, BLOCK_D)
            if level < num_levels - 1:
                product = load_square(product_ptr, block_base + block - 1, BLOCK_D)
                t = product_dot(t, tl.trans(product), PRECISION)
        row_base += rows_of_level(T, level, CHUNK)
        block_base += T // half


@triton.jit(do_not_specialize=RUNTIME)
def key_sweep_kernel(
    k_ptr, w_ptr, beta_ptr, inverse_ptr, product_ptr, levels_ptr, end_ptr,
    stride_kb, stride_kt, stride_kh, stride_wb, stride_wt, stride_wh, stride_bb, stride_bt, stride_bh,
    T, H, num_chunks, num_levels, total_rows, total_blocks,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    HAS_DOC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys of two chunks at every level where they lie left of a block that has a token."""
    ROWS: tl.constexpr = 2 * CHUNK
    first, head = tl.program_id(0) * ROWS, tl.program_id(1)
    b, h = (head // H).to(tl.int64), head % H
    w_ptr += b * stride_wb + h * stride_wh
    beta_ptr += b * stride_bb + h * stride_bh
    levels_ptr += head.to(tl.int64) * total_rows * BLOCK_D
    row = tl.arange(0, ROWS)
    col = tl.arange(0, CHUNK)
    if first + CHUNK < T:
        k = load_tile(k_ptr + b * stride_kb + h * stride_kh, first, stride_kt, T, ROWS, BLOCK_D, HEAD_DIM)
        t = k.to(tl.float32)
        for part in tl.static_range(2):
            w, x = load_factors(
                w_ptr, beta_ptr, inverse_ptr, first // CHUNK + part, num_chunks, head, stride_wt, stride_bt, T,
                HEAD_DIM, BLOCK_D, CHUNK,
            )  # fmt: skip
            meets = row[:, None] < part * CHUNK + col[None, :]
            e = dot(tl.where(meets, dot(t, tl.trans(w), PRECISION), 0.0), x, PRECISION)
            t -= dot(e, w, PRECISION)
            if part == 0:
                store_tile(levels_ptr, first // 2, BLOCK_D, first // 2 + CHUNK, t, ROWS, BLOCK_D, BLOCK_D)
        reach = T  # no query at or after this position attends to the tile
        if HAS_DOC:
            reach = tl.load(end_ptr + b * T + tl.minimum(first + ROWS, T) - 1)
        row_base = rows_of_level(T, 0, CHUNK)
        block_base = head.to(tl.int64) * total_blocks
        for level in range(1, num_levels):
            half = CHUNK << level
            block = first // half
            right = (block + 1) * half
            if (block % 2 == 0) & (right < reach):
                here = row_base + block // 2 * half + first % half
                store_tile(levels_ptr, here, BLOCK_D, total_rows, t, ROWS, BLOCK_D, BLOCK_D)
                if (level < num_levels - 1) & (right + half <= T):
                    product = load_square(product_ptr, block_base + block + 1, BLOCK_D)
                    t = product_dot(t, product, PRECISION)
            row_base += rows_of_level(T, level, CHUNK)
            block_base += T // half
