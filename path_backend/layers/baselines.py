"""Stick-breaking attention in plain torch: the baseline of the state-tracking tasks.

    z_ij = scale * q_i . k_j
    A_ij = sigmoid(z_ij) * prod_{j < l < i} (1 - sigmoid(z_il)),    j < i
    o_i  = sum_j A_ij v_j

Walking back from query i, every key takes the share sigmoid(z_ij) of what nearer keys have left. A
token does not see itself, and what is left in the end goes nowhere: the first token gets zero.
Source: Tan et al., Scaling Stick-breaking Attention (ICLR 2025), arXiv:2410.17980, section 2, and
its public code, which leaves the diagonal out unless `attend_current` is set.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from path_backend.precision import without_autocast


def stick_breaking_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    document_start: Tensor | None = None,
) -> Tensor:
    """q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, DV] -> [B, T, HQ, DV] in q's dtype.

    H divides HQ. scale: default D^-0.5. document_start: int32 [B, T], first token of each token's
    document, or None. Logits and logarithms are fp32 (fp64 for fp64 q). Memory is B HQ T^2.
    Raises ValueError if the heads of k do not divide those of q.
    """
    length, n_heads, head_dim = q.shape[1:]
    n_kv_heads = k.shape[2]
    if n_heads % n_kv_heads:
        raise ValueError(
            f"the heads of k must divide those of q, got HQ = {n_heads} and H = {n_kv_heads}"
        )
    scale = head_dim**-0.5 if scale is None else scale
    dtype = torch.promote_types(q.dtype, torch.float32)
    position = torch.arange(length, device=q.device)
    hidden = position >= position.unsqueeze(-1)  # [T, T], queries in rows
    if document_start is not None:
        outside = position < document_start.unsqueeze(-1)
        hidden = (hidden | outside)[:, None, None]  # [B, 1, 1, T, T]
    with without_autocast(q):
        grouped = q.to(dtype).unflatten(2, (n_kv_heads, -1)) * scale  # [B, T, H, R, D]
        logits = torch.einsum("bihrd,bjhd->bhrij", grouped, k.to(dtype))
        passed = F.logsigmoid(-logits).masked_fill(hidden, 0)
        nearer = F.pad(passed[..., 1:], (0, 1))
        left = nearer.flip(-1).cumsum(-1).flip(-1)  # sum over the keys nearer than j
        weights = (F.logsigmoid(logits) + left).exp().masked_fill(hidden, 0)
        out = torch.einsum("bhrij,bjhd->bihrd", weights.to(v.dtype), v)
    return out.flatten(2, 3)
