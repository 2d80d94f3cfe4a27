"""The definition of PaTH attention, token by token, in fp64: the oracle of every other form.

    H_s      = I - beta_s w_s w_s^T
    logit_ij = scale * k_j^T H_{j+1} ... H_i q_i + gate_scale * (G_i - G_j),   j <= i
    o_i      = sum_j softmax_j(logit_ij) v_j,                 G = cumsum(log_gate)

Walk j from the last token to the first and keep x_i = H_{j+1} ... H_i q_i of every query i >= j.
Token j's query joins, all of them meet k_j, then all are reflected by H_j.
"""

from __future__ import annotations

import torch
from torch import Tensor


def path_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_gate: Tensor | None = None,
    *,
    scale: float | None = None,
    document_start: Tensor | None = None,
    gate_scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Arguments as path_attention; memory T^2 * D under autograd, so for small T.

    Returns out [B, T, HQ, DV] in `dtype`, the precision of the whole computation (Yang et al.,
    PaTH Attention, 2025, section 2; the gate is that of the Forgetting Transformer).
    """
    T, repeat = q.shape[1], q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q = q.to(dtype)
    k, v = (x.to(dtype).repeat_interleave(repeat, 2) for x in (k, v))
    if w is not None and beta is not None:
        w = w.to(dtype).repeat_interleave(repeat, 2)
        beta = beta.to(dtype).repeat_interleave(repeat, 2).unsqueeze(-1)

    columns = []
    x = q[:, :0]
    for j in reversed(range(T)):
        x = torch.cat([q[:, j : j + 1], x], 1)
        column = (x * k[:, j : j + 1]).sum(-1)
        columns.append(torch.nn.functional.pad(column, (0, 0, j, 0)))
        if w is not None and beta is not None:
            w_j = w[:, j : j + 1]
            x = x - beta[:, j : j + 1] * w_j * (w_j * x).sum(-1, keepdim=True)
    logits = torch.stack(columns[::-1], -1) * scale  # [B, T, HQ, T]

    if log_gate is not None:
        G = log_gate.to(dtype).cumsum(1)
        logits = logits + gate_scale * (G.unsqueeze(-1) - G.mT.unsqueeze(1))
    position = torch.arange(T, device=q.device)
    hidden = (position > position.unsqueeze(-1)).unsqueeze(0)
    if document_start is not None:
        hidden = hidden | (position < document_start.unsqueeze(-1))
    weights = logits.masked_fill(hidden.unsqueeze(2), float("-inf")).softmax(-1)
    return torch.einsum("bihj,bjhd->bihd", weights, v)
