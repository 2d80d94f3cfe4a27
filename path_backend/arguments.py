"""The one record of a call, what a backend computes from it, and the checks of a call.

B is batch, T tokens, HQ query heads, H key/value heads, D and DV the widths of keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from path_backend.kernels.records import SegmentEnds as SegmentEnds
from path_backend.kernels.records import SegmentForward as SegmentForward

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
IMPLEMENTATIONS = ("auto", "torch", "triton")


class Inputs(NamedTuple):
    """The tensors of a call, in the order of `path_attention`: of a whole sequence, of one rank, or
    of one segment. Absent ones are None.
    """

    q: Tensor  # [B, T, HQ, D]
    k: Tensor  # [B, T, H, D]
    v: Tensor  # [B, T, H, DV]
    w: Tensor | None = None  # [B, T, H, D]
    beta: Tensor | None = None  # [B, T, H]
    log_gate: Tensor | None = None  # [B, T, HQ]
    document_start: Tensor | None = None  # int32 [B, T]

    @property
    def floating(self) -> tuple[Tensor | None, ...]:
        """The inputs that have gradients, in order; None where absent."""
        return self[:6]

    def differentiable(self) -> dict[str, Tensor]:
        """The floating inputs that are there, by name."""
        return {n: x for n, x in zip(self._fields, self.floating, strict=False) if x is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        """The function applied to all inputs that are there."""
        return Inputs._make(None if x is None else function(x) for x in self)

    def map_floating(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        """The function applied to the floating inputs that are there."""
        return self._replace(**{n: function(x) for n, x in self.differentiable().items()})

    def call(self, function: Callable[..., Tensor], **options: object) -> Tensor:
        """A public function, such as `path_attention`, on these inputs."""
        return function(*self.floating, document_start=self.document_start, **options)


Gradients = tuple[Tensor | None, ...]
"""dq, dk, dv, dw, dbeta, dlog_gate; None where the input is absent."""


class CrossSegment(NamedTuple):
    """Queries of one segment on keys of an earlier one, both in one frame:

    logit_ij = scale * q_i . k_j + gate_q_i + gate_k_j, without a causal mask.
    """

    q: Tensor  # [B, Tq, HQ, D]
    k: Tensor  # [B, Tk, H, D]
    v: Tensor  # [B, Tk, H, DV]
    gate_q: Tensor | None  # [B, HQ, Tq], natural logarithm, compute precision; both gates or none
    gate_k: Tensor | None  # [B, HQ, Tk]
    first_key: Tensor | None  # int32 [B, Tq]: keys j < first_key[b, i] are masked; may exceed Tk


class Backend(Protocol):
    """A form of the operator: plain torch (eager) or Triton kernels.

    Compute precision is fp32, fp64 for fp64 inputs where a form takes them. `scale` multiplies the
    dot products and not the gates. Nothing here is differentiable by autograd.
    """

    def attention_forward(self, inputs: Inputs, scale: float) -> tuple[Tensor, Tensor]:
        """Returns out [B, T, HQ, DV] in q's dtype and lse [B, HQ, T] in compute precision."""

    def attention_backward(
        self, d_out: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, scale: float
    ) -> Gradients:
        """Returns the gradients of the inputs, each in its input's dtype."""

    def segment_ends(self, inputs: Inputs) -> SegmentEnds:
        """Returns the ends of a segment, without its attention: v, gates and documents have no
        part in it.
        """

    def segment_forward(self, inputs: Inputs, scale: float) -> SegmentForward:
        """Attention inside a segment; document_start counts from the segment's first token."""

    def segment_backward(
        self,
        d_out: Tensor,
        inputs: Inputs,
        out: Tensor,
        lse: Tensor,
        scale: float,
        d_ends: SegmentEnds,
    ) -> Gradients:
        """Returns gradients of a segment's inputs; those of k, q and v may be in fp32.

        out and lse are over the keys of all segments, d_ends comes from the other segments. The
        result holds d_ends and the pairs inside; a gate's pairs outside are not in it.
        """

    def cross_segment_forward(
        self, pair: CrossSegment, scale: float, out: Tensor, lse: Tensor
    ) -> None:
        """Merges attention of a pair into out [B, Tq, HQ, DV] and lse [B, HQ, Tq], in place.

        Both are in compute precision: what the rows saw so far, zero and -inf if nothing.
        """

    def cross_segment_backward(
        self, d_out: Tensor, pair: CrossSegment, lse: Tensor, delta: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Returns gradients of q, k, v, gate_q, gate_k in compute precision (None without gates).

        lse, delta [B, HQ, Tq] are over the keys of all segments; delta = rowsum(d_out * out).
        """


def prepare(
    inputs: Inputs, scale: float | None, gate_scale: float, implementation: str
) -> tuple[Inputs, float]:
    """Checks the arguments of a call; returns tensors and scale as the op takes them."""
    _check(inputs, implementation)
    _check_number("scale", scale)
    _check_number("gate_scale", gate_scale)
    q, beta, log_gate = inputs.q, inputs.beta, inputs.log_gate
    if log_gate is None and gate_scale != 1.0:
        raise ValueError(f"gate_scale needs a log_gate, got gate_scale = {gate_scale} without one")
    _refuse_forward_mode(inputs)
    precise = torch.promote_types(q.dtype, torch.float32)
    if beta is not None:
        beta = beta.to(precise)
    if log_gate is not None:
        log_gate = log_gate.to(precise)
        if gate_scale != 1.0:
            log_gate = log_gate * gate_scale
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return inputs._replace(beta=beta, log_gate=log_gate), scale


def _check(inputs: Inputs, implementation: str) -> None:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")
    q, k, v, w, beta, log_gate, document_start = inputs
    if (w is None) != (beta is None):
        given, missing = ("w", "beta") if beta is None else ("beta", "w")
        raise ValueError(f"w and beta must come together, got {given} without {missing}")
    for name, value in inputs._asdict().items():
        if not isinstance(value, Tensor) and (value is not None or name in ("q", "k", "v")):
            raise TypeError(f"{name} must be a Tensor, got {type(value).__name__}")
    for name, qkv in (("q", q), ("k", k), ("v", v)):
        if qkv.ndim != 4:
            raise ValueError(
                f"{name} must have 4 dimensions [B, T, heads, D], got {list(qkv.shape)}"
            )
    B, T, HQ, D = q.shape
    H, DV = v.shape[2:]
    for name, size in (("T", T), ("B", B), ("HQ", HQ), ("D", D), ("H", H), ("DV", DV)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got q {list(q.shape)}, v {list(v.shape)}")
    if HQ % H != 0:
        raise ValueError(f"the heads of k must divide those of q, got HQ = {HQ} and H = {H}")
    _check_shape("k", k, "[B, T, H, D]", (B, T, H, D))
    _check_shape("v", v, "[B, T, H, DV]", (B, T, H, DV))
    _check_shape("w", w, "[B, T, H, D]", (B, T, H, D))
    _check_shape("beta", beta, "[B, T, H]", (B, T, H))
    _check_shape("log_gate", log_gate, "[B, T, HQ]", (B, T, HQ))
    _check_shape("document_start", document_start, "[B, T]", (B, T))

    if q.dtype not in DTYPES:
        raise TypeError(f"q must have a dtype of {list(DTYPES)}, got {q.dtype}")
    for name, x in (("k", k), ("v", v), ("w", w)):
        if x is not None and x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
    for name, x in (("beta", beta), ("log_gate", log_gate)):
        if x is not None and not x.dtype.is_floating_point:
            raise TypeError(f"{name} must have a floating dtype, got {x.dtype}")
    if document_start is not None and document_start.dtype != torch.int32:
        raise TypeError(f"document_start must have dtype torch.int32, got {document_start.dtype}")
    for name, x in inputs._asdict().items():
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")


def _check_shape(name: str, x: Tensor | None, symbols: str, shape: tuple[int, ...]) -> None:
    if x is not None and x.shape != shape:
        raise ValueError(f"{name} must have shape {symbols} = {list(shape)}, got {list(x.shape)}")


def _check_number(name: str, x: float | None) -> None:
    if x is None and name == "scale":
        return
    if not isinstance(x, (int, float, torch.SymFloat)):
        raise TypeError(f"{name} must be a number, got {type(x).__name__}")
    if not -math.inf < x < math.inf:
        raise ValueError(f"{name} must be finite, got {x}")


def _refuse_forward_mode(inputs: Inputs) -> None:
    """Raises RuntimeError for tangents: torch takes a missing formula for a derivative of zero."""
    if forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in inputs.differentiable().values()):
        raise RuntimeError("path_attention has no forward-mode derivative")
