"""One chunk: the UT transform's triangular inverse and product. Gradients: chunk_backward.py.

With W [C, D] the chunk's unit vectors, B = diag(beta), S = strict upper triangle of W W^T:

    M = I + B S        X = M^-1 B        H_1 ... H_C = P = I - W^T X W

    low = lower triangle of Q W^T        q_start = Q - (low X^T) W
    up  = strict upper part of K W^T     k_end   = K - (up X) W
    intra-chunk logits = Q K^T - low X^T up^T
"""

import triton
import triton.language as tl

from .products import dot, exact_dot
from .tiles import kernel, load_head_tile, load_matrix, load_tile, store_matrix


@triton.jit
def merge_blocks(n_ptr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """Computes (I + n)^-1 on diagonal blocks of 2 BLOCK from that of BLOCK, in place.

    The corner of the inverse of [[a, e], [0, d]] is -a^-1 e d^-1: substitution with blocks.
    """
    PAIRS: tl.constexpr = CHUNK // (2 * BLOCK)
    offs = tl.arange(0, BLOCK)
    a_ptr = n_ptr + offs[:, None] * CHUNK + offs[None, :]
    if PAIRS > 1:
        a_ptr = a_ptr[None, :, :] + tl.arange(0, PAIRS)[:, None, None] * (2 * BLOCK * (CHUNK + 1))
    e_ptr = a_ptr + BLOCK
    edge = exact_dot(tl.load(e_ptr), tl.load(e_ptr + BLOCK * CHUNK), PRECISION)
    corner = exact_dot(tl.load(a_ptr), edge, PRECISION)
    tl.debug_barrier()
    tl.store(e_ptr, -corner)
    tl.debug_barrier()


@triton.jit
def load_four(ptr):
    """Loads the values at ptr [N] and at the three addresses after it."""
    four = tl.load(ptr[:, None] + tl.arange(0, 4)[None, :])
    even, odd = tl.split(tl.reshape(four, [ptr.shape[0], 2, 2]))
    return tl.split(even) + tl.split(odd)


@triton.jit
def invert_diagonal(n_ptr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Computes (I + n)^-1 of the diagonal blocks of n [C, C], fp32, in place: a thread substitutes
    back in one column x of the inverse, x_i = [i is the column's row] - sum of n_ij x_j over j > i.
    """
    column = tl.arange(0, 2 * CHUNK) % CHUNK
    block_ptr = n_ptr + column // BLOCK * (BLOCK * (CHUNK + 1))
    x = ()  # the last row first
    for i in tl.static_range(BLOCK - 1, -1, -1):
        x_i = tl.where(column % BLOCK == i, 1.0, 0.0)
        for four in tl.static_range(BLOCK // 4 - 1, i // 4 - 1, -1):
            n = load_four(block_ptr + (i * CHUNK + four * 4))
            for j in tl.static_range(3, -1, -1):
                if four * 4 + j > i:
                    x_i -= n[j // 2 + j % 2 * 2] * x[BLOCK - 1 - four * 4 - j]
        x = x + (x_i,)  # type: ignore[assignment]
    tl.debug_barrier()
    for i in tl.static_range(BLOCK):
        tl.store(block_ptr + i * CHUNK + column % BLOCK, x[BLOCK - 1 - i])


@triton.jit
def load_beta(beta_ptr, first, stride, T, CHUNK: tl.constexpr):
    """Loads beta [C] of the chunk at `first`; missing tokens reflect nothing."""
    rows = first + tl.arange(0, CHUNK)
    return tl.load(beta_ptr + rows * stride, mask=rows < T, other=0.0)


@kernel
def chunk_kernel(
    w_ptr, beta_ptr, inverse_ptr, product_ptr, stride_wb, stride_wt, stride_wh, stride_bb,
    stride_bt, stride_bh, T, H, num_chunks, num_blocks, total_blocks, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, SOLVE: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Computes M^-1 [C, C] of every chunk by blocked substitution, fp32, and P of the first
    num_blocks.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    b, h = (head // H).to(tl.int64), head % H
    w_ptr += b * stride_wb + h * stride_wh
    beta_ptr += b * stride_bb + h * stride_bh
    head = head.to(tl.int64)
    inverse_ptr += (head * num_chunks + chunk) * CHUNK * CHUNK
    product_ptr += (head * total_blocks + chunk) * BLOCK_D * BLOCK_D
    w = load_tile(w_ptr, chunk * CHUNK, stride_wt, T, CHUNK, BLOCK_D, HEAD_DIM)
    offs = tl.arange(0, CHUNK)
    beta = load_beta(beta_ptr, chunk * CHUNK, stride_bt, T, CHUNK)
    n = beta[:, None] * dot(w, tl.trans(w), PRECISION)
    n = tl.where(offs[:, None] < offs[None, :], n, 0.0)
    # through memory: cutting blocks out of a tile in registers costs 200 of them
    store_matrix(inverse_ptr, 0, n, CHUNK)
    tl.debug_barrier()
    invert_diagonal(inverse_ptr, CHUNK, 16)
    tl.debug_barrier()
    merge_blocks(inverse_ptr, CHUNK, 16, SOLVE)
    merge_blocks(inverse_ptr, CHUNK, 32, SOLVE)
    inverse = load_matrix(inverse_ptr, 0, CHUNK)
    if chunk < num_blocks:
        x = inverse * beta[None, :]
        offs_d = tl.arange(0, BLOCK_D)
        for c0 in tl.range(0, BLOCK_D, COLS, num_stages=1):
            cols = c0 + tl.arange(0, COLS)
            w_cols = load_tile(w_ptr, chunk * CHUNK, stride_wt, T, CHUNK, COLS, HEAD_DIM, c0)
            product = tl.where(offs_d[:, None] == cols[None, :], 1.0, 0.0)
            product -= dot(tl.trans(w), dot(x, w_cols, PRECISION), PRECISION)
            pointers = product_ptr + offs_d[:, None] * BLOCK_D + cols[None, :]
            tl.store(pointers, product.to(product_ptr.dtype.element_ty))


@triton.jit
def load_factors(
    w_tiles, beta_ptr, inverse_ptr, chunk, num_chunks, b, h, head, stride_bt, T,
    BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Loads W [C, D] and X [C, C] of one chunk; beta_ptr already points at the head."""
    beta = load_beta(beta_ptr, chunk * CHUNK, stride_bt, T, CHUNK)
    x = load_matrix(inverse_ptr, head.to(tl.int64) * num_chunks + chunk, CHUNK) * beta[None, :]
    return load_head_tile(w_tiles, b, h, chunk * CHUNK, T, CHUNK, BLOCK_D), x
