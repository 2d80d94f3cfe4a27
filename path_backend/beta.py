"""This module turns the logit of beta into a beta whose reflection lengthens no vector.

H = I - beta w w^T scales the direction of w by 1 - beta |w|^2, so it contracts if beta |w|^2 <= 2.
A unit vector rounded to bf16 has |w|^2 up to about 1.008: with beta = 2 a product of 65,536 such
reflections overflows. Beta is therefore clipped against the w that is really multiplied.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The largest bfloat16 below 2.
BETA_MAX = 2 - 2**-7
# Room below 2 for the fp32 rounding of |w|^2 (about D * 2^-24, D <= 1024) and of the division.
_MARGIN = 2**-14


def beta_from_logits(
    logits: Tensor, w: Tensor, beta_max: float = BETA_MAX
) -> tuple[Tensor, Tensor]:
    """min(2 sigmoid(logits), beta_max, (2 - margin) / |w|^2), computed in fp32.

    logits: [B, T, H], any floating dtype. w: [B, T, H, D] as the operator receives it, that is
    normalised in fp32 and then rounded to its dtype. beta_max: in (0, 2].

    Returns beta [B, T, H] (fp32, or fp64 for fp64 logits) and a bool mask [B, T, H] of the betas
    that were clipped: its mean is a training metric. Differentiable in logits, and in w where the
    clip by |w|^2 is active. Raises ValueError for shapes that do not match and for beta_max outside
    (0, 2].
    """
    if w.shape[:-1] != logits.shape:
        raise ValueError(
            f"w must have the shape of logits and a last dimension, {[*logits.shape, 'D']}, "
            f"got {list(w.shape)}"
        )
    check_beta_max(beta_max)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    beta = 2 * torch.sigmoid(logits.to(dtype))
    bound = 2 - _MARGIN
    # Clamped before the division: w = 0 must not put an infinity into the gradient.
    limit = bound / squared_norm(w, dtype).clamp_min(bound / beta_max)
    limit = limit.clamp_max(beta_max)
    clipped = beta > limit
    return torch.where(clipped, limit, beta), clipped


def check_beta_max(beta_max: float) -> None:
    """Raises ValueError unless beta_max is in (0, 2]: a larger beta lengthens vectors."""
    if not 0 < beta_max <= 2:
        raise ValueError(f"beta_max must be in (0, 2], got {beta_max}")


def squared_norm(w: Tensor, dtype: torch.dtype) -> Tensor:
    """|w|^2 [...] in dtype, of w [..., D] as its own dtype holds it; differentiable.

    torch.compile takes a cast to 16 bits and back for none and would sum what was not rounded yet.
    It keeps the cast if the bits are worked on; two views alone it takes for none as well.
    """
    size = w.to(dtype).square().sum(-1)
    if w.element_size() > 2 or not torch.compiler.is_compiling():
        return size
    bits = w.detach().view(torch.int16) & -1
    return size + (bits.view(w.dtype).to(dtype).square().sum(-1) - size.detach())
