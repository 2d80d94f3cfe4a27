"""Helpers shared by the kernels: loads, stores, products, and the rows of the dyadic levels.

A *level* l pairs neighbouring blocks of `half = CHUNK << l` tokens. Only right blocks have moved
queries and only left blocks have moved keys, so level l stores half of the tokens: the token at
position t lies in row `(t // (2 half)) * half + t % half` of its level, and the levels lie one
after another.
"""

from functools import cache
from typing import TypeAlias

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import config

CHUNK = 64
"""Tokens per UT transform."""


GATE_SPAN = tl.constexpr(128)
"""Tokens per fp64 offset of the gate's running sum; a multiple of every attention tile."""


@triton.jit
def gate_rows(T):
    """Running sums of a head: those of whole spans."""
    return tl.cdiv(T, GATE_SPAN) * GATE_SPAN


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
"""Of a kernel that is launched: one version for all lengths and groups of heads."""


def cdiv(count: int, size: int) -> int:
    """How many of `size` hold `count`. Triton's own takes a tenth of a launch on the host."""
    return -(-count // size)


def padded(width: int, least: int = 16) -> int:
    """The power of two that holds `width`, but not less than `least`."""
    return max(least, 1 << (width - 1).bit_length())


@cache
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


@cache
def total_rows(seq_len: int) -> int:
    """Rows of all levels of one head; without levels one, since descriptors are never empty."""
    return max(1, sum(level_rows(seq_len, level) for level in range(num_levels(seq_len))))


def moving_levels(seq_len: int, piece: bool) -> range:
    """Levels whose tiles move on: all but the top, which moves those of a piece to its ends."""
    return range(num_levels(seq_len) - (not piece))


@cache
def moved_rows(seq_len: int, piece: bool) -> int:
    """Rows of these levels."""
    return sum(level_rows(seq_len, level) for level in moving_levels(seq_len, piece))


def product_levels(seq_len: int, piece: bool) -> range:
    """Levels whose products are made: those that move tiles; of a piece, up to the product of all.

    A piece of one chunk has a level too, in which a sibling is missing.
    """
    return range(max(num_levels(seq_len), 1) + 1) if piece else moving_levels(seq_len, piece)


def level_blocks(seq_len: int, level: int, piece: bool) -> int:
    """Blocks of a level whose product P is read: the complete ones, all of a piece."""
    size = CHUNK << level
    return cdiv(seq_len, size) if piece else seq_len // size


def stored_blocks(seq_len: int, level: int) -> int:
    """Products of a level lie in pairs of siblings, those of all levels one after another."""
    return 2 * cdiv(seq_len, 2 * CHUNK << level)


@cache
def total_blocks(seq_len: int) -> int:
    """Stored products of one head; the last pair holds that of the whole piece."""
    return sum(stored_blocks(seq_len, level) for level in product_levels(seq_len, True))


@triton.jit
def rows_of_level(seq_len, level, CHUNK: tl.constexpr):
    """`level_rows` on the device. Shifts: a division by what only turns out to be a power of two
    takes as long as several loads of a cache.
    """
    last = tl.cdiv(seq_len, CHUNK) - 1
    return ((last + (1 << level)) >> (level + 1) << level) * CHUNK


@triton.jit
def blocks_of_level(seq_len, level, CHUNK: tl.constexpr):
    """`stored_blocks` on the device."""
    last = tl.cdiv(seq_len, CHUNK) - 1
    return ((last >> (level + 1)) + 1) * 2


@triton.jit
def tile_pointers(ptr, first_row, stride, ROWS: tl.constexpr, COLS: tl.constexpr, column=0):
    """Pointers [ROWS, COLS] to consecutive rows; 64-bit only in the scalar part."""
    base = ptr + tl.cast(first_row, tl.int64) * stride + column
    return base + (
        tl.arange(0, ROWS).to(tl.int64)[:, None] * stride + tl.arange(0, COLS).to(tl.int64)[None, :]
    )


@triton.jit
def tile_mask(
    first_row, limit, column, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr
):
    """What exists of a tile: rows before `limit`, columns before WIDTH. `column`, the first one, is
    a multiple of COLS less than WIDTH.
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
    """Tile [ROWS, COLS] of rows first_row ... and columns `column` ...; zero from row `limit` and
    from column WIDTH on.
    """
    mask = tile_mask(first_row, limit, column, ROWS, COLS, WIDTH)
    pointers = tile_pointers(ptr, first_row, stride, ROWS, COLS, column)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_full_tile(
    ptr, first_row, stride, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr
):
    """`load_tile` of whole rows that all exist."""
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
    """Inverse of `load_tile`, cast to the pointer's type."""
    mask = tile_mask(first_row, limit, column, ROWS, COLS, WIDTH)
    pointers = tile_pointers(ptr, first_row, stride, ROWS, COLS, column)
    tl.store(pointers, tile.to(ptr.dtype.element_ty), mask=mask)


Source: TypeAlias = TensorDescriptor | tuple
"""Where a kernel fetches tiles from."""


def pointer_source(x: Tensor) -> tuple:
    """Where `fetch` reads and `put` writes tiles of x [B, heads, T, width]: the pointer and
    strides. That between rows is compiled in: a constant of a model, and of the batch size where
    that is a dimension between tokens and heads.
    """
    return x, *x.stride()[:2], tl.constexpr(x.stride(2)), tl.constexpr(x.shape[3])


def source(x: Tensor, rows: int, columns: int | None = None, *, descriptors: bool = True) -> Source:
    """Of x [B, heads, T, width], what `fetch` reads tiles [rows, columns] of, whole rows by
    default.

    From Hopper on a descriptor: a tile goes from memory to where tensor cores read it, past the
    registers (TMA), and loops over tiles take up to a third less of them. Before, a
    `pointer_source`: the compiler would emulate a descriptor, but not load ahead by it.
    """
    if descriptors and config.has_tma():
        tile = [1, 1, rows, columns or padded(x.shape[3])]
        return TensorDescriptor(x, list(x.shape), list(x.stride()), tile)
    return pointer_source(x)


@triton.jit
def head_pointer(pointers, b, head):
    return pointers[0] + tl.cast(b, tl.int64) * pointers[1] + tl.cast(head, tl.int64) * pointers[2]


@triton.jit
def fetch(source, b, head, row, limit, ROWS: tl.constexpr, COLS: tl.constexpr, column=0):
    """Tile [ROWS, COLS] of the rows row ... of a head and its columns from `column` on, a multiple
    of COLS; zero past the last column and from row `limit` on, where the head ends. None: whole
    rows that all exist.
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
def put(pointers, b, head, row, limit, tile, ROWS: tl.constexpr, COLS: tl.constexpr, column=0):
    """Inverse of `fetch`, cast to the pointer's type."""
    ptr = head_pointer(pointers, b, head)
    store_tile(ptr, row, pointers[3], limit, tile, ROWS, COLS, pointers[4], column)


@triton.jit
def fetch_square(source, b, head, index, SIZE: tl.constexpr):
    """Matrix `index` of a head's stack, whose rows lie one below the other."""
    return fetch(source, b, head, index * SIZE, None, SIZE, SIZE)


def row_source(x: Tensor, columns: int, *, descriptors: bool) -> Source:
    """`source` of x [B, heads, T] for `fetch_row`; T is a multiple of `columns`."""
    if descriptors and config.has_tma():
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, columns])
    return x, *x.stride()[:2]


