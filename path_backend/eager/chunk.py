"""The UT transform of chunks: reflections of C tokens as one triangular inverse, and its gradient.

Notation of one slice: Z key/value heads (batch folded in), R query heads on each, N chunks of C
tokens. With W [C, D], B = diag(beta), S = strict upper triangle of W W^T:

    X = (I + B S)^-1 B
    P = H_1 ... H_C                         = I - W^T X W
    low = lower triangle of Q W^T (diagonal too)
    q_start = H_1 ... H_i q_i               = Q - low X^T W
    up = strict upper triangle of K W^T
    k_end = (H_{j+1} ... H_C)^T k_j         = K - up X W
    intra-chunk logits                      = Q K^T - low X^T up^T
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Chunks(NamedTuple):
    """The UT transform of N chunks, rows of q packed as (token, query head)."""

    q_start: Tensor  # [Z, N, C * R, D]
    k_end: Tensor  # [Z, N, C, D]
    product: Tensor  # [Z, N, D, D]
    logits: Tensor  # [Z, N, C * R, C], valid for key <= query
    solve: Tensor  # X [Z, N, C, C]
    low: Tensor  # [Z, N, C * R, C]
    up: Tensor  # [Z, N, C, C]


def chunk_transform(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> Chunks:
    """q [Z, N, C * R, D]; k, w [Z, N, C, D]; beta [Z, N, C], of one dtype."""
    C, D = k.shape[-2:]
    M = torch.eye(C, dtype=q.dtype, device=q.device) + beta.unsqueeze(-1) * (w @ w.mT).triu(1)
    X = torch.linalg.solve_triangular(M, torch.diag_embed(beta), upper=True)
    low = (q @ w.mT).masked_fill_(_later(q, C), 0)
    up = (k @ w.mT).triu_(1)
    low_x, up_x = low @ X.mT, up @ X
    return Chunks(
        q_start=q - low_x @ w,
        k_end=k - up_x @ w,
        product=torch.eye(D, dtype=q.dtype, device=q.device) - w.mT @ (X @ w),
        logits=q @ k.mT - low_x @ up.mT,
        solve=X,
        low=low,
        up=up,
    )


def chunk_transform_backward(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    beta: Tensor,
    chunks: Chunks,
    dq_start: Tensor,
    dk_end: Tensor,
    d_product: Tensor,
    d_logits: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, w, beta. d_logits must be zero above the diagonal.

    X = M^-1 B with M = I + B S: Y = M^-T dX, dB = diag(Y) + rowsum(dM * S), dM = -Y X^T,
    dS = strict upper triangle of B dM, dW += (dS + dS^T) W.
    """
    C = k.shape[-2]
    X, low, up = chunks.solve, chunks.low, chunks.up
    low_x, up_x = low @ X.mT, up @ X

    d_low_x = -(dq_start @ w.mT) - d_logits @ up
    d_up_x = -(dk_end @ w.mT)
    d_low = (d_low_x @ X).masked_fill_(_later(q, C), 0)
    d_up = (d_up_x @ X.mT - d_logits.mT @ low_x).triu_(1)
    w_dp = w @ d_product
    dX = d_low_x.mT @ low + up.mT @ d_up_x - w_dp @ w.mT

    S = (w @ w.mT).triu(1)
    M = torch.eye(C, dtype=q.dtype, device=q.device) + beta.unsqueeze(-1) * S
    Y = torch.linalg.solve_triangular(M.mT, dX, upper=False)
    dM = -Y @ X.mT
    d_beta = Y.diagonal(dim1=-2, dim2=-1) + (dM * S).sum(-1)
    dS = (beta.unsqueeze(-1) * dM).triu_(1)

    dq = dq_start + d_logits @ k + d_low @ w
    dk = dk_end + d_logits.mT @ q + d_up @ w
    dw = d_low.mT @ q + d_up.mT @ k + (dS + dS.mT) @ w
    dw -= low_x.mT @ dq_start + up_x.mT @ dk_end
    dw -= X @ (w @ d_product.mT) + X.mT @ w_dp
    return dq, dk, dw, d_beta


def _later(q: Tensor, C: int) -> Tensor:
    """[C * R, C]: True where the key comes after the packed query row."""
    token = torch.arange(C, device=q.device)
    return token > token.repeat_interleave(q.shape[-2] // C).unsqueeze(-1)
