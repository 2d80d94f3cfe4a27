"""Loads and stores of tiles, and what every kernel is decorated with."""

from typing import TypeAlias

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import config, constants

GATE_SPAN = tl.constexpr(constants.GATE_SPAN)
LOG2_E = tl.constexpr(constants.LOG2_E)
LN_2 = tl.constexpr(constants.LN_2)


RUNTIME = """
T TQ TK H HQ num_chunks num_levels total_rows moved_rows total_blocks
num_blocks num_splits num_parents level row_base block_base child_base parent_base
stride_bb stride_bt stride_bh stride_dbb stride_dbt stride_dbh stride_lb stride_lt stride_lh
""".split()
"""Arguments that follow the sequence length: specialised, they would compile anew for others."""

UNALIGNED = """
beta_ptr d_beta_ptr gate_ptr offset_ptr log_gate_ptr d_log_gate_ptr total_ptr lse_ptr row_sum_ptr
col_sum_ptr start_ptr end_ptr
""".split()
"""Tensors without a last dimension of D. Some groups of heads begin at 16 bytes in them and some do
not; what is read of them are single values per row anyway.
"""

kernel = triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=UNALIGNED)
"""Decorates a kernel that is launched: one version serves all lengths and groups of heads."""


def padded(width: int, least: int = 16) -> int:
    """Returns the power of two that holds `width`, but not less than `least`."""
    return max(least, 1 << (width - 1).bit_length())


@triton.jit
def gate_rows(T):
    """Returns the running sums that a head stores: those of whole spans."""
    return tl.cdiv(T, GATE_SPAN) * GATE_SPAN


@triton.jit
def tile_pointers(ptr, first_row, stride, ROWS: tl.constexpr, COLS: tl.constexpr, column=0):
    """Returns pointers [ROWS, COLS] to consecutive rows; 64-bit only in the scalar part."""
    base = ptr + tl.cast(first_row, tl.int64) * stride + column
    return base + (
        tl.arange(0, ROWS).to(tl.int64)[:, None] * stride + tl.arange(0, COLS).to(tl.int64)[None, :]
    )


@triton.jit
def tile_mask(
    first_row, limit, column, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr
):
    """Returns the mask of what exists of a tile: rows before `limit`, columns before WIDTH.
    `column`, the first one, is a multiple of COLS less than WIDTH.
    """
    mask = (first_row + tl.arange(0, ROWS) < limit)[:, None]
    if WIDTH % COLS != 0:
        mask = mask & (column + tl.arange(0, COLS) < WIDTH)[None, :]
    return mask


