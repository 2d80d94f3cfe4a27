"""The elementwise part of PathInputs: w, beta, log gates and their statistics.

One function of tensors, `compute`. Op by op it takes 80 launches forward and backward, and the host
more time for them than a GPU for the layer. `run` has it compiled there, unless the caller is
compiled itself. The first two lengths compile it, and every kind of call.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from path_backend.beta import beta_from_logits, squared_norm
from path_backend.precision import at_least_float32

W_NORM_EPS = 1e-6  # added to |w|^2, as the public code does

_Optional = Tensor | None

Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A host's rotation of two tensors [B, T, heads, D] by the positions of their tokens."""


def compute(
    features: _Optional,
    taps: _Optional,
    beta_logits: _Optional,
    gate_logits: _Optional,
    document_start: _Optional,
    *,
    head_dim: int,
    beta_max: float,
    dtype: torch.dtype,
    watch: bool,
    rotate: Rotate | None = None,
) -> tuple[_Optional, _Optional, _Optional, _Optional]:
    """w [B, T, H, D] in `dtype`, beta [B, T, H], log_gate [B, T, HQ], and statistics if `watch`.

    features [B, T, H D], with taps [H D, width] before the convolution, without after it, and
    beta_logits [B, T, H] make w and beta; gate_logits [B, T, HQ] make log_gate.
    """
    w = beta = clipped = log_gate = None
    if features is not None and beta_logits is not None:
        if taps is not None:
            features = causal_conv(features, taps, document_start)
        w = F.silu(features).unflatten(-1, (-1, head_dim))
        w = w * torch.rsqrt(w.square().sum(-1, keepdim=True) + W_NORM_EPS)
        if rotate is not None:  # before the rounding, which beta's bound must know
            w, _ = rotate(w, w)
        w = w.to(dtype)
        beta, clipped = beta_from_logits(beta_logits, w, beta_max)
    if gate_logits is not None:
        log_gate = F.logsigmoid(gate_logits)
    return w, beta, log_gate, _statistics(w, beta, clipped, log_gate) if watch else None


BETA_STATS = ("beta_mean", "beta_clipped", "eigenvalue_min")
GATE_STATS = ("gate_mean",)


@torch.no_grad()
def _statistics(w: _Optional, beta: _Optional, clipped: _Optional, log_gate: _Optional) -> Tensor:
    """BETA_STATS, GATE_STATS of those that are there."""
    values = []
    if w is not None and beta is not None and clipped is not None:
        eigenvalue = 1 - beta * squared_norm(w, beta.dtype)
        values += [beta.mean(), clipped.float().mean(), eigenvalue.min()]
    if log_gate is not None:
        values += [log_gate.exp().mean()]
    return torch.stack(values)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    document_start: _Optional = None,
    history: _Optional = None,
) -> Tensor:
    """y_t = sum_b weight[:, width-1-b] x_{t-b} over the tokens t-b of t's document.

    x [B, T, C]; weight [C, width], its last column for the current token; document_start [B, T]
    counts from the first token of x (negative: the document began in `history`); history
    [B, width-1, C] are the tokens before x, zeros if None. Result in the wider dtype of x, weight,
    at least fp32.
    """
    length, width = x.shape[1], weight.shape[1]
    weight = at_least_float32(weight)
    if history is None:
        padded = F.pad(x, (0, 0, width - 1, 0))
    else:
        padded = torch.cat([history.to(x.dtype), x], dim=1)
    out = x * weight[:, -1]
    age = None
    if document_start is not None:
        age = torch.arange(length, device=x.device) - document_start
    for back in range(1, width):
        first = width - 1 - back
        tap = padded[:, first : first + length] * weight[:, first]
        if age is not None:
            tap = torch.where((age >= back)[..., None], tap, 0)
        out = out + tap
    return out


@functools.cache
def _compiled() -> Callable[..., tuple[_Optional, ...]]:
    return torch.compile(compute, backend=_inductor)


def _inductor(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    """The default backend; nothing but inputs is kept between forward and backward. What a graph
    keeps else it gives away in its first backward, and another one through it would fail.
    """
    from torch._inductor.compile_fx import compile_fx

    with torch._functorch.config.patch(activation_memory_budget=0.0):
        return compile_fx(graph, example_inputs)


def _pays(features: _Optional) -> bool:
    """Whether it is worth compiling: on a GPU, and for more than a log gate."""
    return features is not None and features.is_cuda


def _traced() -> bool:
    """Whether the caller compiles or records what runs."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
        or torch.fx.experimental.proxy_tensor.get_proxy_mode() is not None
    )


KINDS = 32
"""Kinds of calls that are compiled (lengths that differ, documents, no gradients, autocast, ...)
before others run op by op. Torch's own limit of 8 is for graphs of whole models.
"""

_broken = False


def run(*tensors: _Optional, **options: Any) -> tuple[_Optional, ...]:
    """`compute`, compiled where that pays and the compiler takes it."""
    global _broken
    plain = all(x is None or type(x) in (Tensor, nn.Parameter) for x in tensors)
    foreign = options.get("rotate") is not None  # compiled, each host's function would be a graph
    if _broken or not plain or foreign or not _pays(tensors[0]) or _traced():
        return compute(*tensors, **options)
    try:
        with torch._dynamo.config.patch(recompile_limit=KINDS, error_on_recompile=False):
            return _compiled()(*tensors, **options)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        _broken = True
        warnings.warn(f"what PathInputs computes runs op by op: {error}", stacklevel=2)
        return compute(*tensors, **options)
