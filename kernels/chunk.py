"""One chunk: the UT transform's triangular inverse. Gradients: chunk_backward.py.

With W [C, D] the chunk's unit vectors, B = diag(beta), S = strict upper triangle of W W^T:

    M = I + B S        X = M^-1 B        H_1 ... H_C = P = I - W^T X W

    low = lower triangle of Q W^T        q_start = Q - (low X^T) W
    up  = strict upper part of K W^T     k_end   = K - (up X) W
    local logits = Q K^T - low X^T up^T
"""

import triton
import triton.language as tl

from .tiles import RUNTIME, dot, load_square, load_tile


@triton.jit
def merge_blocks(inverse, n, SIZE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """(I + n)^-1 on diagonal blocks of 2 BLOCK from that of BLOCK, for n strictly upper [..., SIZE,
    SIZE].

    The corner of the inverse of [[a, e], [0, d]] is -a^-1 e d^-1: substitution with blocks.
    """
    block = tl.arange(0, SIZE) // BLOCK
    corner = (block[:, None] + 1 == block[None, :]) & (block[:, None] % 2 == 0)
    if len(n.shape) == 3:
        corner = corner[None, :, :]
    edge = tl.dot(tl.where(corner, n, 0.0), inverse, input_precision=PRECISION)
    return inverse - tl.dot(inverse, edge, input_precision=PRECISION)


@triton.jit(do_not_specialize=RUNTIME)
def chunk_inverse_kernel(
    w_ptr, beta_ptr, inverse_ptr, stride_wb, stride_wt, stride_wh, stride_bb, stride_bt, stride_bh,
    T, H, num_chunks, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, SOLVE: tl.constexpr,
):  # fmt: skip
    """M^-1 [C, C] of every chunk by blocked substitution, fp32."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    b, h = (head // H).to(tl.int64), head % H
    w_ptr += b * stride_wb + h * stride_wh
    beta_ptr += b * stride_bb + h * stride_bh
    first = chunk * CHUNK
    inverse_ptr += (head.to(tl.int64) * num_chunks + chunk) * CHUNK * CHUNK

    # diagonal blocks, computed as a batch: cutting them out of the whole product costs 200
    # registers
    PARTS: tl.constexpr = CHUNK // 16
    rows = tl.arange(0, PARTS)[:, None] * 16 + tl.arange(0, 16)[None, :]
    offs_d = tl.arange(0, BLOCK_D)
    mask = (first + rows < T)[:, :, None] & (offs_d < HEAD_DIM)[None, None, :]
    base = w_ptr + first.to(tl.int64) * stride_wt
    w = tl.load(base + rows[:, :, None] * stride_wt + offs_d[None, None, :], mask=mask, other=0.0)
    beta = tl.load(beta_ptr + (first + rows) * stride_bt, mask=first + rows < T, other=0.0)
    offs = tl.arange(0, 16)
    upper = (offs[:, None] < offs[None, :])[None, :, :]
    n = tl.where(
        upper, beta[:, :, None] * tl.dot(w, tl.permute(w, (0, 2, 1)), input_precision="tf32x3"), 0.0
    )
    blocks = (
        inverse_ptr
        + rows[:, :, None] * CHUNK
        + (tl.arange(0, PARTS)[:, None] * 16 + offs[None, :])[:, None, :]
    )
    inverse = tl.where((offs[:, None] == offs[None, :])[None, :, :], 1.0, 0.0) + tl.zeros_like(n)
    inverse = merge_blocks(inverse, n, 16, 1, "ieee")
    inverse = merge_blocks(inverse, n, 16, 2, "ieee")
    inverse = merge_blocks(inverse, n, 16, 4, "ieee")
    inverse = merge_blocks(inverse, n, 16, 8, "ieee")
    tl.store(blocks, inverse)
    tl.debug_barrier()  # rows come back to other threads

    w = load_tile(w_ptr, first, stride_wt, T, CHUNK, BLOCK_D, HEAD_DIM)
    offs = tl.arange(0, CHUNK)
    beta = tl.load(beta_ptr + (first + offs) * stride_bt, mask=first + offs < T, other=0.0)
    n = beta[:, None] * dot(w, tl.trans(w), PRECISION)
    square = inverse_ptr + offs[:, None] * CHUNK + offs[None, :]
    inverse = tl.load(square, mask=offs[:, None] // 16 == offs[None, :] // 16, other=0.0)
    inverse = merge_blocks(inverse, n, CHUNK, 16, SOLVE)
    inverse = merge_blocks(inverse, n, CHUNK, 32, SOLVE)
    tl.store(square, inverse)


@triton.jit
def load_factors(
    w_ptr, beta_ptr, inverse_ptr, chunk, num_chunks, head, stride_wt, stride_bt, T,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    WHOLE: tl.constexpr = False,
):  # fmt: skip
    """W [C, D] and X [C, C] of one chunk; w_ptr and beta_ptr already point at the head.

    WHOLE: the chunk may lie behind the last, where W and X are zero.
    """
    w = load_tile(w_ptr, chunk * CHUNK, stride_wt, T, CHUNK, BLOCK_D, HEAD_DIM)
    rows = chunk * CHUNK + tl.arange(0, CHUNK)
    beta = tl.load(beta_ptr + rows * stride_bt, mask=rows < T, other=0.0)
    if WHOLE:
        chunk = tl.minimum(chunk, num_chunks - 1)
    inverse = load_square(inverse_ptr, head.to(tl.int64) * num_chunks + chunk, CHUNK)
    return w, inverse * beta[None, :]
