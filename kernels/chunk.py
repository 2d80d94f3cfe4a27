"""One chunk: the UT transform's triangular inverse, and the gradients of everything a chunk's factors enter.

With W [C, D] the chunk's unit vectors, B = diag(beta), S = strict upper triangle of W W^T:

    M = I + B S        X = M^-1 B        H_1 ... H_C = P = I - W^T X W

    low = lower triangle of Q W^T        q_start = Q - (low X^T) W
    up  = strict upper part of K W^T     k_end   = K - (up X) W
    local logits = Q K^T - low X^T up^T

Gradients, with A = low X^T, E = up X and dL those of the local logits:

    dA   = -dq_start W^T - dL up                 dE  = -dk_end W^T
    dlow = lower(dA X)                           dup = strict upper(dE X^T - dL^T A)
    dQ   = dq_start + dL K + dlow W              dK  = dk_end + dL^T Q + dup W
    dX   = dA^T low + up^T dE - W dP W^T
    dW   = dlow^T Q + dup^T K - A^T dq_start - E^T dk_end - X W dP^T - X^T W dP
    Y    = M^-T dX,  dM = -Y X^T,  dbeta = diag(Y) + rowsum(dM S),  dS = strict upper(B dM),  dW += (dS + dS^T) W
"""

import triton
import triton.language as tl

from .tiles import RUNTIME, dot, load_square, load_tile, store_tile


