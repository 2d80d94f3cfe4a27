"""Tile helpers shared by the kernels: loads, stores, roundings, and the row layout of the dyadic levels.

A *level* l pairs neighbouring blocks of `half = CHUNK << l` tokens. Only right blocks have moved queries
and only left blocks have moved keys, so level l stores half of the tokens: the token at position t lies
in row `(t // (2 half)) * half + t % half` of its level, and the levels lie one after another.
"""

import triton
import triton.language as tl

CHUNK = 64
"""Tokens per UT transform: the triangular solve costs CHUNK^2, a level less costs D^2, per token."""


def num_levels(seq_len: int) -> int:
    """Levels that have at least one square: level l needs more than CHUNK << l tokens."""
    levels = 0
    while seq_len > CHUNK << levels:
        levels += 1
    return levels


def level_rows(seq_len: int, level: int) -> int:
    """Rows of one level: a whole left block for every pair whose right block has a token."""
    half = CHUNK << level
    return (seq_len + half - 1) // (2 * half) * half


def total_rows(seq_len: int) -> int:
    """Rows of all levels of one head."""
    return sum(level_rows(seq_len, level) for level in range(num_levels(seq_len)))


def level_blocks(seq_len: int, level: int) -> int:
    """Blocks of a level whose product P is read: the complete ones."""
    return seq_len // (CHUNK << level)


def total_blocks(seq_len: int) -> int:
    """Stored products of one head: levels 1 ... num_levels - 2 (chunks keep their factors instead)."""
    return sum(level_blocks(seq_len, level) for level in range(1, num_levels(seq_len) - 1))


@triton.jit
def rows_of_level(seq_len, level, CHUNK: tl.constexpr):
    """`level_rows` on the device."""
    half = CHUNK << level
    return (seq_len + half - 1) // (2 * half) * half


@triton.jit
def tile_pointers(ptr, first_row, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Pointers [ROWS, COLS] to consecutive rows; 64-bit only in the scalar part."""
    base = ptr + tl.cast(first_row, tl.int64) * stride
    return base + tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLS)[None, :]


@triton.jit
def load_tile(ptr, first_row, stride, limit, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr):
    """Tile [ROWS, COLS] of rows first_row ...; zero from row `limit` and from column WIDTH on."""
    mask = (first_row + tl.arange(0, ROWS) < limit)[:, None]
    if WIDTH != COLS:
        mask = mask & (tl.arange(0, COLS) < WIDTH)[None, :]
    return tl.load(tile_pointers(ptr, first_row, stride, ROWS, COLS), mask=mask, other=0.0)


@triton.jit
def load_full_tile(ptr, first_row, stride, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr):
    """`load_tile` where every row exists."""
    pointers = tile_pointers(ptr, first_row, stride, ROWS, COLS)
    if WIDTH != COLS:
        return tl.load(pointers, mask=(tl.arange(0, COLS) < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_tile(ptr, first_row, stride, limit, tile, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr):
    """Inverse of `load_tile`, cast to the pointer's type."""
    mask = (first_row + tl.arange(0, ROWS) < limit)[:, None]
    if WIDTH != COLS:
        mask = mask & (tl.arange(0, COLS) < WIDTH)[None, :]
    pointers = tile_pointers(ptr, first_row, stride, ROWS, COLS)
    tl.store(pointers, tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_square(ptr, index, SIZE: tl.constexpr):
    """Matrix `index` of a stack [..., SIZE, SIZE]."""
    return tl.load(tile_pointers(ptr, index * SIZE, SIZE, SIZE, SIZE))


@triton.jit
def round_tf32(x):
    """fp32 to the nearest tf32: the tensor core would truncate, which biases every product down."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
