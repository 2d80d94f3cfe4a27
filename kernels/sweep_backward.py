"""Backward of the level sweep, from the top level down.

The gradient of a moved tile at level l is that of its square plus what comes back from level l + 1:

    right block:  q+ = P_left q        dq = dq_square + P_left^T dq+      dP_left  += dq+ q^T
    left block:   k+ = P_right^T k     dk = dk_square + P_right dk+       dP_right += k dk+^T
    P = P_left P_right                 dP_left += dP P_right^T            dP_right += P_left^T dP

The sweeps overwrite dq_square (dk_square) of every level by dq+ (dk+) of the same rows, from which the
products' gradients are then reduced in a fixed order.
"""

import triton
import triton.language as tl

from .chunk import load_factors
from .tiles import RUNTIME, dot, load_square, load_tile, product_dot, rows_of_level, store_tile


@triton.jit(do_not_specialize=RUNTIME)
def query_sweep_backward_kernel(
    w_ptr, beta_ptr, inverse_ptr, product_ptr, levels_ptr, dq_start_ptr, start_ptr,
    stride_wb, stride_wt, stride_wh, stride_bb, stride_bt, stride_bh,
    T, HQ, num_chunks, num_levels, total_rows, total_blocks,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    HAS_DOC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of two chunks' q_start; on the way dq_square -> dq+ in the levels."""
    ROWS: tl.constexpr = 2 * CHUNK
    first, q_head = tl.program_id(0) * ROWS, tl.program_id(1)
    b, h = (q_head // HQ).to(tl.int64), q_head % HQ // GROUP
    head = ((q_head // HQ) * (HQ // GROUP) + h).to(tl.int64)
    q_head = q_head.to(tl.int64)
    levels_ptr += q_head * total_rows * BLOCK_D
    document = 0
    if HAS_DOC:
        document = tl.load(start_ptr + b * T + first)
    t = tl.zeros([ROWS, BLOCK_D], tl.float32)
    row_base = total_rows
    block_base = head * total_blocks + total_blocks
    for step in range(1, num_levels):
        level = num_levels - step
        half = CHUNK << level
        block = first // half
        row_base -= rows_of_level(T, level, CHUNK)
        if level < num_levels - 1:
            block_base -= T // half
        if (block % 2 == 1) & (block * half > document):
            here = row_base + block // 2 * half + first % half
            square = load_tile(levels_ptr, here, BLOCK_D, total_rows, ROWS, BLOCK_D, BLOCK_D).to(tl.float32)
            if level < num_levels - 1:
                store_tile(levels_ptr, here, BLOCK_D, total_rows, t, ROWS, BLOCK_D, BLOCK_D)
                product = load_square(product_ptr, block_base + block - 1, BLOCK_D)
                t = product_dot(t, product, PRECISION)
            t += square
    row = tl.arange(0, ROWS)
    if first + CHUNK < T:
        pointers = levels_ptr + (first // 2 - CHUNK + row)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
        moves = (row >= CHUNK)[:, None]
        square = tl.load(pointers, mask=moves, other=0.0).to(tl.float32)
        tl.store(pointers, t.to(levels_ptr.dtype.element_ty), mask=moves)
        w, x = load_factors(
            w_ptr + b * stride_wb + h * stride_wh, beta_ptr + b * stride_bb + h * stride_bh, inverse_ptr,
            first // CHUNK, num_chunks, head, stride_wt, stride_bt, T, HEAD_DIM, BLOCK_D, CHUNK,
        )  # fmt: skip
        tw = tl.where(moves, dot(t, tl.trans(w), PRECISION), 0.0)
        t += square - dot(dot(tw, x, PRECISION), w, PRECISION)
    index = q_head * num_chunks * CHUNK
    store_tile(dq_start_ptr, index + first, BLOCK_D, index + num_chunks * CHUNK, t, ROWS, BLOCK_D, BLOCK_D)


@triton.jit(do_not_specialize=RUNTIME)
def key_sweep_backward_kernel(
    w_ptr, beta_ptr, inverse_ptr, product_ptr, levels_ptr, dk_end_ptr, end_ptr,
    stride_wb, stride_wt, stride_wh, stride_bb, stride_bt, stride_bh,
    T, H, num_chunks, num_levels, total_rows, total_blocks,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    HAS_DOC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of two chunks' k_end; on the way dk_square -> dk+ in the levels."""
    ROWS: tl.constexpr = 2 * CHUNK
    first, head = tl.program_id(0) * ROWS, tl.program_id(1)
    b, h = (head // H).to(tl.int64), head % H
    head = head.to(tl.int64)
    levels_ptr += head * total_rows * BLOCK_D
    reach = T
    if HAS_DOC:
        reach = tl.load(end_ptr + b * T + tl.minimum(first + ROWS, T) - 1)
    t = tl.zeros([ROWS, BLOCK_D], tl.float32)
    row_base = total_rows
    block_base = head * total_blocks + total_blocks
    for step in range(1, num_levels):
        level = num_levels - step
        half = CHUNK << level
        block = first // half
        right = (block + 1) * half
        row_base -= rows_of_level(T, level, CHUNK)
        if level < num_levels - 1:
            block_base -= T // half
        if (block % 2 == 0) & (right < reach):
            here = row_base + block // 2 * half + first % half
            square = load_tile(levels_ptr, here, BLOCK_D, total_rows, ROWS, BLOCK_D, BLOCK_D).to(tl.float32)
            if (level < num_levels - 1) & (right + half <= T):
                store_tile(levels_ptr, here, BLOCK_D, total_rows, t, ROWS, BLOCK_D, BLOCK_D)
                product = load_square(product_ptr, block_base + block + 1, BLOCK_D)
                t = product_dot(t, tl.trans(product), PRECISION)
            t += square
    row = tl.arange(0, ROWS)
    if first + CHUNK < T:
        end = first // 2 + CHUNK
        square = load_tile(levels_ptr, first // 2, BLOCK_D, end, ROWS, BLOCK_D, BLOCK_D).to(tl.float32)
        store_tile(levels_ptr, first // 2, BLOCK_D, end, t, ROWS, BLOCK_D, BLOCK_D)
        w, x = load_factors(
            w_ptr + b * stride_wb + h * stride_wh, beta_ptr + b * stride_bb + h * stride_bh, inverse_ptr,
            first // CHUNK + 1, num_chunks, head, stride_wt, stride_bt, T, HEAD_DIM, BLOCK_D, CHUNK,
        )  # fmt: skip
        tw = tl.where((row < CHUNK)[:, None], dot(t, tl.trans(w), PRECISION), 0.0)
        t += square - dot(dot(tw, tl.trans(x), PRECISION), w, PRECISION)
    index = head * num_chunks * CHUNK
    store_tile(dk_end_ptr, index + first, BLOCK_D, index + num_chunks * CHUNK, t, ROWS, BLOCK_D, BLOCK_D)


@triton.jit(do_not_specialize=RUNTIME)
def product_gradient_kernel(
    q_levels_ptr, k_levels_ptr, dq_levels_ptr, dk_levels_ptr, partial_ptr, start_ptr, end_ptr,
    T, H, level, row_base, num_blocks, num_splits, total_rows,
    GROUP: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    HAS_DOC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dP of one block of a level from the tiles that P moved: sum of dq+ q^T (left), of k dk+^T (right).

    Program (block, split, head): split s takes ROWS tokens of the moved block, for every query head.
    """
    block, split, head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    b = head // H
    half = CHUNK << level
    lo = split * ROWS
    is_left = block % 2 == 0
    row = row_base + block // 2 * half
    acc = tl.zeros([BLOCK_D, BLOCK_D], tl.float32)
    if is_left:
        first = (block + 1) * half
        hi = tl.minimum(tl.minimum(lo + ROWS, half), T - first)
        for g in tl.range(GROUP, num_stages=1):
            base = (head * GROUP + g) * total_rows * BLOCK_D
            for start in range(lo, hi, CHUNK):
                reads = True
                if HAS_DOC:
                    reads = first > tl.load(start_ptr + b * T + (first + start) // (2 * CHUNK) * (2 * CHUNK))
                limit = tl.where(reads, row + hi, 0)
                a = load_tile(dq_levels_ptr + base, row + start, BLOCK_D, limit, CHUNK, BLOCK_D, BLOCK_D)
                c = load_tile(q_levels_ptr + base, row + start, BLOCK_D, limit, CHUNK, BLOCK_D, BLOCK_D)
                acc += dot(tl.trans(a), c.to(a.dtype), PRECISION)
    else:
        base = head * total_rows * BLOCK_D
        for start in range(lo, tl.minimum(lo + ROWS, half), CHUNK):
            reads = True
            if HAS_DOC:
                last = ((block - 1) * half + start) // (2 * CHUNK) * (2 * CHUNK) + 2 * CHUNK - 1
                reads = block * half < tl.load(end_ptr + b * T + last)
            limit = tl.where(reads, row + half, 0)
            a = load_tile(k_levels_ptr + base, row + start, BLOCK_D, limit, CHUNK, BLOCK_D, BLOCK_D)
            c = load_tile(dk_levels_ptr + base, row + start, BLOCK_D, limit, CHUNK, BLOCK_D, BLOCK_D)
            acc += dot(tl.trans(a.to(c.dtype)), c, PRECISION)
    index = (head * num_blocks + block) * num_splits + split
    store_tile(partial_ptr, index * BLOCK_D, BLOCK_D, (index + 1) * BLOCK_D, acc, BLOCK_D, BLOCK_D, BLOCK_D)


@triton.jit(do_not_specialize=RUNTIME)
def tree_backward_kernel(
    product_ptr, partial_ptr, parent_ptr, gradient_ptr,
    block_base, num_blocks, num_splits, num_parents, total_blocks,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dP of one level: the sum of its partial sums, and what comes back from the parent's product."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    acc = tl.zeros([BLOCK_D, BLOCK_D], tl.float32)
    for split in range(num_splits):
        acc += load_square(partial_ptr, (head * num_blocks + block) * num_splits + split, BLOCK_D)
    if block // 2 < num_parents:
        parent = load_square(parent_ptr, head * num_parents + block // 2, BLOCK_D)
        index = head * total_blocks + block_base + block
        if block % 2 == 0:
            right = load_square(product_ptr, index + 1, BLOCK_D)
            acc += product_dot(parent, tl.trans(right), PRECISION)
        else:
            left = load_square(product_ptr, index - 1, BLOCK_D)
            acc += product_dot(tl.trans(left), parent, PRECISION)
    index = head * num_blocks + block
    store_tile(gradient_ptr, index * BLOCK_D, BLOCK_D, (index + 1) * BLOCK_D, acc, BLOCK_D, BLOCK_D, BLOCK_D)