@triton.jit
def merge_blocks(inverse, n, SIZE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """(I + n)^-1 on diagonal blocks of 2 BLOCK from that of BLOCK, for n strictly upper [..., SIZE, SIZE].

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
    w_ptr, beta_ptr, inverse_ptr,
    stride_wb, stride_wt, stride_wh, stride_bb, stride_bt, stride_bh,
    T, H, num_chunks,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """M^-1 [C, C] of every chunk by blocked substitution, fp32."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    b, h = (head // H).to(tl.int64), head % H
    w_ptr += b * stride_wb + h * stride_wh
    beta_ptr += b * stride_bb + h * stride_bh
    first = chunk * CHUNK
    inverse_ptr += (head.to(tl.int64) * num_chunks + chunk) * CHUNK * CHUNK

    # diagonal blocks, computed as a batch: cutting them out of the whole product costs 200 registers
    PARTS: tl.constexpr = CHUNK // 16
    rows = tl.arange(0, PARTS)[:, None] * 16 + tl.arange(0, 16)[None, :]
    offs_d = tl.arange(0, BLOCK_D)
    mask = (first + rows < T)[:, :, None] & (offs_d < HEAD_DIM)[None, None, :]
    base = w_ptr + first.to(tl.int64) * stride_wt
    w = tl.load(base + rows[:, :, None] * stride_wt + offs_d[None, None, :], mask=mask, other=0.0)
    beta = tl.load(beta_ptr + (first + rows) * stride_bt, mask=first + rows < T, other=0.0)
    offs = tl.arange(0, 16)
    upper = (offs[:, None] < offs[None, :])[None, :, :]
    n = tl.where(upper, beta[:, :, None] * tl.dot(w, tl.permute(w, (0, 2, 1)), input_precision="tf32x3"), 0.0)
    blocks = inverse_ptr + rows[:, :, None] * CHUNK + (tl.arange(0, PARTS)[:, None] * 16 + offs[None, :])[:, None, :]
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
    inverse = merge_blocks(inverse, n, CHUNK, 16, "tf32x3")
    inverse = merge_blocks(inverse, n, CHUNK, 32, "tf32x3")
    tl.store(square, inverse)


@triton.jit
def load_factors(
    w_ptr, beta_ptr, inverse_ptr, chunk, num_chunks, head, stride_wt, stride_bt, T,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """W [C, D] and X [C, C] of one chunk; w_ptr and beta_ptr already point at the head."""
    w = load_tile(w_ptr, chunk * CHUNK, stride_wt, T, CHUNK, BLOCK_D, HEAD_DIM)
    rows = chunk * CHUNK + tl.arange(0, CHUNK)
    beta = tl.load(beta_ptr + rows * stride_bt, mask=rows < T, other=0.0)
    inverse = load_square(inverse_ptr, head.to(tl.int64) * num_chunks + chunk, CHUNK)
    return w, inverse * beta[None, :]


@triton.jit
def reflect(t, w, x, PRECISION: tl.constexpr):
    """Rows t (I - W^T X W): keys to the end of the chunk (W, X). With X^T: queries to its start."""
    tw = dot(t, tl.trans(w), PRECISION)
    return t - dot(dot(tw, x, PRECISION), w, PRECISION)


@triton.jit
def outer_gradient(dx, dw, a, c, w, x, PRECISION: tl.constexpr):
    """Adds the gradients of P = I - W^T X W for dP = a^T c, with a, c [C, D]."""
    aw = dot(a, tl.trans(w), PRECISION)
    cw = dot(c, tl.trans(w), PRECISION)
    dx -= dot(tl.trans(aw), cw, PRECISION)
    cx = dot(cw, tl.trans(x), PRECISION)
    dw -= dot(tl.trans(cx), a, PRECISION)
    ax = dot(aw, x, PRECISION)
    dw -= dot(tl.trans(ax), c, PRECISION)
    return dx, dw


@triton.jit(do_not_specialize=RUNTIME)
def chunk_product_backward_kernel(
    w_ptr, beta_ptr, inverse_ptr, q_levels_ptr, k_levels_ptr, dq_levels_ptr, dk_levels_ptr, d_product_ptr,
    dx_ptr, dw_ptr,
    stride_wb, stride_wt, stride_wh, stride_bb, stride_bt, stride_bh,
    T, H, num_chunks, total_rows, num_blocks,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The parts of dX [C, C] and dW [C, D] that come through the chunk's product P, fp32."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    b, h = (head // H).to(tl.int64), head % H
    head = head.to(tl.int64)
    first = chunk * CHUNK
    w_ptr += b * stride_wb + h * stride_wh
    beta_ptr += b * stride_bb + h * stride_bh
    w, x = load_factors(
        w_ptr, beta_ptr, inverse_ptr, chunk, num_chunks, head, stride_wt, stride_bt, T, HEAD_DIM, BLOCK_D, CHUNK
    )
    dx = tl.zeros([CHUNK, CHUNK], tl.float32)
    dw = tl.zeros([CHUNK, BLOCK_D], tl.float32)
    row = chunk // 2 * CHUNK
    if chunk % 2 == 0:
        limit = row + tl.minimum(T - first - CHUNK, CHUNK)  # queries of the right sibling
        for g in tl.range(GROUP, num_stages=1):
            base = (head * GROUP + g) * total_rows * BLOCK_D
            moved = load_tile(dq_levels_ptr + base, row, BLOCK_D, limit, CHUNK, BLOCK_D, BLOCK_D)
            here = load_tile(q_levels_ptr + base, row, BLOCK_D, limit, CHUNK, BLOCK_D, BLOCK_D)
            dx, dw = outer_gradient(dx, dw, moved, here.to(moved.dtype), w, x, PRECISION)
    else:
        base = head * total_rows * BLOCK_D
        moved = load_tile(dk_levels_ptr + base, row, BLOCK_D, row + CHUNK, CHUNK, BLOCK_D, BLOCK_D)
        here = load_tile(k_levels_ptr + base, row, BLOCK_D, row + CHUNK, CHUNK, BLOCK_D, BLOCK_D)
        dx, dw = outer_gradient(dx, dw, here.to(moved.dtype), moved, w, x, PRECISION)

    if chunk // 2 < num_blocks:
        # dP of the chunk is that of its block of two times the sibling's product; W dP and X W dP^T suffice
        ws, xs = load_factors(
            w_ptr, beta_ptr, inverse_ptr, chunk + 1 - 2 * (chunk % 2), num_chunks, head, stride_wt, stride_bt, T,
            HEAD_DIM, BLOCK_D, CHUNK,
        )  # fmt: skip
        d_product = load_square(d_product_ptr, head * num_blocks + chunk // 2, BLOCK_D)
        wd = w.to(tl.float32)
        xd = dot(x, w, PRECISION)
        if chunk % 2 == 0:
            xd = reflect(xd, ws, xs, PRECISION)
        else:
            wd = reflect(wd, ws, tl.trans(xs), PRECISION)
        wd = dot(wd, d_product, PRECISION)
        xd = dot(xd, tl.trans(d_product), PRECISION)
        if chunk % 2 == 0:
            wd = reflect(wd, ws, tl.trans(xs), PRECISION)
        else:
            xd = reflect(xd, ws, xs, PRECISION)
        dx -= dot(wd, tl.trans(w), PRECISION)
        dw -= xd + dot(tl.trans(x), wd, PRECISION)
    index = head * num_chunks + chunk
    store_tile(dx_ptr, index * CHUNK, CHUNK, (index + 1) * CHUNK, dx, CHUNK, CHUNK, CHUNK)
    store_tile(dw_ptr, index * CHUNK, BLOCK_D, (index + 1) * CHUNK, dw, CHUNK, BLOCK_D, BLOCK_D)


@triton.jit(do_not_specialize=RUNTIME)
def chunk_backward_kernel(
    q_ptr, k_ptr, w_ptr, beta_ptr, inverse_ptr, dq_start_ptr, dk_end_ptr, d_local_ptr, dx_ptr, dw_product_ptr,
    dq_ptr, dk_ptr, dw_ptr, d_beta_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    stride_wb, stride_wt, stride_wh, stride_bb, stride_bt, stride_bh,
    stride_dqb, stride_dqt, stride_dqh, stride_dkb, stride_dkt, stride_dkh,
    stride_dwb, stride_dwt, stride_dwh, stride_dbb, stride_dbt, stride_dbh,
    T, H, num_chunks,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    HAS_PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk, dw, dbeta of one chunk, from the gradients of q_start, k_end, the local logits and P."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    b, h = (head // H).to(tl.int64), head % H
    head = head.to(tl.int64)
    first = chunk * CHUNK
    index = head * num_chunks + chunk
    beta_ptr += b * stride_bb + h * stride_bh
    offs = tl.arange(0, CHUNK)
    rows = first + offs
    upper = offs[:, None] < offs[None, :]

    k = load_tile(k_ptr + b * stride_kb + h * stride_kh, first, stride_kt, T, CHUNK, BLOCK_D, HEAD_DIM)
    w = load_tile(w_ptr + b * stride_wb + h * stride_wh, first, stride_wt, T, CHUNK, BLOCK_D, HEAD_DIM)
    beta = tl.load(beta_ptr + rows * stride_bt, mask=rows < T, other=0.0)
    inverse = load_square(inverse_ptr, index, CHUNK)
    x = inverse * beta[None, :]
    up = tl.where(upper, dot(k, tl.trans(w), PRECISION), 0.0)

    dk_end = load_tile(dk_end_ptr, index * CHUNK, BLOCK_D, (index + 1) * CHUNK, CHUNK, BLOCK_D, BLOCK_D)
    de = -dot(dk_end, tl.trans(w), PRECISION)
    dup = dot(de, tl.trans(x), PRECISION)
    dx = dot(tl.trans(up), de, PRECISION)
    e = dot(up, x, PRECISION)
    dw = -dot(tl.trans(e), dk_end, PRECISION)
    dk = dk_end.to(tl.float32)
    if HAS_PRODUCT:
        dx += load_square(dx_ptr, index, CHUNK)
        dw += load_tile(dw_product_ptr, index * CHUNK, BLOCK_D, (index + 1) * CHUNK, CHUNK, BLOCK_D, BLOCK_D)

    for g in tl.range(GROUP, num_stages=1):
        q_head = head * GROUP + g
        q_index = q_head * num_chunks + chunk
        q = load_tile(q_ptr + b * stride_qb + (h * GROUP + g) * stride_qh, first, stride_qt, T, CHUNK, BLOCK_D, HEAD_DIM)
        dq_start = load_tile(dq_start_ptr, q_index * CHUNK, BLOCK_D, (q_index + 1) * CHUNK, CHUNK, BLOCK_D, BLOCK_D)
        d_local = load_square(d_local_ptr, q_index, CHUNK)
        low = tl.where(upper, 0.0, dot(q, tl.trans(w), PRECISION))
        a = dot(low, tl.trans(x), PRECISION)
        da = -dot(dq_start, tl.trans(w), PRECISION)
        da -= dot(d_local, up, PRECISION)
        dx += dot(tl.trans(da), low, PRECISION)
        dw -= dot(tl.trans(a), dq_start, PRECISION)
        dup -= dot(tl.trans(d_local), a, PRECISION)
        d_low = tl.where(upper, 0.0, dot(da, x, PRECISION))
        dw += dot(tl.trans(d_low), q, PRECISION)
        dk += dot(tl.trans(d_local), q, PRECISION)
        dq = dq_start.to(tl.float32) + dot(d_local, k, PRECISION) + dot(d_low, w, PRECISION)
        store_tile(
            dq_ptr + b * stride_dqb + (h * GROUP + g) * stride_dqh, first, stride_dqt, T, dq, CHUNK, BLOCK_D, HEAD_DIM
        )
    dup = tl.where(upper, dup, 0.0)
    dk += dot(dup, w, PRECISION)
    store_tile(dk_ptr + b * stride_dkb + h * stride_dkh, first, stride_dkt, T, dk, CHUNK, BLOCK_D, HEAD_DIM)
    dw += dot(tl.trans(dup), k, PRECISION)

    y = dot(tl.trans(inverse), dx, PRECISION)
    dm = -dot(y, tl.trans(x), PRECISION)
    s = tl.where(upper, dot(w, tl.trans(w), PRECISION), 0.0)
    d_beta = tl.sum(tl.where(offs[:, None] == offs[None, :], y, 0.0) + dm * s, 1)
    ds = tl.where(upper, beta[:, None] * dm, 0.0)
    dw += dot(ds + tl.trans(ds), w, PRECISION)
    store_tile(dw_ptr + b * stride_dwb + h * stride_dwh, first, stride_dwt, T, dw, CHUNK, BLOCK_D, HEAD_DIM)
    tl.store(d_beta_ptr + b * stride_dbb + h * stride_dbh + rows * stride_dbt, d_beta, mask=rows < T)
