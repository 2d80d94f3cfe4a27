"""The dispatcher ops: what torch.compile, selective checkpointing and autograd see.

    attention           q, k, v, w?, beta?, log_gate?, document_start? -> out, lse
    attention_backward  d_out, the same, out, lse -> dq, dk, dv, dw, dbeta, dlog_gate

Inputs, out and lse are all that lives between forward and backward; lse [B, HQ, T] is a natural
logarithm and has no gradient. Gradients of absent inputs are empty. Kernels are imported when an op
runs.
"""

from __future__ import annotations

import functools
import os
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from path_backend import dyadic

IMPLEMENTATIONS = ("auto", "torch", "triton")

_library = torch.library.Library("path_backend", "DEF")
_tags = (torch.Tag.pt2_compliant_tag,)
_inputs = (
    "Tensor q, Tensor k, Tensor v, "
    "Tensor? w, Tensor? beta, Tensor? log_gate, Tensor? document_start"
)
_library.define(
    f"attention({_inputs}, float scale, str implementation) -> (Tensor out, Tensor lse)", tags=_tags
)
_library.define(
    f"attention_backward(Tensor d_out, {_inputs}, "
    "Tensor out, Tensor lse, float scale, str implementation) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dw, Tensor dbeta, Tensor dlog_gate)",
    tags=_tags,
)


_Optional = Tensor | None


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: _Optional,
    beta: _Optional,
    log_gate: _Optional,
    document_start: _Optional,
    scale: float,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    if document_start is not None and document_start.device.type == "cpu":
        check_document_start(document_start)
    if log_gate is not None and log_gate.device.type == "cpu" and log_gate.isinf().any():
        b, i, head = log_gate.isinf().nonzero()[0].tolist()
        raise ValueError(
            "log_gate must be finite (a closed gate is a large negative number), "
            f"got log_gate[{b}, {i}, {head}] = {log_gate[b, i, head].item()}"
        )
    inputs = (q, k, v, w, beta, log_gate, document_start)
    # Autocast would run the fp32 transform in bf16.
    with torch.autocast(q.device.type, enabled=False):
        return _backend(q.device, implementation, inputs).attention_forward(*inputs, scale)


def _attention_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: _Optional,
    beta: _Optional,
    log_gate: _Optional,
    document_start: _Optional,
    out: Tensor,
    lse: Tensor,
    scale: float,
    implementation: str,
) -> tuple[Tensor, ...]:
    inputs = (q, k, v, w, beta, log_gate, document_start)
    with torch.autocast(q.device.type, enabled=False):
        backend = _backend(q.device, implementation, inputs)
        grads = backend.attention_backward(d_out, *inputs, out, lse, scale)
    return tuple(q.new_empty(0) if g is None else g for g in grads)


def _backend(
    device: torch.device, implementation: str, inputs: tuple[_Optional, ...]
) -> ModuleType:
    """The module that computes this case: path_backend.dyadic or path_backend.kernels.launch."""
    if implementation == "torch" or (implementation == "auto" and device.type != "cuda"):
        return dyadic
    reason = _why_not_kernels(device, inputs)
    if reason is None:
        return _load_launch()
    if implementation == "triton":
        raise NotImplementedError(f"implementation='triton' does not cover this call: {reason}")
    _announce(reason)
    return dyadic


def _why_not_kernels(device: torch.device, inputs: tuple[_Optional, ...]) -> str | None:
    """Why the Triton kernels cannot take this call, or None."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        return f"tensors are on {device}; the kernels need CUDA, or TRITON_INTERPRET=1"
    try:
        launch = _load_launch()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        return "triton is not installed"
    return launch.unsupported_reason(*inputs)


def _load_launch() -> ModuleType:
    from path_backend.kernels import launch

    return launch


@functools.cache
def _announce(reason: str) -> None:
    """Warns once per reason."""
    warnings.warn(f"path_attention runs in plain torch, not on kernels: {reason}", stacklevel=3)


def check_document_start(document_start: Tensor) -> None:
    """Raises ValueError at the first position whose document start is impossible. Reads values."""
    position = torch.arange(document_start.shape[1], device=document_start.device)
    previous = document_start.roll(1, 1)
    previous[:, 0] = 0
    wrong = (document_start < previous) | (document_start > position)
    if wrong.any():
        b, i = wrong.nonzero()[0].tolist()
        raise ValueError(
            "document_start must be non-decreasing with 0 <= document_start[b, i] <= i, "
            f"got document_start[{b}, {i}] = {document_start[b, i].item()}"
            + (f" after {previous[b, i].item()}" if i else "")
        )


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    B, T, HQ, _ = q.shape
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(B, T, HQ, v.shape[3]), q.new_empty(B, HQ, T, dtype=lse_dtype)


def _attention_backward_fake(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: _Optional,
    beta: _Optional,
    log_gate: _Optional,
    *_: Any,
) -> tuple[Tensor, ...]:
    return tuple(
        q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, w, beta, log_gate)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.implementation = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, out, lse)


def _differentiate(ctx: Any, d_out: _Optional, d_lse: None) -> tuple[_Optional, ...]:
    grads: list[_Optional] = [None] * 9
    if d_out is not None:
        computed = torch.ops.path_backend.attention_backward(
            d_out, *ctx.saved_tensors, ctx.scale, ctx.implementation
        )
        for i, grad in enumerate(computed):
            if ctx.needs_input_grad[i]:
                grads[i] = grad
    return tuple(grads)


def _refuse(ctx: Any, *grads: _Optional) -> None:
    # Without it torch only warns, and the gradient lacks this op's part.
    raise RuntimeError("path_attention has no second derivative")


_library.impl("attention", _attention, "CompositeExplicitAutograd")
_library.impl("attention_backward", _attention_backward, "CompositeExplicitAutograd")
torch.library.register_fake("path_backend::attention", _attention_fake, lib=_library)
torch.library.register_fake(
    "path_backend::attention_backward", _attention_backward_fake, lib=_library
)
torch.library.register_autograd(
    "path_backend::attention", _differentiate, setup_context=_save, lib=_library
)
torch.library.register_autograd("path_backend::attention_backward", _refuse, lib=_library)
