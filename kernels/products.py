"""Products of tiles in the precision that they need, and rows moved by a stored product."""

import triton
import triton.language as tl

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
    """Returns fp32 x as high, of a 16-bit type, and what is left, in fp32.

    Two values at a time: ptxas converts single ones, where high is used twice, at an eighth of the
    speed. Never by masking the bits of x: ptxas 12.8 takes `accumulator & mask` for zero where a
    loop of wgmma starts from zero, and all products with high are lost; shifts may go once no
    ptxas that Triton brings does so.
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
    """Returns fp32 x as high + low of a 16-bit type."""
    high, rest = peel(x, dtype)
    return high, rest.to(dtype)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """Returns a b in fp32, to 2^-16 or better.

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
def maybe_transposed(x, TRANSPOSE: tl.constexpr):
    """Returns x or x^T."""
    if TRANSPOSE:
        return tl.trans(x)
    else:
        return x


@triton.jit
def add_dot(
    acc, a, b, PRECISION: tl.constexpr, TRANS_A: tl.constexpr = False, TRANS_B: tl.constexpr = False
):
    """Returns acc + a b as in `dot`. Transposed after the split, an operand is split and staged
    once.
    """
    if PRECISION == "tf32x3":
        return tl.dot(
            maybe_transposed(a, TRANS_A),
            maybe_transposed(b, TRANS_B),
            acc,
            input_precision="tf32x3",
        )
    TILE: tl.constexpr = tl.float16 if PRECISION == "fp16x3" else tl.bfloat16
    a_high, a_low = split(a, TILE) if a.dtype == tl.float32 else (a.to(TILE), None)
    b_high, b_low = split(b, TILE) if b.dtype == tl.float32 else (b.to(TILE), None)
    if b.dtype == tl.float32:
        acc = tl.dot(maybe_transposed(a_high, TRANS_A), maybe_transposed(b_low, TRANS_B), acc)
    if a.dtype == tl.float32:
        acc = tl.dot(maybe_transposed(a_low, TRANS_A), maybe_transposed(b_high, TRANS_B), acc)
    return tl.dot(maybe_transposed(a_high, TRANS_A), maybe_transposed(b_high, TRANS_B), acc)


@triton.jit
def exact_dot(a, b, PRECISION: tl.constexpr):
    """Returns a b of fp32 tiles to fp32's precision. "bf16x6": three 16-bit terms of each, without
    Triton's own care for infinities.
    """
    if PRECISION != "bf16x6":
        return tl.dot(a, b, input_precision=PRECISION)
    a_high, a_rest = peel(a, tl.bfloat16)
    a_mid, a_low = split(a_rest, tl.bfloat16)
    b_high, b_rest = peel(b, tl.bfloat16)
    b_mid, b_low = split(b_rest, tl.bfloat16)
    acc = tl.dot(a_high, b_low, tl.dot(a_low, b_high, tl.dot(a_mid, b_mid)))
    return tl.dot(a_high, b_high, tl.dot(a_high, b_mid, tl.dot(a_mid, b_high, acc)))


@triton.jit
def as_product(x):
    """Returns fp32 x as the result of a product, to start a loop of products from. A loaded tile
    would be carried through the loop in every layout that it is used in, and from zeros ptxas makes
    products wait for each other.
    """
    left = tl.zeros([x.shape[0], 16], tl.float16)
    return tl.dot(left, tl.zeros([16, x.shape[1]], tl.float16), x)


@triton.jit
def unit_rows(t):
    """Returns rows of t in fp32 in units of their largest entry, and these [ROWS, 1]."""
    size = tl.maximum(tl.max(tl.abs(t), 1), 1e-30)[:, None]
    return t * (1.0 / size), size


@triton.jit
def move_in_units(t, product, PRECISION: tl.constexpr):
    """Returns rows in their units times a stored product: see `move`."""
    if product.dtype == tl.float32:
        return dot(t, product, PRECISION)
    else:
        return tl.dot(t.to(tl.float16), product)


@triton.jit
def move(t, product, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):
    """Returns rows t in fp32 moved by a stored D x D product: t P, or t P^T if TRANSPOSED.

    For 16-bit inputs P is stored in fp16: its entries are at most 1, and 11 bits cost 3e-4 in o
    after all levels. The rows get the same 11 bits relative to their largest entry, so that neither
    large queries nor tiny gradients leave fp16's range.
    """
    if product.dtype == tl.float32:
        return move_in_units(t, maybe_transposed(product, TRANSPOSED), PRECISION)
    else:
        t, size = unit_rows(t)
        return move_in_units(t, maybe_transposed(product, TRANSPOSED), PRECISION) * size
