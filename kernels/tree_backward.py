"""Gradients of the products P, from the top level down.

    P moved queries of the right sibling, q+ = P q:       dP += dq+ q^T
    P moved keys of the left sibling, k+ = P^T k:         dP += k dk+^T
    P_parent = P_left P_right:  dP_left += dP_parent P_right^T  dP_right += P_left^T dP_parent

q, k and the gradients dq+, dk+ of what moved are the levels' rows, summed in a fixed order. The
first and the last block of a level move nothing that moves again, and nothing comes back to them,
but in a piece of a longer sequence: there dP of the whole piece comes from other pieces.
"""

import triton
import triton.language as tl

from .sweep import key_moves, query_moves
from .tiles import RUNTIME, as_type, dot, load_tile, tile_pointers


@triton.jit
def moved_outer(
    q_levels_ptr, k_levels_ptr, dq_moved_ptr, dk_moved_ptr, start_ptr, end_ptr, T, H, half,
    row_base, total_rows, moved_rows, block, head, lo, hi, r0, c0, GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    HAS_DOC: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ROWS x COLS of a block's dP from tokens lo ... hi - 1 of the sibling that P moved: queries of
    every head of the group, or keys.
    """
    b = head // H
    first = block * half
    row = row_base + block // 2 * half
    acc = tl.zeros([ROWS, COLS], tl.float32)
    if block % 2 == 0:
        first += half
        stop = tl.where(query_moves(first, half, PIECE), tl.minimum(hi, T - first), 0)
        for g in tl.range(GROUP, num_stages=1):
            a_ptr = dq_moved_ptr + (head * GROUP + g) * moved_rows * BLOCK_D + r0
            c_ptr = q_levels_ptr + (head * GROUP + g) * total_rows * BLOCK_D + c0
            for start in range(lo, stop, CHUNK):
                limit = row + stop
                if HAS_DOC:
                    limit = tl.where(first > tl.load(start_ptr + b * T + first + start), limit, 0)
                a = load_tile(a_ptr, row + start, BLOCK_D, limit, CHUNK, ROWS, ROWS)
                c = load_tile(c_ptr, row + start, BLOCK_D, limit, CHUNK, COLS, COLS)
                acc += dot(tl.trans(a), c, PRECISION)
    else:
        stop = tl.where(key_moves(first, half, T, PIECE), hi, 0)
        a_ptr = k_levels_ptr + head * total_rows * BLOCK_D + r0
        c_ptr = dk_moved_ptr + head * moved_rows * BLOCK_D + c0
        for start in range(lo, stop, CHUNK):
            limit = row + half
            if HAS_DOC:
                last = first - half + start + CHUNK - 1
                limit = tl.where(first < tl.load(end_ptr + b * T + last), limit, 0)
            a = load_tile(a_ptr, row + start, BLOCK_D, limit, CHUNK, ROWS, ROWS)
            c = load_tile(c_ptr, row + start, BLOCK_D, limit, CHUNK, COLS, COLS)
            acc += dot(tl.trans(a), c, PRECISION)
    return acc


@triton.jit
def add_parent(
    acc, parent_ptr, product_ptr, block, r0, c0, TYPE: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + ROWS x COLS of what comes back from the parent's dP (fp32); product_ptr is the block's
    own. Rounding P to the inputs' TYPE costs nothing here, rounding dP would.
    """
    SIZE: tl.constexpr = BLOCK_D * BLOCK_D
    if block % 2 == 0:
        rows = tl.load(tile_pointers(parent_ptr, r0, BLOCK_D, ROWS, BLOCK_D))
        right = tl.load(tile_pointers(product_ptr + SIZE, c0, BLOCK_D, COLS, BLOCK_D))
        acc += dot(rows, tl.trans(as_type(right, TYPE)), PRECISION)
    else:
        left = tl.load(tile_pointers(product_ptr - SIZE + r0, 0, BLOCK_D, BLOCK_D, ROWS))
        columns = tl.load(tile_pointers(parent_ptr + c0, 0, BLOCK_D, BLOCK_D, COLS))
        acc += dot(tl.trans(as_type(left, TYPE)), columns, PRECISION)
    return acc


@triton.jit(do_not_specialize=RUNTIME)
def product_gradient_kernel(
    q_levels_ptr, k_levels_ptr, dq_moved_ptr, dk_moved_ptr, partial_ptr, start_ptr, end_ptr, T, H,
    level, row_base, num_blocks, num_splits, total_rows, moved_rows, GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
    HAS_DOC: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial sums of one level's dP, SPLIT tokens each: long blocks alone leave SMs idle."""
    block, split = tl.program_id(0) // num_splits, tl.program_id(0) % num_splits
    head, tile = tl.program_id(1).to(tl.int64), tl.program_id(2)
    r0, c0 = tile // (BLOCK_D // TILE) * TILE, tile % (BLOCK_D // TILE) * TILE
    half = CHUNK << level
    acc = moved_outer(
        q_levels_ptr, k_levels_ptr, dq_moved_ptr, dk_moved_ptr, start_ptr, end_ptr, T, H, half,
        row_base, total_rows, moved_rows, block, head, split * SPLIT,
        tl.minimum((split + 1) * SPLIT, half), r0, c0, GROUP, BLOCK_D, CHUNK, TILE, TILE, HAS_DOC,
        PIECE, PRECISION,
    )  # fmt: skip
    partial_ptr += ((head * num_blocks + block) * num_splits + split) * BLOCK_D * BLOCK_D
    tl.store(tile_pointers(partial_ptr + c0, r0, BLOCK_D, TILE, TILE), acc)


@triton.jit(do_not_specialize=RUNTIME)
def tree_backward_kernel(
    q_levels_ptr, k_levels_ptr, dq_moved_ptr, dk_moved_ptr, start_ptr, end_ptr, product_ptr,
    partial_ptr, parent_ptr, gradient_ptr, T, H, level, row_base, total_rows, moved_rows,
    block_base, num_blocks, num_splits, num_parents, total_blocks, GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, PARTIAL: tl.constexpr,
    HAS_DOC: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """TILE x TILE of one level's dP: from what P moved, and from the product of its parent."""
    block, head, tile = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    r0, c0 = tile // (BLOCK_D // TILE) * TILE, tile % (BLOCK_D // TILE) * TILE
    SIZE: tl.constexpr = BLOCK_D * BLOCK_D
    if PARTIAL:
        acc = tl.zeros([TILE, TILE], tl.float32)
        partial_ptr += (head * num_blocks + block) * num_splits * SIZE + c0
        for split in range(num_splits):
            part_ptr = partial_ptr + tl.cast(split, tl.int64) * SIZE
            acc += tl.load(tile_pointers(part_ptr, r0, BLOCK_D, TILE, TILE))
    else:
        half = CHUNK << level
        acc = moved_outer(
            q_levels_ptr, k_levels_ptr, dq_moved_ptr, dk_moved_ptr, start_ptr, end_ptr, T, H, half,
            row_base, total_rows, moved_rows, block, head, 0, half, r0, c0, GROUP, BLOCK_D, CHUNK,
            TILE, TILE, HAS_DOC, PIECE, PRECISION,
        )  # fmt: skip
    if block // 2 < num_parents:
        acc = add_parent(
            acc, parent_ptr + (head * num_parents + block // 2) * SIZE,
            product_ptr + (head * total_blocks + block_base + block) * SIZE,
            block, r0, c0, q_levels_ptr.dtype.element_ty, BLOCK_D, TILE, TILE, PRECISION,
        )  # fmt: skip
    gradient_ptr += (head * num_blocks + block) * SIZE
    pointers = tile_pointers(gradient_ptr + c0, r0, BLOCK_D, TILE, TILE)
    tl.store(pointers, acc)
