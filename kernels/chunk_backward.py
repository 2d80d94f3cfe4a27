"""Gradients of one chunk's inputs, from those of everything its factors enter.

With the names of chunk.py, A = low X^T, E = up X, and dL the gradient of the local logits:

    dA = -dq_start W^T - dL up         dlow = lower(dA X)
    dE = -dk_end W^T                   dup  = strict upper(dE X^T - dL^T A)
    dQ = dq_start + dL K + dlow W
    dK = dk_end + dL^T Q + dup W
    dX = dA^T low + up^T dE - U W^T
    dW = dlow^T Q + dup^T K - A^T dq_start - E^T dk_end - X V - X^T U + (dS + dS^T) W

    Y = M^-T dX        dM = -Y X^T     dS = strict upper(B dM)     dbeta = diag(Y) + rowsum(dM S)

P = I - W^T X W moved the sibling's tile and entered the product of two chunks. From its dP come
U = W dP and V = W dP^T and what they add to dX and dW: tree_backward.py.

No [C, D] tile is held in fp32: columns pass in slabs, first to contract to C x C matrices, then to
expand these to the gradients. C x C products are split, since X grows their errors: for nearly
constant w, one bf16 rounding of their operands, or of U and V, costs 2e-2 in dw; one of the factors
dlow, dup, dS of W costs 1e-2; one of dP at every level 7e-3 in dbeta. One of dL, A, E and of the
product's part of dW costs no more than that of the outputs.
Names with `neg_` hold the negative, so that products accumulate.
"""

import triton
import triton.language as tl

from .chunk import load_beta
from .tiles import kernel, split, turned


@triton.jit
def add_dot(
    acc, a, b, PRECISION: tl.constexpr, TRANS_A: tl.constexpr = False, TRANS_B: tl.constexpr = False
):
    """acc + a b as in `dot`. Transposed after the split, an operand is split and staged once."""
    if PRECISION == "tf32x3":
        return tl.dot(turned(a, TRANS_A), turned(b, TRANS_B), acc, input_precision="tf32x3")
    TILE: tl.constexpr = tl.float16 if PRECISION == "fp16x3" else tl.bfloat16
    a_high, a_low = split(a, TILE) if a.dtype == tl.float32 else (a.to(TILE), None)
    b_high, b_low = split(b, TILE) if b.dtype == tl.float32 else (b.to(TILE), None)
    if b.dtype == tl.float32:
        acc = tl.dot(turned(a_high, TRANS_A), turned(b_low, TRANS_B), acc)
    if a.dtype == tl.float32:
        acc = tl.dot(turned(a_low, TRANS_A), turned(b_high, TRANS_B), acc)
    return tl.dot(turned(a_high, TRANS_A), turned(b_high, TRANS_B), acc)


@triton.jit
def slab_mask(
    first_row, limit, column, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr
):
    mask = (tl.arange(0, ROWS) < limit - first_row)[:, None]
    if WIDTH % COLS != 0:
        mask = mask & (tl.arange(0, COLS) < WIDTH - column)[None, :]
    return mask


@triton.jit
def load_slab(
    ptr, first_row, stride, limit, column,
    ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """COLS columns of `load_tile` from `column` on. Scalar base: 32-bit offsets in registers."""
    mask = slab_mask(first_row, limit, column, ROWS, COLS, WIDTH)
    base = ptr + (tl.cast(first_row, tl.int64) * stride + column)
    return tl.load(
        base + (tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLS)[None, :]),
        mask=mask,
        other=0.0,
    )


