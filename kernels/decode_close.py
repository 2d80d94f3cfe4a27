"""A decode step that fills a group closes it: two kernels after the attention of decode.py. They
end at once where the group is not full.

A new block of one group, with the product P_open, follows the closed ones. The suffix products of
those become longer by P_open; then the blocks whose levels are the trailing ones of their number
merge with it, as a binary counter carries: each key of them is multiplied once by the suffix
product of its block, and the left one's product by its suffix is that of the merged block.
"""

import triton
import triton.language as tl

from .decode import highest_bit, kernel, load_matrix


@triton.jit
def times(
    x_ptr, y_ptr, rows, limit, HEAD_DIM: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x[rows] @ y in fp32: x [limit, D] of any dtype, y [D, D] fp32."""
    SLICE: tl.constexpr = 32 if BLOCK_D > 32 else BLOCK_D
    columns = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for first in range(0, BLOCK_D, SLICE):
        inner = first + tl.arange(0, SLICE)
        x = load_matrix(x_ptr, rows, inner, HEAD_DIM, limit).to(tl.float32)
        y = load_matrix(y_ptr, inner, columns, HEAD_DIM, HEAD_DIM)
        total = tl.dot(x, y, total, input_precision=PRECISION)
    return total


@kernel
def suffix_kernel(
    position_ptr, open_product_ptr, suffix_ptr, n, slots, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, TOKENS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """BLOCK_P rows of a block's suffix product: suffix <- suffix P_open, P_open if it was empty."""
    bh, level = tl.program_id(0).to(tl.int64), tl.program_id(1)
    closed = tl.load(position_ptr + 1).to(tl.int32)
    count = tl.load(position_ptr) - closed * TOKENS
    if (count + n == TOKENS) & ((closed >> level) & 1 == 1):
        rows, dim = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
        open_product_ptr += bh * HEAD_DIM * HEAD_DIM
        suffix_ptr += (bh * slots + level) * HEAD_DIM * HEAD_DIM
        if closed & ((1 << level) - 1) == 0:
            moved = load_matrix(open_product_ptr, rows, dim, HEAD_DIM, HEAD_DIM)
        else:
            moved = times(
                suffix_ptr, open_product_ptr, rows, HEAD_DIM, HEAD_DIM, BLOCK_P, BLOCK_D, EXACT,
            )  # fmt: skip
        tl.debug_barrier()  # the rows are read before they are written
        mask = (rows < HEAD_DIM)[:, None] & (dim < HEAD_DIM)[None, :]
        tl.store(suffix_ptr + rows[:, None] * HEAD_DIM + dim[None, :], moved, mask=mask)


@kernel
def merge_kernel(
    position_ptr, open_product_ptr, product_ptr, suffix_ptr, keys_ptr, n, room, slots, pairs,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_T: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Groups of keys, and rows of a product, one after the other: a closing merges the blocks of
    the trailing ones of `closed`, whose suffix products are new.
    """
    closed = tl.load(position_ptr + 1).to(tl.int32)
    count = tl.load(position_ptr) - closed * TOKENS
    if count + n == TOKENS:
        merged = closed & ~(closed + 1)  # groups in trailing ones: 2^top - 1
        top = highest_bit(merged + 1)
        slices = tl.cdiv(HEAD_DIM, BLOCK_P)
        for item in range(tl.program_id(0), pairs * (merged + slices), tl.num_programs(0)):
            bh = (item // (merged + slices)).to(tl.int64)
            part = item % (merged + slices)
            if part < slices:
                _join_rows(
                    open_product_ptr, product_ptr, suffix_ptr, slots, bh, top,
                    part * BLOCK_P + tl.arange(0, BLOCK_P), HEAD_DIM, BLOCK_D, BLOCK_P, EXACT,
                )  # fmt: skip
            else:
                place = closed - merged + part - slices
                _move_group(
                    keys_ptr + (bh * room + place * TOKENS) * HEAD_DIM,
                    suffix_ptr + (bh * slots + highest_bit(closed ^ place)) * HEAD_DIM * HEAD_DIM,
                    HEAD_DIM, BLOCK_D, TOKENS, BLOCK_T, PRECISION,
                )  # fmt: skip


@triton.jit
def _join_rows(
    open_product_ptr, product_ptr, suffix_ptr, slots, bh, top, rows, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Rows of the product of the block that the closing leaves, at level `top`."""
    dim = tl.arange(0, BLOCK_D)
    if top == 0:
        open_product_ptr += bh * HEAD_DIM * HEAD_DIM
        joined = load_matrix(open_product_ptr, rows, dim, HEAD_DIM, HEAD_DIM)
    else:
        left = (bh * slots + top - 1) * HEAD_DIM * HEAD_DIM
        joined = times(
            product_ptr + left, suffix_ptr + left, rows, HEAD_DIM, HEAD_DIM, BLOCK_P, BLOCK_D,
            EXACT,
        )  # fmt: skip
    target = product_ptr + (bh * slots + top) * HEAD_DIM * HEAD_DIM
    mask = (rows < HEAD_DIM)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(target + rows[:, None] * HEAD_DIM + dim[None, :], joined, mask=mask)


@triton.jit
def _move_group(
    group_ptr, move_ptr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys of a group to the end of the merged block, in place."""
    rows, dim = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    moved = times(
        group_ptr, move_ptr, rows, TOKENS, HEAD_DIM, BLOCK_T, BLOCK_D, PRECISION
    )  # fmt: skip
    tl.debug_barrier()  # the rows are read before they are written
    mask = (rows < TOKENS)[:, None] & (dim < HEAD_DIM)[None, :]
    places = rows[:, None] * HEAD_DIM + dim[None, :]
    tl.store(group_ptr + places, moved.to(group_ptr.dtype.element_ty), mask=mask)
