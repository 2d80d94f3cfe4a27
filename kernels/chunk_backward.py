"""Gradients of one chunk's inputs, from those of everything its factors enter.

With the names of chunk.py, A = low X^T, E = up X, and dL the gradient of the intra-chunk
logits:

    dA = -dq_start W^T - dL up         dlow = lower(dA X)
    dE = -dk_end W^T                   dup  = strict upper(dE X^T - dL^T A)
    dQ = dq_start + dL K + dlow W
    dK = dk_end + dL^T Q + dup W
    dX = dA^T low + up^T dE - U W^T
    dW = dlow^T Q + dup^T K - A^T dq_start - E^T dk_end - X V - X^T U + (dS + dS^T) W

    Y = M^-T dX        dM = -Y X^T     dS = strict upper(B dM)     dbeta = diag(Y) + rowsum(dM S)

P = I - W^T X W moved the sibling's tile and entered the product of two chunks. From its dP come
U = W dP and V = W dP^T and what they add to dX and dW: upsweep_backward.py.

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
from .products import add_dot
from .tiles import kernel, load_head_tile, load_matrix, store_head_tile, store_matrix


@triton.jit
def contract(
    a_tiles, c_tiles, w_tiles, b, a_head, w_head, first, T, HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr, SLAB: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns a W^T and c W^T [C, C] of the chunk at `first`."""
    a_acc = tl.zeros([CHUNK, CHUNK], tl.float32)
    c_acc = a_acc
    for column in tl.range(0, HEAD_DIM, SLAB, num_stages=STAGES):
        w = load_head_tile(w_tiles, b, w_head, first, T, CHUNK, SLAB, column)
        a = load_head_tile(a_tiles, b, a_head, first, T, CHUNK, SLAB, column)
        c = load_head_tile(c_tiles, b, a_head, first, T, CHUNK, SLAB, column)
        a_acc = add_dot(a_acc, a, w, PRECISION, TRANS_B=True)
        c_acc = add_dot(c_acc, c, w, PRECISION, TRANS_B=True)
    return a_acc, c_acc


