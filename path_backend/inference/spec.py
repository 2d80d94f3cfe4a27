"""The description of a cache, its errors, and the checks of what is appended to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from path_backend.arguments import DTYPES, Inputs

FORMS = ("dyadic", "paged")
GROUP = 64
"""Tokens of a group: one chunk of the kernels that compute a prefill."""


class CacheError(ValueError):
    """A call that the cache refuses. The cache is what it was before."""


class CapacityError(CacheError):
    """More tokens than a static cache has room for."""


class RollbackError(CacheError):
    """Tokens were to be taken back that lie in a closed group."""


class CacheMismatchError(CacheError):
    """Tensors or a state of another model, layout or dtype."""


@dataclass(frozen=True)
class CacheSpec:
    """The numbers that a cache of one attention layer is made for.

    Args:
        query_heads, heads, head_dim, value_dim: HQ, H, D and DV of `path_attention`; H divides HQ.
        dtype: that of q, k, v and w.
        reflections, forget_gate: whether w and beta, and log_gate, come with every token.
        group: G, tokens of a group.
        form: of the closed part. "dyadic" merges equal blocks, so that a query is moved log2(T/G)
            times a step; "paged" never changes a closed group and moves it T/G times.
        capacity: tokens that the buffers are allocated for, once; None lets them grow.
        rollback_window: tokens that can be taken back at any time. A group is closed only when so
            many follow it.
        scale, gate_scale: as in `path_attention`.
        key_dtype: that of closed keys; None takes `dtype`, and fp16 for bf16 with reflections. A
            key is rounded at each merge, and no reflection makes it longer: fp16 holds it with
            three bits more than bf16.
        prune: nats; closed groups that a forget gate hides from a row, so that all of them together
            have less than exp(-prune) of its weight, need not be read. The proof wants reflections
            that lengthen nothing. None takes 10 for 16 bits and infinity, which turns it off, for
            others.
        conv_channels, conv_width: of the convolution whose last inputs the cache keeps; 0 channels
            if there is none.
    """

    query_heads: int
    heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    reflections: bool = True
    forget_gate: bool = False
    group: int = GROUP
    form: str = "dyadic"
    capacity: int | None = None
    rollback_window: int = 0
    scale: float | None = None
    gate_scale: float = 1.0
    key_dtype: torch.dtype | None = None
    prune: float | None = None
    conv_channels: int = 0
    conv_width: int = 1

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"form must be one of {FORMS}, got {self.form!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {list(DTYPES)}, got {self.dtype}")
        for name in ("query_heads", "heads", "head_dim", "value_dim", "group", "conv_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.query_heads % self.heads:
            raise ValueError(
                "heads must divide query_heads, got "
                f"heads = {self.heads} and query_heads = {self.query_heads}"
            )
        if self.capacity is not None and self.capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {self.capacity}")
        if self.prune is not None and not self.prune >= 0:
            raise ValueError(f"prune must not be negative, got {self.prune}")
        if self.rollback_window < 0:
            raise ValueError(f"rollback_window must not be negative, got {self.rollback_window}")

    @property
    def precise(self) -> torch.dtype:
        """The dtype of sums, products and open keys: fp32, fp64 for fp64."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def closed_key_dtype(self) -> torch.dtype:
        """The dtype of closed keys."""
        if self.key_dtype is not None:
            return self.key_dtype
        half = self.reflections and self.dtype == torch.bfloat16
        return torch.float16 if half else self.dtype

    @property
    def prune_margin(self) -> float:
        """`prune`, or its default."""
        if self.prune is not None:
            return self.prune
        return 10.0 if self.dtype in (torch.bfloat16, torch.float16) else math.inf

    @property
    def open_room(self) -> int:
        """The tokens that the open group can hold."""
        return self.group + self.rollback_window

    @property
    def history(self) -> int:
        """The tokens before the current one that the convolution reads."""
        return self.conv_width - 1 if self.conv_channels else 0

    def closed_groups(self, tokens: int) -> int:
        """The groups that are closed once there are so many tokens."""
        return max(0, tokens - self.rollback_window) // self.group

    def check(self, inputs: Inputs, rows: int) -> None:
        """Raises CacheMismatchError if the tokens are not of this model; shapes are consistent."""
        q, k, v = inputs.q, inputs.k, inputs.v
        got = (q.shape[0], q.shape[2], k.shape[2], k.shape[3], v.shape[3])
        want = (rows, self.query_heads, self.heads, self.head_dim, self.value_dim)
        if got != want:
            raise CacheMismatchError(
                f"the cache is for (B, HQ, H, D, DV) = {want}, the tokens have {got}"
            )
        if q.dtype != self.dtype:
            raise CacheMismatchError(f"the cache is for {self.dtype}, the tokens are {q.dtype}")
        for name, wanted in (("w", self.reflections), ("log_gate", self.forget_gate)):
            there = getattr(inputs, name) is not None
            if there != wanted:
                raise CacheMismatchError(
                    f"the cache is for tokens {'with' if wanted else 'without'} {name}, "
                    f"they came {'with' if there else 'without'} it"
                )

    def differences(self, other: CacheSpec) -> list[str]:
        """Returns why a state of `other` cannot be loaded here; capacities may differ."""
        free = ("capacity",)
        return [
            f"{f.name} = {getattr(self, f.name)}, the state has {getattr(other, f.name)}"
            for f in fields(self)
            if f.name not in free and getattr(self, f.name) != getattr(other, f.name)
        ]


def pack(x: Tensor, heads: int) -> Tensor:
    """[B, n, H * R, D] -> [B, H, n, R, D] (a view)."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def unpack(x: Tensor) -> Tensor:
    """The inverse of pack."""
    return x.transpose(1, 2).flatten(2, 3)
