"""Gradients of the products P, from the top level down.

    P moved queries of the right sibling, q+ = P q:       dP += dq+ q^T
    P moved keys of the left sibling, k+ = P^T k:         dP += k dk+^T
    P_parent = P_left P_right:  dP_left += dP_parent P_right^T  dP_right += P_left^T dP_parent

q, k and the gradients dq+, dk+ of what moved are the levels' rows, summed in a fixed order. The
first and the last block of a level move nothing that moves again, and nothing comes back to them,
but in a piece of a longer sequence: there dP of the whole piece comes from other pieces.

At level 0 P = I - W^T X W (chunk.py), and only U = W dP and V = W dP^T are wanted:

    dX = -U W^T + ...       dW = -X V - X^T U + ...         (the rest: chunk_backward.py)

dP itself is not made there: W meets the left factor of each of its terms first.
"""

import triton
import triton.language as tl

from .chunk import load_factors
from .chunk_backward import add_dot, load_slab, store_matrix, store_slab
from .sweep import key_moves, query_moves
from .tiles import RUNTIME, as_type, dot, load_tile, move, move_columns, tile_pointers


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
    acc, parent_ptr, product_ptr, block, r0, c0, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + ROWS x COLS of what comes back from the parent's dP (fp32); product_ptr is the block's
    own.
    """
    SIZE: tl.constexpr = BLOCK_D * BLOCK_D
    if block % 2 == 0:
        rows = tl.load(tile_pointers(parent_ptr, r0, BLOCK_D, ROWS, BLOCK_D))
        right = tl.load(tile_pointers(product_ptr + SIZE, c0, BLOCK_D, COLS, BLOCK_D))
        acc += move(rows, right, True, PRECISION)
    else:
        left = tl.load(tile_pointers(product_ptr - SIZE + r0, 0, BLOCK_D, BLOCK_D, ROWS))
        columns = tl.load(tile_pointers(parent_ptr + c0, 0, BLOCK_D, BLOCK_D, COLS))
        acc += move_columns(left, columns, PRECISION)
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
            block, r0, c0, BLOCK_D, TILE, TILE, PRECISION,
        )  # fmt: skip
    gradient_ptr += (head * num_blocks + block) * SIZE
    pointers = tile_pointers(gradient_ptr + c0, r0, BLOCK_D, TILE, TILE)
    tl.store(pointers, acc)


@triton.jit
def load_side(
    ptr, offset, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_D: tl.constexpr, TYPE: tl.constexpr
):
    """ROWS x COLS of a D x D matrix from `offset` elements on: fp32 of a dP, TYPE of a P."""
    tile = tl.load(tile_pointers(ptr + offset, 0, BLOCK_D, ROWS, COLS))
    return as_type(tile, TYPE) if tile.dtype == tl.float16 else tile


@triton.jit
def add_through(
    neg_dx, w, x, w_ptr, dw_ptr, stride_wt, stride_dwt, T, first, a_ptr, c_ptr, stride_a, stride_c,
    row, stop, left_ptr, right_ptr, has_parent, GROUP: tl.constexpr, TURN_LEFT: tl.constexpr,
    TURN_RIGHT: tl.constexpr, SECOND: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What goes through U = (W a^T) c + (W L) R, with a and c of every head of the group: neg_dx +
    U W^T, and -X^T U into dw. SECOND: it is V, which adds -X V to dw. L and R are D x D matrices,
    stored as they are or turned.
    """
    SLAB: tl.constexpr = min(64, BLOCK_D)
    moved = tl.zeros([CHUNK, BLOCK_D], tl.float32)
    if has_parent:
        for k in tl.range(0, BLOCK_D, SLAB, num_stages=1):
            w_slab = load_slab(w_ptr, first, stride_wt, T, k, CHUNK, SLAB, HEAD_DIM)
            if TURN_LEFT:
                left = load_side(left_ptr, k, BLOCK_D, SLAB, BLOCK_D, w.dtype)
            else:
                left = load_side(left_ptr, k * BLOCK_D, SLAB, BLOCK_D, BLOCK_D, w.dtype)
            moved = add_dot(moved, w_slab, left, PRECISION, TRANS_B=TURN_LEFT)
    for column in tl.range(0, BLOCK_D, SLAB, num_stages=1):
        u = tl.zeros([CHUNK, SLAB], tl.float32)
        for g in tl.range(GROUP, num_stages=1):
            a = load_tile(a_ptr + g * stride_a, row, BLOCK_D, row + stop, CHUNK, BLOCK_D, BLOCK_D)
            c = load_slab(
                c_ptr + g * stride_c, row, BLOCK_D, row + stop, column, CHUNK, SLAB, BLOCK_D
            )
            u = add_dot(u, dot(w, tl.trans(a), PRECISION), c, PRECISION)
        if has_parent:
            if TURN_RIGHT:
                right = load_side(right_ptr, column * BLOCK_D, SLAB, BLOCK_D, BLOCK_D, w.dtype)
            else:
                right = load_side(right_ptr, column, BLOCK_D, SLAB, BLOCK_D, w.dtype)
            u = add_dot(u, moved, right, PRECISION, TRANS_B=TURN_RIGHT)
        dw = tl.zeros([CHUNK, SLAB], tl.float32)
        if SECOND:
            dw += load_slab(dw_ptr, first, stride_dwt, T, column, CHUNK, SLAB, HEAD_DIM).to(
                tl.float32
            )
            dw -= dot(x, u, PRECISION)
        else:
            w_slab = load_slab(w_ptr, first, stride_wt, T, column, CHUNK, SLAB, HEAD_DIM)
            neg_dx = add_dot(neg_dx, u, w_slab, PRECISION, TRANS_B=True)
            dw -= dot(tl.trans(x), u, PRECISION)
        store_slab(dw_ptr, first, stride_dwt, T, column, dw, CHUNK, SLAB, HEAD_DIM)
    return neg_dx