@triton.jit
def overlaps(
    w_tiles, b, h, first, T, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr, SLAB: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns W W^T of the chunk at `first`."""
    acc = tl.zeros([CHUNK, CHUNK], tl.float32)
    for column in tl.range(0, HEAD_DIM, SLAB, num_stages=STAGES):
        w = load_head_tile(w_tiles, b, h, first, T, CHUNK, SLAB, column)
        acc = add_dot(acc, w, w, PRECISION, TRANS_B=True)
    return acc


@kernel
def chunk_backward_kernel(
    q_tiles, k_tiles, w_tiles, dq_tiles, dk_tiles, q_ptrs, k_ptrs, w_ptrs, dq_ptrs, dk_ptrs,
    dw_ptrs, beta_ptr, inverse_ptr, d_intra_ptr, dx_ptr, d_low_ptr, neg_a_ptr, d_beta_ptr,
    stride_bb, stride_bt, stride_bh, stride_dbb, stride_dbt, stride_dbh, T, H, num_chunks,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr, HAS_PRODUCT: tl.constexpr,
    SLAB: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes dq, dk, dw, dbeta of one chunk. dq and dk hold those of q_start and k_end before, dw
    the part that comes through P. d_low and neg_a: matrices of every query head of a group, or
    unused.

    C x C products load slabs of `_tiles`. What is expanded to the gradients comes by `_ptrs` to
    registers: it is added there, and descriptors would be waited for one after another.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    b, h = (head // H).to(tl.int64), head % H
    head = head.to(tl.int64)
    COLS: tl.constexpr = 64  # the least width of heads with reflections
    TILE: tl.constexpr = w_ptrs[0].dtype.element_ty
    first = chunk * CHUNK
    index = head * num_chunks + chunk
    q_index = head * GROUP * num_chunks + chunk
    beta_ptr += b * stride_bb + h * stride_bh
    offs = tl.arange(0, CHUNK)
    upper = offs[:, None] < offs[None, :]
    zero = tl.zeros([CHUNK, CHUNK], tl.float32)

    beta = load_beta(beta_ptr, first, stride_bt, T, CHUNK)
    x = load_matrix(inverse_ptr, index, CHUNK) * beta[None, :]
    up, neg_de = contract(
        k_tiles, dk_tiles, w_tiles, b, h, h, first, T, HEAD_DIM, CHUNK, SLAB, STAGES, PRECISION
    )
    up = tl.where(upper, up, 0.0)
    neg_e = (-add_dot(zero, up, x, PRECISION)).to(TILE)
    neg_dup = add_dot(zero, neg_de, x, PRECISION, TRANS_B=True)
    neg_dx = zero
    if HAS_PRODUCT:
        neg_dx = load_matrix(dx_ptr, index, CHUNK)
    neg_dx = add_dot(neg_dx, up, neg_de, PRECISION, TRANS_A=True)

    neg_a = zero.to(TILE)
    d_intra = neg_a
    d_low = zero
    for g in tl.range(GROUP, num_stages=1):
        low, neg_da = contract(
            q_tiles, dq_tiles, w_tiles, b, h * GROUP + g, h, first, T, HEAD_DIM, CHUNK, SLAB,
            STAGES, PRECISION,
        )  # fmt: skip
        low = tl.where(upper, 0.0, low)
        a = add_dot(zero, low, x, PRECISION, TRANS_B=True)
        neg_a = (-a).to(TILE)
        d_intra = load_matrix(d_intra_ptr, q_index + g * num_chunks, CHUNK).to(TILE)
        neg_dup = add_dot(neg_dup, d_intra, a, PRECISION, TRANS_A=True)
        neg_da = add_dot(neg_da, d_intra, up, PRECISION)
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
    s = overlaps(w_tiles, b, h, first, T, HEAD_DIM, CHUNK, SLAB, STAGES, PRECISION)
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
    for column in tl.range(0, HEAD_DIM, COLS, num_stages=1):
        w = load_head_tile(w_ptrs, b, h, first, T, CHUNK, COLS, column)
        k = load_head_tile(k_ptrs, b, h, first, T, CHUNK, COLS, column)
        dw = tl.zeros([COLS, CHUNK], tl.float32)
        dk = dw
        for g in tl.range(GROUP, num_stages=1):
            q_head = h * GROUP + g
            q = load_head_tile(q_ptrs, b, q_head, first, T, CHUNK, COLS, column)
            dq_start = load_head_tile(dq_ptrs, b, q_head, first, T, CHUNK, COLS, column)
            if GROUP > 1:
                neg_a = load_matrix(neg_a_ptr, q_index + g * num_chunks, CHUNK).to(TILE)
                d_low = load_matrix(d_low_ptr, q_index + g * num_chunks, CHUNK)
                d_intra = load_matrix(d_intra_ptr, q_index + g * num_chunks, CHUNK).to(TILE)
            dq = add_dot(
                tl.zeros([COLS, CHUNK], tl.float32), w, d_low, PRECISION, TRANS_A=True, TRANS_B=True
            )
            dq = add_dot(dq, k, d_intra, PRECISION, TRANS_A=True, TRANS_B=True)
            dq = tl.trans(dq) + dq_start.to(tl.float32)
            store_head_tile(dq_ptrs, b, q_head, first, T, dq, CHUNK, COLS, column)
            dk = add_dot(dk, q, d_intra, PRECISION, TRANS_A=True)
            dw = add_dot(dw, q, d_low, PRECISION, TRANS_A=True)
            dw = add_dot(dw, dq_start, neg_a, PRECISION, TRANS_A=True)
        dk_end = load_head_tile(dk_ptrs, b, h, first, T, CHUNK, COLS, column)
        dk = add_dot(dk, w, d_up, PRECISION, TRANS_A=True, TRANS_B=True)
        dk = tl.trans(dk) + dk_end.to(tl.float32)
        store_head_tile(dk_ptrs, b, h, first, T, dk, CHUNK, COLS, column)
        dw = add_dot(dw, dk_end, neg_e, PRECISION, TRANS_A=True)
        dw = add_dot(dw, k, d_up, PRECISION, TRANS_A=True)
        dw = tl.trans(add_dot(dw, w, ds, PRECISION, TRANS_A=True))
        if HAS_PRODUCT:
            dw += load_head_tile(dw_ptrs, b, h, first, T, CHUNK, COLS, column).to(tl.float32)
        store_head_tile(dw_ptrs, b, h, first, T, dw, CHUNK, COLS, column)
