"""The level sweep: queries and keys carried from frame to frame, and the tree of products that carries them.

    right block:  q <- P_left q          (row form  q P_left^T)
    left block:   k <- P_right^T k       (row form  k P_right)
    P <- P_left P_right

A program owns the queries (or keys) of one chunk and carries them in fp32 through every level, so that each
stored level is rounded once. Level 0 moves by the chunk's factors W, X; higher levels by D x D products.
"""

import triton
import triton.language as tl

from .chunk import load_factors, reflect
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
    """Local logits of a chunk [C, C] (fp32, unscaled), and its queries at every level where it lies right."""
    chunk, q_head = tl.program_id(0), tl.program_id(1)
    b, hq = (q_head // HQ).to(tl.int64), q_head % HQ
    h = hq // GROUP
    head = (q_head // HQ) * (HQ // GROUP) + h
    w_ptr += b * stride_wb + h * stride_wh
    beta_ptr += b * stride_bb + h * stride_bh
    first = chunk * CHUNK
    q = load_tile(q_ptr + b * stride_qb + hq * stride_qh, first, stride_qt, T, CHUNK, BLOCK_D, HEAD_DIM)
    k = load_tile(k_ptr + b * stride_kb + h * stride_kh, first, stride_kt, T, CHUNK, BLOCK_D, HEAD_DIM)
    w, x = load_factors(
        w_ptr, beta_ptr, inverse_ptr, chunk, num_chunks, head, stride_wt, stride_bt, T, HEAD_DIM, BLOCK_D, CHUNK
    )
    offs = tl.arange(0, CHUNK)
    low = tl.where(offs[:, None] >= offs[None, :], dot(q, tl.trans(w), PRECISION), 0.0)
    up = tl.where(offs[:, None] < offs[None, :], dot(k, tl.trans(w), PRECISION), 0.0)
    a = dot(low, tl.trans(x), PRECISION)
    local = dot(q, tl.trans(k), PRECISION)
    local -= dot(a, tl.trans(up), PRECISION)
    index = q_head.to(tl.int64) * num_chunks + chunk
    store_tile(local_ptr, index * CHUNK, CHUNK, (index + 1) * CHUNK, local, CHUNK, CHUNK, CHUNK)
    if chunk > 0:
        t = q.to(tl.float32) - dot(a, w, PRECISION)
        levels_ptr += q_head.to(tl.int64) * total_rows * BLOCK_D
        document = 0  # of the two chunks that share attention tiles
        if HAS_DOC:
            document = tl.load(start_ptr + b * T + first // (2 * CHUNK) * (2 * CHUNK))
        if chunk % 2 == 1:
            store_tile(levels_ptr, chunk // 2 * CHUNK, BLOCK_D, total_rows, t, CHUNK, BLOCK_D, BLOCK_D)
            if num_levels > 1:
                w0, x0 = load_factors(
                    w_ptr, beta_ptr, inverse_ptr, chunk - 1, num_chunks, head, stride_wt, stride_bt, T,
                    HEAD_DIM, BLOCK_D, CHUNK,
                )  # fmt: skip
                t = reflect(t, w0, tl.trans(x0), PRECISION)
        row_base = rows_of_level(T, 0, CHUNK)
        block_base = head.to(tl.int64) * total_blocks
        for level in range(1, num_levels):
            block = chunk >> level
            half = CHUNK << level
            if block % 2 == 1:
                if block * half > document:
                    row = row_base + block // 2 * half + (first - block * half)
                    store_tile(levels_ptr, row, BLOCK_D, total_rows, t, CHUNK, BLOCK_D, BLOCK_D)
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
    """Keys of a chunk at every level where it lies left of a block that has a token."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    b, h = (head // H).to(tl.int64), head % H
    w_ptr += b * stride_wb + h * stride_wh
    beta_ptr += b * stride_bb + h * stride_bh
    first = chunk * CHUNK
    if first + CHUNK < T:
        k = load_tile(k_ptr + b * stride_kb + h * stride_kh, first, stride_kt, T, CHUNK, BLOCK_D, HEAD_DIM)
        w, x = load_factors(
            w_ptr, beta_ptr, inverse_ptr, chunk, num_chunks, head, stride_wt, stride_bt, T, HEAD_DIM, BLOCK_D, CHUNK
        )
        offs = tl.arange(0, CHUNK)
        up = tl.where(offs[:, None] < offs[None, :], dot(k, tl.trans(w), PRECISION), 0.0)
        e = dot(up, x, PRECISION)
        t = k.to(tl.float32) - dot(e, w, PRECISION)
        levels_ptr += head.to(tl.int64) * total_rows * BLOCK_D
        reach = T  # no query at or after this position attends to the chunk
        if HAS_DOC:
            last = (first // (2 * CHUNK) + 1) * (2 * CHUNK) - 1
            reach = tl.load(end_ptr + b * T + tl.minimum(last, T - 1))
        if chunk % 2 == 0:
            store_tile(levels_ptr, chunk // 2 * CHUNK, BLOCK_D, total_rows, t, CHUNK, BLOCK_D, BLOCK_D)
            if num_levels > 1:
                w1, x1 = load_factors(
                    w_ptr, beta_ptr, inverse_ptr, chunk + 1, num_chunks, head, stride_wt, stride_bt, T,
                    HEAD_DIM, BLOCK_D, CHUNK,
                )  # fmt: skip
                t = reflect(t, w1, x1, PRECISION)
        row_base = rows_of_level(T, 0, CHUNK)
        block_base = head.to(tl.int64) * total_blocks
        for level in range(1, num_levels):
            block = chunk >> level
            half = CHUNK << level
            right = (block + 1) * half
            if block % 2 == 0:
                if right < reach:
                    row = row_base + block // 2 * half + (first - block * half)
                    store_tile(levels_ptr, row, BLOCK_D, total_rows, t, CHUNK, BLOCK_D, BLOCK_D)
                    if (level < num_levels - 1) & (right + half <= T):
                        product = load_square(product_ptr, block_base + block + 1, BLOCK_D)
                        t = product_dot(t, product, PRECISION)
            row_base += rows_of_level(T, level, CHUNK)
            block_base += T // half