@triton.jit
def fetch_row(source, b, head, first, COLS: tl.constexpr):
    """Values [1, COLS] of a head. By pointers they are fetched twice: that is elements enough for
    the compiler to copy each once; else every warp would fetch all of them.
    """
    if isinstance(source, tl.tensor_descriptor):
        at = [tl.cast(b, tl.int32), tl.cast(head, tl.int32), first]
        return tl.reshape(source.load(at), [1, COLS])
    else:
        ptr = head_pointer(source, b, head)
        both = ptr + (first + tl.arange(0, COLS))[:, None] + tl.zeros([1, 2], tl.int32)
        return tl.split(tl.load(both))[0][None, :]


@triton.jit
def square_pointers(ptr, index, SIZE: tl.constexpr):
    """Pointers to matrix `index` of a stack [..., SIZE, SIZE]."""
    offsets = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    return ptr + tl.cast(index, tl.int64) * (SIZE * SIZE) + offsets


@triton.jit
def load_square(ptr, index, SIZE: tl.constexpr, AGAIN: tl.constexpr = False):
    """Matrix `index`. AGAIN: not merged with a load whose tile would then stay live."""
    return tl.load(square_pointers(ptr, index, SIZE), cache_modifier=".cg" if AGAIN else "")


@triton.jit
def store_square(ptr, index, tile, SIZE: tl.constexpr):
    """Inverse of `load_square`, cast to the pointer's type."""
    tl.store(square_pointers(ptr, index, SIZE), tile.to(ptr.dtype.element_ty))


INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)

