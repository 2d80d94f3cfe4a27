"""Results of a backend on a segment of a sequence. Shared with the eager form: torch alone."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SegmentEnds(NamedTuple):
    """A segment as the others of its sequence see it: queries at its start, keys at its end.

    Also the gradients of these, q_start and k_end then in compute precision.
    """

    q_start: Tensor  # H_1 ... H_i q_i [B, T, HQ, D], q's dtype
    k_end: Tensor  # (H_{j+1} ... H_T)^T k_j [B, T, H, D], k's dtype
    product: Tensor | None  # H_1 ... H_T [B, H, D, D], compute precision; None without reflections


class SegmentForward(NamedTuple):
    """Attention inside a segment, and its ends."""

    out: Tensor  # [B, T, HQ, DV], compute precision
    lse: Tensor  # natural log-sum-exp [B, HQ, T], compute precision
    ends: SegmentEnds
