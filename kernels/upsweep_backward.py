"""Gradients of the products P, from the top level down.

    P moved queries of the right sibling, q+ = P q:       dP += dq+ q^T
    P moved keys of the left sibling, k+ = P^T k:         dP += k dk+^T
    P_parent = P_left P_right:  dP_left += dP_parent P_right^T  dP_right += P_left^T dP_parent

q, k and the gradients dq+, dk+ of what moved are the levels' rows, summed in a fixed order. The
first and the last block of a level move nothing that moves again, and nothing comes back to them,
but in a segment of a longer sequence: there dP of the whole segment comes from other segments.

At level 0 P = I - W^T X W (chunk.py), and only U = W dP and V = W dP^T are wanted:

    dX = -U W^T + ...       dW = -X V - X^T U + ...         (the rest: chunk_backward.py)

dP itself stays in registers there.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .carry import crossed
from .chunk import load_factors
from .products import add_dot, dot
from .tiles import kernel, load_tile, store_matrix, store_tile, tile_pointers


class Moved(NamedTuple):
    """The rows that P moved at every level, the gradients of the results, and the documents."""

    q_levels_ptr: tl.tensor
    k_levels_ptr: tl.tensor
    dq_moved_ptr: tl.tensor
    dk_moved_ptr: tl.tensor
    start_ptr: tl.tensor
    end_ptr: tl.tensor
    total_rows: tl.tensor
    moved_rows: tl.tensor
    T: tl.tensor
    H: tl.tensor


class Parent(NamedTuple):
    """The gradients of the products one level up, with the largest entries of their parts."""

    gradient_ptr: tl.tensor
    size_ptr: tl.tensor
    count: tl.tensor  # of a head


@triton.jit
def moved_outer(
    moved, half, row_base, block, head, lo, hi, r0, c0, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, HAS_DOC: tl.constexpr,
    SEGMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns ROWS x COLS of a block's dP from tokens lo ... hi - 1 of the sibling that P moved:
    queries of every head of the group, or keys.
    """
    T, H = moved.T, moved.H
    lo = tl.cast(lo, tl.int32)
    b = head // H
    left, right = block // 2 * 2 * half, (block // 2 * 2 + 1) * half
    row = row_base + left // 2
    levels = tl.cast(moved.total_rows, tl.int64) * BLOCK_D
    gradients = tl.cast(moved.moved_rows, tl.int64) * BLOCK_D
    if block % 2 == 0:
        heads = GROUP
        a_ptr, stride_a = moved.dq_moved_ptr + head * GROUP * gradients, gradients
        c_ptr, stride_c = moved.q_levels_ptr + head * GROUP * levels, levels
        # queries of the document of the token before the block
        stop = tl.where((left > 0) | SEGMENT, T, 0)
        if HAS_DOC:
            stop = tl.load(moved.end_ptr + b * T + left - 1, mask=left > 0, other=0)
        stop = tl.minimum(hi, stop - right)
    else:
        heads = 1
        a_ptr, stride_a = moved.k_levels_ptr + head * levels, levels
        c_ptr, stride_c = moved.dk_moved_ptr + head * gradients, gradients
        # keys of the document of the token after the block
        after = right + half
        stop = tl.where((after < T) | SEGMENT, hi, 0)
        if HAS_DOC:
            document = tl.load(moved.start_ptr + b * T + after, mask=after < T, other=after)
            lo = tl.maximum(lo, (document - left) // CHUNK * CHUNK)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for g in tl.range(heads, num_stages=1):
        for start in range(lo, stop, CHUNK):
            a = load_tile(
                a_ptr + g * stride_a + r0, row + start, BLOCK_D, row + stop, CHUNK, ROWS, ROWS
            )
            c = load_tile(
                c_ptr + g * stride_c + c0, row + start, BLOCK_D, row + stop, CHUNK, COLS, COLS
            )
            acc += dot(tl.trans(a), c, PRECISION)
    return acc


@triton.jit
def add_parent(
    acc, parent, product_ptr, total_blocks, block_base, block, head, r0, c0, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns acc + ROWS x COLS of what comes back from the `Parent`'s dP, fp32."""
    SIZE: tl.constexpr = BLOCK_D * BLOCK_D
    SLAB: tl.constexpr = min(64, BLOCK_D)
    PARTS: tl.constexpr = SIZE // (SLAB * SLAB)
    TYPE: tl.constexpr = product_ptr.dtype.element_ty
    MOVE: tl.constexpr = "fp16x3" if TYPE == tl.float16 else PRECISION
    index = head * parent.count + block // 2
    parent_ptr = parent.gradient_ptr + index * SIZE
    sibling = block - 2 * (block % 2) + 1
    product_ptr += (head * total_blocks + block_base + sibling) * SIZE
    size = tl.max(tl.load(parent.size_ptr + index * PARTS + tl.arange(0, PARTS)))
    acc *= 1.0 / size
    for k in tl.range(0, BLOCK_D, SLAB, num_stages=1):
        if block % 2 == 0:
            rows = tl.load(tile_pointers(parent_ptr + k, r0, BLOCK_D, ROWS, SLAB))
            right = tl.load(tile_pointers(product_ptr + k, c0, BLOCK_D, COLS, SLAB))
            rows = (rows * (1.0 / size)).to(TYPE)
            acc = add_dot(acc, rows, right, MOVE, TRANS_B=True)
        else:
            left = tl.load(tile_pointers(product_ptr + r0, k, BLOCK_D, SLAB, ROWS))
            columns = tl.load(tile_pointers(parent_ptr + c0, k, BLOCK_D, SLAB, COLS))
            columns = (columns * (1.0 / size)).to(TYPE)
            acc = add_dot(acc, left, columns, MOVE, TRANS_A=True)
    return acc * size


@kernel
def product_gradient_kernel(
    q_levels_ptr, k_levels_ptr, dq_moved_ptr, dk_moved_ptr, partial_ptr, start_ptr, end_ptr, T, H,
    level, row_base, num_blocks, num_splits, total_rows, moved_rows, GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
    HAS_DOC: tl.constexpr, SEGMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums one level's dP in parts of SPLIT tokens each: long blocks alone leave SMs idle."""
    block, split = tl.program_id(0) // num_splits, tl.program_id(0) % num_splits
    head, tile = tl.program_id(1).to(tl.int64), tl.program_id(2)
    r0, c0 = tile // (BLOCK_D // TILE) * TILE, tile % (BLOCK_D // TILE) * TILE
    half = CHUNK << level
    moved = Moved(
        q_levels_ptr, k_levels_ptr, dq_moved_ptr, dk_moved_ptr, start_ptr, end_ptr, total_rows,
        moved_rows, T, H,
    )  # fmt: skip
    acc = moved_outer(
        moved, half, row_base, block, head, split * SPLIT, tl.minimum((split + 1) * SPLIT, half),
        r0, c0, GROUP, BLOCK_D, CHUNK, TILE, TILE, HAS_DOC, SEGMENT, PRECISION,
    )  # fmt: skip
    partial_ptr += ((head * num_blocks + block) * num_splits + split) * BLOCK_D * BLOCK_D
    tl.store(tile_pointers(partial_ptr + c0, r0, BLOCK_D, TILE, TILE), acc)


@kernel
def upsweep_backward_kernel(
    q_levels_ptr, k_levels_ptr, dq_moved_ptr, dk_moved_ptr, start_ptr, end_ptr, product_ptr,
    partial_ptr, parent_ptr, parent_size_ptr, gradient_ptr, size_ptr, T, H, level, row_base,
    total_rows, moved_rows, block_base, num_blocks, num_splits, num_parents, total_blocks,
    GROUP: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    PARTIAL: tl.constexpr, HAS_DOC: tl.constexpr, SEGMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes TILE x TILE of one level's dP: from what P moved, and from the product of its
    parent.
    """
    block, head, tile = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    r0, c0 = tile // (BLOCK_D // TILE) * TILE, tile % (BLOCK_D // TILE) * TILE
    SIZE: tl.constexpr = BLOCK_D * BLOCK_D
    half = CHUNK << level
    b = head // H
    if not crossed(start_ptr, b, block * half, half, T, HAS_DOC, SEGMENT):
        return
    if PARTIAL:
        acc = tl.zeros([TILE, TILE], tl.float32)
        partial_ptr += (head * num_blocks + block) * num_splits * SIZE + c0
        for split in range(num_splits):
            part_ptr = partial_ptr + tl.cast(split, tl.int64) * SIZE
            acc += tl.load(tile_pointers(part_ptr, r0, BLOCK_D, TILE, TILE))
    else:
        moved = Moved(
            q_levels_ptr, k_levels_ptr, dq_moved_ptr, dk_moved_ptr, start_ptr, end_ptr, total_rows,
            moved_rows, T, H,
        )  # fmt: skip
        acc = moved_outer(
            moved, half, row_base, block, head, 0, half, r0, c0, GROUP, BLOCK_D, CHUNK, TILE, TILE,
            HAS_DOC, SEGMENT, PRECISION,
        )  # fmt: skip
    if crossed(start_ptr, b, block // 2 * 2 * half, 2 * half, T, HAS_DOC, SEGMENT):
        parent = Parent(parent_ptr, parent_size_ptr, num_parents)
        acc = add_parent(
            acc, parent, product_ptr, total_blocks, block_base, block, head, r0, c0, BLOCK_D, TILE,
            TILE, PRECISION,
        )  # fmt: skip
    gradient_ptr += (head * num_blocks + block) * SIZE
    pointers = tile_pointers(gradient_ptr + c0, r0, BLOCK_D, TILE, TILE)
    tl.store(pointers, acc)
    PARTS: tl.constexpr = SIZE // min(64, BLOCK_D) ** 2
    OWN: tl.constexpr = PARTS * TILE * TILE // SIZE
    parts = (head * num_blocks + block) * PARTS + tile * OWN + tl.arange(0, OWN)
    tl.store(size_ptr + parts, tl.maximum(tl.max(tl.abs(acc)), 1e-30))


@kernel
def chunk_product_backward_kernel(
    w_tiles, beta_ptr, inverse_ptr, q_levels_ptr, k_levels_ptr, dq_moved_ptr, dk_moved_ptr,
    start_ptr, end_ptr, product_ptr, parent_ptr, size_ptr, dx_ptr, dw_ptr, stride_bb, stride_bt,
    stride_bh, stride_dwb, stride_dwt, stride_dwh, T, H, num_chunks, num_parents, total_rows,
    moved_rows, total_blocks, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr, HAS_DOC: tl.constexpr, SEGMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes the parts of -dX (fp32) and dW that come through the chunk's product P. Where
    products are stored in fp16 dP is taken to 11 bits, as they are; W to 2^-25 in fp16.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    b, h = (head // H).to(tl.int64), head % H
    head = head.to(tl.int64)
    dw_ptr += b * stride_dwb + h * stride_dwh
    moved = Moved(
        q_levels_ptr, k_levels_ptr, dq_moved_ptr, dk_moved_ptr, start_ptr, end_ptr, total_rows,
        moved_rows, T, H,
    )  # fmt: skip
    gradient = moved_outer(
        moved, CHUNK, 0, chunk, head, 0, CHUNK, 0, 0, GROUP, BLOCK_D, CHUNK, BLOCK_D, BLOCK_D,
        HAS_DOC, SEGMENT, PRECISION,
    )  # fmt: skip
    if crossed(start_ptr, b, chunk // 2 * 2 * CHUNK, 2 * CHUNK, T, HAS_DOC, SEGMENT):
        parent = Parent(parent_ptr, size_ptr, num_parents)
        gradient = add_parent(
            gradient, parent, product_ptr, total_blocks, 0, chunk, head, 0, 0, BLOCK_D, BLOCK_D,
            BLOCK_D, PRECISION,
        )  # fmt: skip
    w, x = load_factors(
        w_tiles, beta_ptr + b * stride_bb + h * stride_bh, inverse_ptr, chunk, num_chunks, b, h,
        head, stride_bt, T, BLOCK_D, CHUNK,
    )  # fmt: skip
    TYPE: tl.constexpr = product_ptr.dtype.element_ty
    MOVE: tl.constexpr = "fp16x3" if TYPE == tl.float16 else PRECISION
    size = tl.maximum(tl.max(tl.abs(gradient)), 1e-30)
    gradient = (gradient * (1.0 / size)).to(TYPE)
    zero = tl.zeros([CHUNK, BLOCK_D], tl.float32)
    v = dot(w.to(TYPE), tl.trans(gradient), MOVE) * size
    neg_dw = add_dot(zero, x, v, PRECISION)
    u = dot(w.to(TYPE), gradient, MOVE) * size
    store_matrix(dx_ptr, head * num_chunks + chunk, dot(u, tl.trans(w), PRECISION), CHUNK)
    neg_dw = add_dot(neg_dw, x, u, PRECISION, TRANS_A=True)
    store_tile(dw_ptr, chunk * CHUNK, stride_dwt, T, -neg_dw, CHUNK, BLOCK_D, HEAD_DIM)