PEEL_BFLOAT16 = tl.constexpr(
    """
    cvt.rn.bf16x2.f32 $0, $4, $3;
    shl.b32 $1, $0, 16;
    and.b32 $2, $0, 0xffff0000;
    sub.f32 $1, $3, $1;
    sub.f32 $2, $4, $2;
    """
)
PEEL_FLOAT16 = tl.constexpr(
    """{
    .reg .b16 c<2>;
    cvt.rn.f16x2.f32 $0, $4, $3;
    mov.b32 {c0, c1}, $0;
    cvt.f32.f16 $1, c0;
    cvt.f32.f16 $2, c1;
    sub.f32 $1, $3, $1;
    sub.f32 $2, $4, $2;
    }"""
)
OPERANDS = tl.constexpr("=&r,=&r,=&r,r,r")


@triton.jit
def peel(x, dtype: tl.constexpr):
    """fp32 x as high, of a 16-bit type, and what is left, in fp32.

    Two values at a time: ptxas converts single ones, where high is used twice, at an eighth of the
    speed. Never by masking the bits of x: ptxas 12.8 takes `accumulator & mask` for zero where a
    loop of wgmma starts from zero, and all products with high are lost.
    """
    if INTERPRET:
        high = x.to(dtype)
        return high, x - high.to(tl.float32)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            PEEL_BFLOAT16, OPERANDS, [x], (tl.bfloat16, tl.float32), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            PEEL_FLOAT16, OPERANDS, [x], (tl.float16, tl.float32), is_pure=True, pack=2
        )


@triton.jit
def split(x, dtype: tl.constexpr):
    """fp32 x as high + low of a 16-bit type."""
    high, rest = peel(x, dtype)
    return high, rest.to(dtype)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a b in fp32, to 2^-16 or better.

    PRECISION is "bf16x3" or "fp16x3" for 16-bit tiles: between two of them this is one exact
    product, an fp32 operand is split into two 16-bit terms. "fp32" splits fp32 tiles too; "tf32x3"
    is Triton's. The C x C products of the transform enter every level: in tf32 they alone cost
    nearly parallel w an error of 1e-2 in dw and dbeta (T = 2048, fp64 otherwise).
    """
    if PRECISION == "tf32x3":
        return tl.dot(a, b, input_precision="tf32x3")
    TILE: tl.constexpr = tl.float16 if PRECISION == "fp16x3" else tl.bfloat16
    if a.dtype == tl.float32:
        a_high, a_low = split(a, TILE)
        if b.dtype == tl.float32:
            b_high, b_low = split(b, TILE)
            return tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))
        else:
            return tl.dot(a_high, b, tl.dot(a_low, b))
    elif b.dtype == tl.float32:
        b_high, b_low = split(b, TILE)
        return tl.dot(a, b_high, tl.dot(a, b_low))
    else:
        return tl.dot(a, b)


@triton.jit
def as_product(x):
    """fp32 x as the result of a product, to start a loop of products from. A loaded tile would be
    carried through the loop in every layout that it is used in, and from zeros ptxas makes products
    wait for each other.
    """
    left = tl.zeros([x.shape[0], 16], tl.float16)
    return tl.dot(left, tl.zeros([16, x.shape[1]], tl.float16), x)


@triton.jit
def turned(x, TRANSPOSE: tl.constexpr):
    """x or x^T."""
    if TRANSPOSE:
        return tl.trans(x)
    else:
        return x


@triton.jit
def unit_rows(t):
    """Rows of t in fp32 in units of their largest entry, and these [ROWS, 1]."""
    size = tl.maximum(tl.max(tl.abs(t), 1), 1e-30)[:, None]
    return t * (1.0 / size), size


@triton.jit
def carry(t, product, PRECISION: tl.constexpr):
    """Rows in their units times a stored product: see `move`."""
    if product.dtype == tl.float32:
        return dot(t, product, PRECISION)
    else:
        return tl.dot(t.to(tl.float16), product)


@triton.jit
def move(t, product, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):
    """Rows t in fp32 moved by a stored D x D product: t P, or t P^T if TRANSPOSED.

    For 16-bit inputs P is stored in fp16: its entries are at most 1, and 11 bits cost 3e-4 in o
    after all levels. The rows get the same 11 bits relative to their largest entry, so that neither
    large queries nor tiny gradients leave fp16's range.
    """
    if product.dtype == tl.float32:
        return carry(t, turned(product, TRANSPOSED), PRECISION)
    else:
        t, size = unit_rows(t)
        return carry(t, turned(product, TRANSPOSED), PRECISION) * size
