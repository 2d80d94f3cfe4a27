"""Backward of the level sweep, from the top level down.

The gradient of a moved tile at level l is that of its square plus what comes back from level l + 1:

    right block:  q+ = P_left q        dq = dq_square + P_left^T dq+      dP_left  += dq+ q^T
    left block:   k+ = P_right^T k     dk = dk_square + P_right dk+       dP_right += k dk+^T
    P = P_left P_right                 dP_left += dP P_right^T            dP_right += P_left^T dP

WHOLE: dq at the start of the piece, dk at its end and dP of the piece come from other pieces.

The sweeps overwrite dq_square (dk_square) of every level by dq+ (dk+) of the same rows, from which
the products' gradients are then reduced in a fixed order.
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
    rows_of_level,
    store_tile,
    tile_pointers,
)


@triton.jit(do_not_specialize=RUNTIME)
def query_sweep_backward_kernel(
    w_ptr, beta_ptr, inverse_ptr, product_ptr, levels_ptr, dq_start_ptr, start_ptr, incoming_ptr,
    stride_wb, stride_wt, stride_wh, stride_bb, stride_bt, stride_bh, stride_eb, stride_et,
    stride_eh, T, HQ, num_chunks, num_levels, total_rows, total_blocks, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    HAS_DOC: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of one or two chunks' q_start; on the way dq_square -> dq+ in the levels.

    `incoming`: the gradient of the queries at the start of the piece.
    """
    first, q_head = tl.program_id(0) * ROWS, tl.program_id(1)
    b, h = (q_head // HQ).to(tl.int64), q_head % HQ // GROUP
    head = ((q_head // HQ) * (HQ // GROUP) + h).to(tl.int64)
    q_head = q_head.to(tl.int64)
    levels_ptr += q_head * total_rows * BLOCK_D
    pair = first // (2 * CHUNK) * 2
    document = 0
    if HAS_DOC:
        document = tl.load(start_ptr + b * T + pair * CHUNK)
    row_base = total_rows
    block_base = head * total_blocks + total_blocks
    if WHOLE:
        top = num_levels
        block_base -= 1  # that of the piece
        incoming_ptr += b * stride_eb + (q_head % HQ) * stride_eh
        t = load_tile(incoming_ptr, first, stride_et, T, ROWS, BLOCK_D, HEAD_DIM).to(tl.float32)
    else:
        top = num_levels - 1
        t = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for step in range(1, num_levels):
        level = num_levels - step
        half = CHUNK << level
        block = first // half
        row_base -= rows_of_level(T, level, CHUNK)
        if level < top:
            block_base -= blocks_of_level(T, half, WHOLE)
        if (block % 2 == 1) & (block * half > document):
            here = row_base + block // 2 * half + first % half
            square = load_tile(levels_ptr, here, BLOCK_D, total_rows, ROWS, BLOCK_D, BLOCK_D).to(
                tl.float32
            )
            if level < top:
                store_tile(levels_ptr, here, BLOCK_D, total_rows, t, ROWS, BLOCK_D, BLOCK_D)
                product = load_square(product_ptr, block_base + block - 1, BLOCK_D)
                t = product_dot(t, product, False, PRECISION)
            t += square
    if ((pair + 1) * CHUNK < T) & (first + ROWS > (pair + 1) * CHUNK):
        rows = first + tl.arange(0, ROWS)
        moves = (rows // CHUNK == pair + 1)[:, None]
        pointers = (
            levels_ptr
            + (rows - (pair // 2 + 1) * CHUNK)[:, None] * BLOCK_D
            + tl.arange(0, BLOCK_D)[None, :]
        )
        square = tl.load(pointers, mask=moves, other=0.0).to(tl.float32)
        tl.store(pointers, t.to(levels_ptr.dtype.element_ty), mask=moves)
        w, x = load_factors(
            w_ptr + b * stride_wb + h * stride_wh, beta_ptr + b * stride_bb + h * stride_bh,
            inverse_ptr, pair, num_chunks, head, stride_wt, stride_bt, T, HEAD_DIM, BLOCK_D, CHUNK,
        )  # fmt: skip
        tw = tl.where(moves, dot(t, tl.trans(w), PRECISION), 0.0)
        t += square - dot(dot(tw, x, PRECISION), w, PRECISION)
    index = q_head * num_chunks * CHUNK
    store_tile(
        dq_start_ptr, index + first, BLOCK_D, index + num_chunks * CHUNK, t, ROWS, BLOCK_D, BLOCK_D
    )


@triton.jit(do_not_specialize=RUNTIME)
def key_sweep_backward_kernel(
    w_ptr, beta_ptr, inverse_ptr, product_ptr, levels_ptr, dk_end_ptr, end_ptr, incoming_ptr,
    stride_wb, stride_wt, stride_wh, stride_bb, stride_bt, stride_bh, stride_eb, stride_et,
    stride_eh, T, H, num_chunks, num_levels, total_rows, total_blocks, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, HAS_DOC: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of one or two chunks' k_end; on the way dk_square -> dk+ in the levels.

    `incoming`: the gradient of the keys at the end of the piece.
    """
    first, head = tl.program_id(0) * ROWS, tl.program_id(1)
    b, h = (head // H).to(tl.int64), head % H
    head = head.to(tl.int64)
    levels_ptr += head * total_rows * BLOCK_D
    pair = first // (2 * CHUNK) * 2
    reach = T
    if HAS_DOC:
        reach = tl.load(end_ptr + b * T + tl.minimum((pair + 2) * CHUNK, T) - 1)
    row_base = total_rows
    block_base = head * total_blocks + total_blocks
    if WHOLE:
        top = num_levels
        block_base -= 1  # that of the piece
        incoming_ptr += b * stride_eb + h * stride_eh
        t = load_tile(incoming_ptr, first, stride_et, T, ROWS, BLOCK_D, HEAD_DIM).to(tl.float32)
    else:
        top = num_levels - 1
        t = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for step in range(1, num_levels):
        level = num_levels - step
        half = CHUNK << level
        block = first // half
        right = (block + 1) * half
        last = right if WHOLE else right + half
        row_base -= rows_of_level(T, level, CHUNK)
        if level < top:
            block_base -= blocks_of_level(T, half, WHOLE)
        if (block % 2 == 0) & (right < reach):
            here = row_base + block // 2 * half + first % half
            square = load_tile(levels_ptr, here, BLOCK_D, total_rows, ROWS, BLOCK_D, BLOCK_D).to(
                tl.float32
            )
            if (level < top) & (last <= T):
                store_tile(levels_ptr, here, BLOCK_D, total_rows, t, ROWS, BLOCK_D, BLOCK_D)
                product = load_square(product_ptr, block_base + block + 1, BLOCK_D)
                t = product_dot(t, product, True, PRECISION)
            t += square
    if ((pair + 1) * CHUNK < T) & (first < (pair + 1) * CHUNK):
        rows = first + tl.arange(0, ROWS)
        moves = (rows // CHUNK == pair)[:, None]
        pointers = (
            levels_ptr
            + (rows - pair // 2 * CHUNK)[:, None] * BLOCK_D
            + tl.arange(0, BLOCK_D)[None, :]
        )
        square = tl.load(pointers, mask=moves, other=0.0).to(tl.float32)
        tl.store(pointers, t.to(levels_ptr.dtype.element_ty), mask=moves)
        w, x = load_factors(
            w_ptr + b * stride_wb + h * stride_wh, beta_ptr + b * stride_bb + h * stride_bh,
            inverse_ptr, pair + 1, num_chunks, head, stride_wt, stride_bt, T, HEAD_DIM, BLOCK_D,
            CHUNK,
        )  # fmt: skip
        tw = tl.where(moves, dot(t, tl.trans(w), PRECISION), 0.0)
        t += square - dot(dot(tw, tl.trans(x), PRECISION), w, PRECISION)
    index = head * num_chunks * CHUNK
    store_tile(
        dk_end_ptr, index + first, BLOCK_D, index + num_chunks * CHUNK, t, ROWS, BLOCK_D, BLOCK_D
    )


@triton.jit
def add_outer(
    acc, a_ptr, c_ptr, row, limit, r0, c0, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + a^T c over CHUNK rows of two levels, columns from r0 and c0, rows below `limit`."""
    a = load_tile(a_ptr + r0, row, BLOCK_D, limit, CHUNK, TILE, TILE)
    c = load_tile(c_ptr + c0, row, BLOCK_D, limit, CHUNK, TILE, TILE)
    return acc + dot(tl.trans(a), c, PRECISION)


@triton.jit
def product_gradient(
    q_levels_ptr, k_levels_ptr, dq_levels_ptr, dk_levels_ptr, start_ptr, end_ptr, T, H, level,
    row_base, total_rows, block, head, lo, hi, r0, c0, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, HAS_DOC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """TILE x TILE of a block's dP from tokens lo ... hi - 1 of the sibling that P moved.

    A left block moved queries of every head of the group: sum of dq+ q^T. A right one moved keys:
    sum of k dk+^T.
    """
    b = head // H
    half = CHUNK << level
    row = row_base + block // 2 * half
    acc = tl.zeros([TILE, TILE], tl.float32)
    if block % 2 == 0:
        first = (block + 1) * half
        hi = tl.minimum(hi, T - first)
        for g in tl.range(GROUP, num_stages=1):
            base = (head * GROUP + g) * total_rows * BLOCK_D
            for start in range(lo, hi, CHUNK):
                limit = row + hi
                if HAS_DOC:
                    pair = (first + start) // (2 * CHUNK) * (2 * CHUNK)
                    limit = tl.where(first > tl.load(start_ptr + b * T + pair), limit, 0)
                acc = add_outer(
                    acc, dq_levels_ptr + base, q_levels_ptr + base, row + start, limit, r0, c0,
                    BLOCK_D, CHUNK, TILE, PRECISION,
                )  # fmt: skip
    else:
        base = head * total_rows * BLOCK_D
        for start in range(lo, hi, CHUNK):
            limit = row + half
            if HAS_DOC:
                last = ((block - 1) * half + start) // (2 * CHUNK) * (2 * CHUNK) + 2 * CHUNK - 1
                limit = tl.where(block * half < tl.load(end_ptr + b * T + last), limit, 0)
            acc = add_outer(
                acc, k_levels_ptr + base, dk_levels_ptr + base, row + start, limit, r0, c0, BLOCK_D,
                CHUNK, TILE, PRECISION,
            )  # fmt: skip
    return acc


@triton.jit(do_not_specialize=RUNTIME)
def product_gradient_kernel(
    q_levels_ptr, k_levels_ptr, dq_levels_ptr, dk_levels_ptr, partial_ptr, start_ptr, end_ptr, T, H,
    level, row_base, num_blocks, num_splits, total_rows, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, HAS_DOC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial sums of one level's dP, ROWS tokens each: long blocks alone leave SMs idle."""
    block, split = tl.program_id(0) // num_splits, tl.program_id(0) % num_splits
    head, tile = tl.program_id(1).to(tl.int64), tl.program_id(2)
    r0, c0 = tile // (BLOCK_D // TILE) * TILE, tile % (BLOCK_D // TILE) * TILE
    acc = product_gradient(
        q_levels_ptr, k_levels_ptr, dq_levels_ptr, dk_levels_ptr, start_ptr, end_ptr, T, H, level,
        row_base, total_rows, block, head, split * ROWS, tl.minimum((split + 1) * ROWS, CHUNK <<
        level), r0, c0, GROUP, BLOCK_D, CHUNK, TILE, HAS_DOC, PRECISION,
    )  # fmt: skip
    partial_ptr += ((head * num_blocks + block) * num_splits + split) * BLOCK_D * BLOCK_D
    tl.store(tile_pointers(partial_ptr + c0, r0, BLOCK_D, TILE, TILE), acc)


@triton.jit(do_not_specialize=RUNTIME)
def tree_backward_kernel(
    q_levels_ptr, k_levels_ptr, dq_levels_ptr, dk_levels_ptr, start_ptr, end_ptr, product_ptr,
    partial_ptr, parent_ptr, gradient_ptr, T, H, level, row_base, total_rows, block_base,
    num_blocks, num_splits, num_parents, total_blocks, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, HAS_DOC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """TILE x TILE of one level's dP: from what P moved, and from the product of its parent."""
    block, head, tile = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    r0, c0 = tile // (BLOCK_D // TILE) * TILE, tile % (BLOCK_D // TILE) * TILE
    SIZE: tl.constexpr = BLOCK_D * BLOCK_D
    if SPLIT:
        acc = tl.zeros([TILE, TILE], tl.float32)
        partial_ptr += (head * num_blocks + block) * num_splits * SIZE + c0
        for split in range(num_splits):
            part_ptr = partial_ptr + tl.cast(split, tl.int64) * SIZE
            acc += tl.load(tile_pointers(part_ptr, r0, BLOCK_D, TILE, TILE))
    else:
        acc = product_gradient(
            q_levels_ptr, k_levels_ptr, dq_levels_ptr, dk_levels_ptr, start_ptr, end_ptr, T, H,
            level, row_base, total_rows, block, head, 0, CHUNK << level, r0, c0, GROUP, BLOCK_D,
            CHUNK, TILE, HAS_DOC, PRECISION,
        )  # fmt: skip
    if block // 2 < num_parents:
        parent_ptr += (head * num_parents + block // 2) * SIZE
        sibling_ptr = (
            product_ptr + (head * total_blocks + block_base + block + 1 - 2 * (block % 2)) * SIZE
        )
        for k in range(0, BLOCK_D, TILE):
            if block % 2 == 0:
                parent = tl.load(tile_pointers(parent_ptr + k, r0, BLOCK_D, TILE, TILE))
                right = tl.load(tile_pointers(sibling_ptr + k, c0, BLOCK_D, TILE, TILE))
                acc += dot(parent, tl.trans(right), PRECISION)
            else:
                left = tl.load(tile_pointers(sibling_ptr + r0, k, BLOCK_D, TILE, TILE))
                parent = tl.load(tile_pointers(parent_ptr + c0, k, BLOCK_D, TILE, TILE))
                acc += dot(tl.trans(left), parent, PRECISION)
    gradient_ptr += (head * num_blocks + block) * SIZE
    pointers = tile_pointers(gradient_ptr + c0, r0, BLOCK_D, TILE, TILE)
    tl.store(pointers, acc.to(gradient_ptr.dtype.element_ty))