@triton.jit(do_not_specialize=RUNTIME)
def chunk_product_backward_kernel(
    w_ptr, beta_ptr, inverse_ptr, q_levels_ptr, k_levels_ptr, dq_moved_ptr, dk_moved_ptr, start_ptr,
    end_ptr, product_ptr, parent_ptr, dx_ptr, dw_ptr, stride_wb, stride_wt, stride_wh, stride_bb,
    stride_bt, stride_bh, stride_dwb, stride_dwt, stride_dwh, T, H, num_chunks, num_parents,
    total_rows, moved_rows, total_blocks, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, HAS_DOC: tl.constexpr, PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The parts of -dX (fp32) and dW that come through the chunk's product P."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    b, h = (head // H).to(tl.int64), head % H
    head = head.to(tl.int64)
    SIZE: tl.constexpr = BLOCK_D * BLOCK_D
    first, row = chunk * CHUNK, chunk // 2 * CHUNK
    w_ptr += b * stride_wb + h * stride_wh
    dw_ptr += b * stride_dwb + h * stride_dwh
    product_ptr += (head * total_blocks + chunk) * SIZE
    parent_ptr += (head * num_parents + chunk // 2) * SIZE
    has_parent = chunk // 2 < num_parents
    w, x = load_factors(
        w_ptr, beta_ptr + b * stride_bb + h * stride_bh, inverse_ptr, chunk, num_chunks, head,
        stride_wt, stride_bt, T, HEAD_DIM, BLOCK_D, CHUNK,
    )  # fmt: skip
    neg_dx = tl.zeros([CHUNK, CHUNK], tl.float32)
    levels, gradients = total_rows * BLOCK_D, moved_rows * BLOCK_D
    if chunk % 2 == 0:
        right = first + CHUNK
        stop = tl.where(query_moves(right, CHUNK, PIECE), tl.minimum(CHUNK, T - right), 0)
        if HAS_DOC:
            document = tl.load(start_ptr + b * T + tl.minimum(right, T - 1))
            stop = tl.where(right > document, stop, 0)
        q_ptr = q_levels_ptr + head * GROUP * levels
        dq_ptr = dq_moved_ptr + head * GROUP * gradients
        neg_dx = add_through(
            neg_dx, w, x, w_ptr, dw_ptr, stride_wt, stride_dwt, T, first, dq_ptr, q_ptr, gradients,
            levels, row, stop, parent_ptr, product_ptr + SIZE, has_parent, GROUP, False, True,
            False, HEAD_DIM, BLOCK_D, CHUNK, PRECISION,
        )  # fmt: skip
        tl.debug_barrier()  # dw was stored by other threads
        add_through(
            neg_dx, w, x, w_ptr, dw_ptr, stride_wt, stride_dwt, T, first, q_ptr, dq_ptr, levels,
            gradients, row, stop, product_ptr + SIZE, parent_ptr, has_parent, GROUP, False, True,
            True, HEAD_DIM, BLOCK_D, CHUNK, PRECISION,
        )  # fmt: skip
    else:
        stop = tl.where(key_moves(first, CHUNK, T, PIECE), CHUNK, 0)
        if HAS_DOC:
            stop = tl.where(first < tl.load(end_ptr + b * T + first - 1), stop, 0)
        k_ptr = k_levels_ptr + head * levels
        dk_ptr = dk_moved_ptr + head * gradients
        neg_dx = add_through(
            neg_dx, w, x, w_ptr, dw_ptr, stride_wt, stride_dwt, T, first, k_ptr, dk_ptr, levels,
            gradients, row, stop, product_ptr - SIZE, parent_ptr, has_parent, 1, True, False,
            False, HEAD_DIM, BLOCK_D, CHUNK, PRECISION,
        )  # fmt: skip
        tl.debug_barrier()
        add_through(
            neg_dx, w, x, w_ptr, dw_ptr, stride_wt, stride_dwt, T, first, dk_ptr, k_ptr, gradients,
            levels, row, stop, parent_ptr, product_ptr - SIZE, has_parent, 1, True, False, True,
            HEAD_DIM, BLOCK_D, CHUNK, PRECISION,
        )  # fmt: skip
    store_matrix(dx_ptr, head * num_chunks + chunk, neg_dx, CHUNK)