@triton.jit
def load_tile(
    ptr, first_row, stride, limit, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr,
    column=0,
):  # fmt: skip
    """Loads the tile [ROWS, COLS] of rows first_row ... and columns `column` ...; zero from row
    `limit` and from column WIDTH on.
    """
    mask = tile_mask(first_row, limit, column, ROWS, COLS, WIDTH)
    pointers = tile_pointers(ptr, first_row, stride, ROWS, COLS, column)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_full_tile(
    ptr, first_row, stride, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr
):
    """Loads a tile as `load_tile` does, of whole rows that all exist."""
    pointers = tile_pointers(ptr, first_row, stride, ROWS, COLS)
    if WIDTH != COLS:
        return tl.load(pointers, mask=(tl.arange(0, COLS) < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_tile(
    ptr, first_row, stride, limit, tile, ROWS: tl.constexpr, COLS: tl.constexpr,
    WIDTH: tl.constexpr, column=0,
):  # fmt: skip
    """Stores a tile where `load_tile` would read it, cast to the pointer's type."""
    mask = tile_mask(first_row, limit, column, ROWS, COLS, WIDTH)
    pointers = tile_pointers(ptr, first_row, stride, ROWS, COLS, column)
    tl.store(pointers, tile.to(ptr.dtype.element_ty), mask=mask)


Source: TypeAlias = TensorDescriptor | tuple
"""A kernel loads tiles from a descriptor, or from a pointer with strides."""


def pointer_source(x: Tensor) -> tuple:
    """Returns where `load_head_tile` reads and `store_head_tile` writes tiles of x [B, heads, T,
    width]: the pointer and strides. That between rows is compiled in: a constant of a model, and of
    the batch size where that is a dimension between tokens and heads.
    """
    return x, *x.stride()[:2], tl.constexpr(x.stride(2)), tl.constexpr(x.shape[3])


def source(x: Tensor, rows: int, columns: int | None = None, *, descriptors: bool = True) -> Source:
    """Returns what `load_head_tile` reads tiles [rows, columns] of x [B, heads, T, width] from;
    whole rows by default.

    From Hopper on a descriptor: a tile goes from memory to where tensor cores read it, past the
    registers (TMA), and loops over tiles take up to a third less of them. Before, a
    `pointer_source`: the compiler would emulate a descriptor, but not load ahead by it.
    """
    if descriptors and config.architecture().descriptors:
        tile = [1, 1, rows, columns or padded(x.shape[3])]
        return TensorDescriptor(x, list(x.shape), list(x.stride()), tile)
    return pointer_source(x)


@triton.jit
def head_pointer(pointers, b, head):
    return pointers[0] + tl.cast(b, tl.int64) * pointers[1] + tl.cast(head, tl.int64) * pointers[2]


@triton.jit
def load_head_tile(source, b, head, row, limit, ROWS: tl.constexpr, COLS: tl.constexpr, column=0):
    """Loads the tile [ROWS, COLS] of the rows row ... of a head and its columns from `column` on, a
    multiple of COLS; zero past the last column and from row `limit` on, where the head ends. None:
    whole rows that all exist.
    """
    if isinstance(source, tl.tensor_descriptor):
        at = [tl.cast(b, tl.int32), tl.cast(head, tl.int32), tl.cast(row, tl.int32), column]
        return tl.reshape(source.load(at), [ROWS, COLS])
    else:
        ptr = head_pointer(source, b, head)
        if limit is None:
            return load_full_tile(ptr, row, source[3], ROWS, COLS, source[4])
        else:
            return load_tile(ptr, row, source[3], limit, ROWS, COLS, source[4], column)


@triton.jit
def store_head_tile(
    pointers, b, head, row, limit, tile, ROWS: tl.constexpr, COLS: tl.constexpr, column=0
):
    """Stores a tile where `load_head_tile` would read it, cast to the pointer's type."""
    ptr = head_pointer(pointers, b, head)
    store_tile(ptr, row, pointers[3], limit, tile, ROWS, COLS, pointers[4], column)


@triton.jit
def load_product(source, b, head, index, SIZE: tl.constexpr):
    """Loads matrix `index` of a head's stack, whose rows lie one below the other."""
    return load_head_tile(source, b, head, index * SIZE, None, SIZE, SIZE)


def row_source(x: Tensor, columns: int, *, descriptors: bool) -> Source:
    """Returns the `source` of x [B, heads, T] for `load_head_row`; T is a multiple of `columns`."""
    if descriptors and config.architecture().descriptors:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, columns])
    return x, *x.stride()[:2]


@triton.jit
def load_head_row(source, b, head, first, COLS: tl.constexpr):
    """Loads values [1, COLS] of a head. By pointers they are fetched twice: that is elements enough
    for the compiler to copy each once; else every warp would fetch all of them.
    """
    if isinstance(source, tl.tensor_descriptor):
        at = [tl.cast(b, tl.int32), tl.cast(head, tl.int32), first]
        return tl.reshape(source.load(at), [1, COLS])
    else:
        ptr = head_pointer(source, b, head)
        both = ptr + (first + tl.arange(0, COLS))[:, None] + tl.zeros([1, 2], tl.int32)
        return tl.split(tl.load(both))[0][None, :]


@triton.jit
def matrix_pointers(ptr, index, SIZE: tl.constexpr):
    """Returns pointers to matrix `index` of a stack [..., SIZE, SIZE]."""
    offsets = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    return ptr + tl.cast(index, tl.int64) * (SIZE * SIZE) + offsets


@triton.jit
def load_matrix(ptr, index, SIZE: tl.constexpr, AGAIN: tl.constexpr = False):
    """Loads matrix `index`. AGAIN: not merged with a load whose tile would then stay live."""
    return tl.load(matrix_pointers(ptr, index, SIZE), cache_modifier=".cg" if AGAIN else "")


@triton.jit
def store_matrix(ptr, index, tile, SIZE: tl.constexpr):
    """Stores matrix `index`, cast to the pointer's type."""
    tl.store(matrix_pointers(ptr, index, SIZE), tile.to(ptr.dtype.element_ty))