@triton.jit
def store_slab(
    ptr, first_row, stride, limit, column, tile,
    ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Inverse of `load_slab`, cast to the pointer's type."""
    mask = slab_mask(first_row, limit, column, ROWS, COLS, WIDTH)
    base = ptr + (tl.cast(first_row, tl.int64) * stride + column)
    offsets = tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLS)[None, :]
    tl.store(base + offsets, tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_matrix(ptr, index, CHUNK: tl.constexpr, AGAIN: tl.constexpr = False):
    """Matrix `index` of a stack. AGAIN: not merged with a load whose tile would then stay live."""
    offsets = tl.arange(0, CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    base = ptr + tl.cast(index, tl.int64) * (CHUNK * CHUNK)
    if AGAIN:
        return tl.load(base + offsets, cache_modifier=".cg")
    else:
        return tl.load(base + offsets)


@triton.jit
def store_matrix(ptr, index, tile, CHUNK: tl.constexpr):
    offsets = tl.arange(0, CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    tl.store(
        ptr + tl.cast(index, tl.int64) * (CHUNK * CHUNK) + offsets, tile.to(ptr.dtype.element_ty)
    )


@triton.jit
def contract(
    a_ptr, stride_a, c_ptr, stride_c, w_ptr, stride_w, first, T,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, SLAB: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """a W^T and c W^T [C, C] of the chunk at `first`."""
    a_acc = tl.zeros([CHUNK, CHUNK], tl.float32)
    c_acc = a_acc
    for column in tl.range(0, BLOCK_D, SLAB, num_stages=1):
        w = load_slab(w_ptr, first, stride_w, T, column, CHUNK, SLAB, HEAD_DIM)
        a = load_slab(a_ptr, first, stride_a, T, column, CHUNK, SLAB, HEAD_DIM)
        c = load_slab(c_ptr, first, stride_c, T, column, CHUNK, SLAB, HEAD_DIM)
        a_acc = add_dot(a_acc, a, w, PRECISION, TRANS_B=True)
        c_acc = add_dot(c_acc, c, w, PRECISION, TRANS_B=True)
    return a_acc, c_acc


@triton.jit
def overlaps(
    w_ptr, stride_w, first, T, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    SLAB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """W W^T of the chunk at `first`."""
    acc = tl.zeros([CHUNK, CHUNK], tl.float32)
    for column in tl.range(0, BLOCK_D, SLAB, num_stages=1):
        w = load_slab(w_ptr, first, stride_w, T, column, CHUNK, SLAB, HEAD_DIM)
        acc = add_dot(acc, w, w, PRECISION, TRANS_B=True)
    return acc


@kernel
def chunk_backward_kernel(
    q_ptr, k_ptr, w_ptr, beta_ptr, inverse_ptr, d_local_ptr, dx_ptr, d_low_ptr, neg_a_ptr,
    dq_ptr, dk_ptr, dw_ptr, d_beta_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    stride_wb, stride_wt, stride_wh, stride_bb, stride_bt, stride_bh,
    stride_dqb, stride_dqt, stride_dqh, stride_dkb, stride_dkt, stride_dkh,
    stride_dwb, stride_dwt, stride_dwh, stride_dbb, stride_dbt, stride_dbh,
    T, H, num_chunks,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    HAS_PRODUCT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk, dw, dbeta of one chunk. dq and dk hold those of q_start and k_end before, dw the part
    that comes through P. d_low and neg_a: matrices of every query head of a group, or unused.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    b, h = (head // H).to(tl.int64), head % H
    head = head.to(tl.int64)
    SLAB: tl.constexpr = min(64, BLOCK_D)
    TILE: tl.constexpr = w_ptr.dtype.element_ty
    first = chunk * CHUNK
    index = head * num_chunks + chunk
    q_index = head * GROUP * num_chunks + chunk
    q_ptr += b * stride_qb + h * GROUP * stride_qh
    dq_ptr += b * stride_dqb + h * GROUP * stride_dqh
    k_ptr += b * stride_kb + h * stride_kh
    dk_ptr += b * stride_dkb + h * stride_dkh
    w_ptr += b * stride_wb + h * stride_wh
    dw_ptr += b * stride_dwb + h * stride_dwh
    beta_ptr += b * stride_bb + h * stride_bh
    offs = tl.arange(0, CHUNK)
    upper = offs[:, None] < offs[None, :]
    zero = tl.zeros([CHUNK, CHUNK], tl.float32)

    beta = load_beta(beta_ptr, first, stride_bt, T, CHUNK)
    x = load_matrix(inverse_ptr, index, CHUNK) * beta[None, :]
    up, neg_de = contract(
        k_ptr, stride_kt, dk_ptr, stride_dkt, w_ptr, stride_wt, first, T, HEAD_DIM, BLOCK_D, CHUNK,
        WIDE, PRECISION,
    )  # fmt: skip
    up = tl.where(upper, up, 0.0)
    neg_e = (-add_dot(zero, up, x, PRECISION)).to(TILE)
    neg_dup = add_dot(zero, neg_de, x, PRECISION, TRANS_B=True)
    neg_dx = zero
    if HAS_PRODUCT:
        neg_dx = load_matrix(dx_ptr, index, CHUNK)
    neg_dx = add_dot(neg_dx, up, neg_de, PRECISION, TRANS_A=True)

    neg_a = zero.to(TILE)
    d_local = neg_a
    d_low = zero
    for g in tl.range(GROUP, num_stages=1):
        low, neg_da = contract(
            q_ptr + g * stride_qh, stride_qt, dq_ptr + g * stride_dqh, stride_dqt, w_ptr, stride_wt,
            first, T, HEAD_DIM, BLOCK_D, CHUNK, WIDE, PRECISION,
        )  # fmt: skip
        low = tl.where(upper, 0.0, low)
        a = add_dot(zero, low, x, PRECISION, TRANS_B=True)
        neg_a = (-a).to(TILE)
        d_local = load_matrix(d_local_ptr, q_index + g * num_chunks, CHUNK).to(TILE)
        neg_dup = add_dot(neg_dup, d_local, a, PRECISION, TRANS_A=True)
        neg_da = add_dot(neg_da, d_local, up, PRECISION)
        neg_dx = add_dot(neg_dx, neg_da, low, PRECISION, TRANS_A=True)
        d_low = tl.where(upper, 0.0, -add_dot(zero, neg_da, x, PRECISION))
        if GROUP > 1:
            store_matrix(neg_a_ptr, q_index + g * num_chunks, neg_a, CHUNK)
            store_matrix(d_low_ptr, q_index + g * num_chunks, d_low, CHUNK)
    d_up = tl.where(upper, -neg_dup, 0.0)

    neg_y = add_dot(
        zero, load_matrix(inverse_ptr, index, CHUNK, AGAIN=True), neg_dx, PRECISION, TRANS_A=True
    )
    dm = add_dot(zero, neg_y, x, PRECISION, TRANS_B=True)
    s = overlaps(w_ptr, stride_wt, first, T, HEAD_DIM, BLOCK_D, CHUNK, WIDE, PRECISION)
    dm = tl.where(upper, dm, 0.0)
    d_beta = tl.sum(dm * s - tl.where(offs[:, None] == offs[None, :], neg_y, 0.0), 1)
    rows = first + offs
    tl.store(
        d_beta_ptr + b * stride_dbb + h * stride_dbh + rows * stride_dbt, d_beta, mask=rows < T
    )
    ds = dm * beta[:, None]
    ds += tl.trans(ds)

    if GROUP > 1:
        tl.debug_barrier()
    for column in tl.range(0, BLOCK_D, SLAB, num_stages=1):
        w = load_slab(w_ptr, first, stride_wt, T, column, CHUNK, SLAB, HEAD_DIM)
        k = load_slab(k_ptr, first, stride_kt, T, column, CHUNK, SLAB, HEAD_DIM)
        dw = tl.zeros([SLAB, CHUNK], tl.float32)
        dk = dw
        for g in tl.range(GROUP, num_stages=1):
            q = load_slab(q_ptr + g * stride_qh, first, stride_qt, T, column, CHUNK, SLAB, HEAD_DIM)
            dq_start = load_slab(
                dq_ptr + g * stride_dqh, first, stride_dqt, T, column, CHUNK, SLAB, HEAD_DIM
            )
            if GROUP > 1:
                neg_a = load_matrix(neg_a_ptr, q_index + g * num_chunks, CHUNK).to(TILE)
                d_low = load_matrix(d_low_ptr, q_index + g * num_chunks, CHUNK)
                d_local = load_matrix(d_local_ptr, q_index + g * num_chunks, CHUNK).to(TILE)
            dq = add_dot(
                tl.zeros([SLAB, CHUNK], tl.float32), w, d_low, PRECISION, TRANS_A=True, TRANS_B=True
            )
            dq = add_dot(dq, k, d_local, PRECISION, TRANS_A=True, TRANS_B=True)
            dq = tl.trans(dq) + dq_start.to(tl.float32)
            store_slab(
                dq_ptr + g * stride_dqh, first, stride_dqt, T, column, dq, CHUNK, SLAB, HEAD_DIM
            )
            dk = add_dot(dk, q, d_local, PRECISION, TRANS_A=True)
            dw = add_dot(dw, q, d_low, PRECISION, TRANS_A=True)
            dw = add_dot(dw, dq_start, neg_a, PRECISION, TRANS_A=True)
        dk_end = load_slab(dk_ptr, first, stride_dkt, T, column, CHUNK, SLAB, HEAD_DIM)
        dk = add_dot(dk, w, d_up, PRECISION, TRANS_A=True, TRANS_B=True)
        dk = tl.trans(dk) + dk_end.to(tl.float32)
        store_slab(dk_ptr, first, stride_dkt, T, column, dk, CHUNK, SLAB, HEAD_DIM)
        dw = add_dot(dw, dk_end, neg_e, PRECISION, TRANS_A=True)
        dw = add_dot(dw, k, d_up, PRECISION, TRANS_A=True)
        dw = tl.trans(add_dot(dw, w, ds, PRECISION, TRANS_A=True))
        if HAS_PRODUCT:
            dw += load_slab(dw_ptr, first, stride_dwt, T, column, CHUNK, SLAB, HEAD_DIM).to(
                tl.float32
            )
        store_slab(dw_ptr, first, stride_dwt, T, column, dw, CHUNK, SLAB, HEAD_DIM)
