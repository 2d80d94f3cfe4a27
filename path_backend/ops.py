"""The dispatcher ops: what torch.compile, selective checkpointing and autograd see.

    attention           q, k, v, w?, beta?, log_gate?, document_start? -> out, lse
    attention_backward  d_out, the same, out, lse -> dq, dk, dv, dw, dbeta, dlog_gate
    context_parallel_attention, context_parallel_attention_backward
                        the same for one rank's tokens; all ranks of the group must call

Inputs, out and lse are all that lives between forward and backward; lse [B, HQ, T] is a natural
logarithm and has no gradient. Gradients of absent inputs are empty. Kernels are imported when an op
runs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from path_backend.arguments import Inputs
from path_backend.context_parallel import by_heads, by_tokens, collectives
from path_backend.context_parallel.layout import Layout
from path_backend.eager import attention as eager
from path_backend.eager import segments

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
_plan = "int[] starts, int length, str group_name, str exchange, float scale, str implementation"
_library.define(
    f"context_parallel_attention({_inputs}, {_plan}) -> (Tensor out, Tensor lse)", tags=_tags
)
_library.define(
    f"context_parallel_attention_backward(Tensor d_out, {_inputs}, Tensor out, Tensor lse, {_plan})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dw, Tensor dbeta, Tensor dlog_gate)",
    tags=_tags,
)


_Optional = Tensor | None


def _attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    x, (scale, implementation) = _split(arguments)
    if x.document_start is not None and x.document_start.device.type == "cpu":
        check_document_start(x.document_start)
    _check_gate(x.log_gate)
    with _computing(x.q):
        return _backend(x.q.device, implementation, x).attention_forward(*x, scale)


def _attention_backward(d_out: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    x, (out, lse, scale, implementation) = _split(arguments)
    with _computing(x.q):
        backend = _backend(x.q.device, implementation, x)
        grads = backend.attention_backward(d_out, *x, out, lse, scale)
    return tuple(x.q.new_empty(0) if g is None else g for g in grads)


def _context_parallel_attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    x, (starts, length, group_name, method, scale, implementation) = _split(arguments)
    transport = collectives.GroupTransport(group_name)
    call = by_tokens.describe(x, starts, length, method, scale)
    transport.agree(call, x.q.device)
    with _computing(x.q):
        plan = _make_plan(x, transport, starts, length, method, scale, implementation)
        if x.document_start is not None and x.document_start.device.type == "cpu":
            own = plan.layout.starts[transport.rank]
            for piece, first in zip(x.document_start.split(length, 1), own, strict=True):
                check_document_start(piece, first)
        _check_gate(x.log_gate)
        return _algorithm(method).forward(x, plan)


def _context_parallel_attention_backward(d_out: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    x, (out, lse, starts, length, group_name, method, scale, implementation) = _split(arguments)
    transport = collectives.GroupTransport(group_name)
    with _computing(x.q):
        plan = _make_plan(x, transport, starts, length, method, scale, implementation)
        grads = _algorithm(method).backward(d_out, x, out, lse, plan)
    return tuple(x.q.new_empty(0) if g is None else g for g in grads)


def _split(arguments: tuple[Any, ...]) -> tuple[Inputs, tuple[Any, ...]]:
    """Tensors of path_attention, and what comes after them."""
    count = len(Inputs._fields)
    return Inputs(*arguments[:count]), arguments[count:]


def _make_plan(
    x: Inputs,
    transport: collectives.Transport,
    starts: list[int],
    length: int,
    method: str,
    scale: float,
    implementation: str,
) -> by_tokens.Plan:
    layout = Layout.from_flat(tuple(starts), length, transport.ranks)
    if x.q.shape[1] != layout.tokens:
        raise ValueError(
            f"q must have the {layout.tokens} tokens that the layout gives each rank, "
            f"got {x.q.shape[1]}"
        )
    torch_form = eager if method == "heads" else segments
    backend = _backend(x.q.device, implementation, x, torch_form)
    return by_tokens.Plan(layout, transport, method, scale, backend)


@contextlib.contextmanager
def _computing(q: Tensor) -> Iterator[None]:
    """On q's GPU: Triton launches on the current one, wherever the tensors are. Without autocast,
    which would run the fp32 transform in bf16.
    """
    with torch.autocast(q.device.type, enabled=False), torch.cuda.device_of(q):
        yield


def _algorithm(exchange: str) -> ModuleType:
    return by_heads if exchange == "heads" else by_tokens


def _backend(
    device: torch.device,
    implementation: str,
    inputs: tuple[_Optional, ...],
    torch_form: ModuleType = eager,
) -> ModuleType:
    """The module that computes this case: torch_form or path_backend.kernels.backend."""
    if implementation == "torch" or (implementation == "auto" and device.type != "cuda"):
        return torch_form
    reason = why_not_kernels(device, inputs)
    if reason is None:
        return _load_backend()
    if implementation == "triton":
        raise NotImplementedError(f"implementation='triton' does not cover this call: {reason}")
    _announce(reason)
    return torch_form


def why_not_kernels(device: torch.device, inputs: tuple[_Optional, ...]) -> str | None:
    """Why the Triton kernels cannot take this call, or None."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        return f"tensors are on {device}; the kernels need CUDA, or TRITON_INTERPRET=1"
    try:
        backend = _load_backend()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        return "triton is not installed"
    return backend.unsupported_reason(*inputs)


def _load_backend() -> ModuleType:
    from path_backend.kernels import backend

    return backend


@functools.cache
def _announce(reason: str) -> None:
    """Warns once per reason."""
    warnings.warn(f"path_attention runs in plain torch, not on kernels: {reason}", stacklevel=3)


def _check_gate(log_gate: _Optional) -> None:
    if log_gate is not None and log_gate.device.type == "cpu" and log_gate.isinf().any():
        b, i, head = log_gate.isinf().nonzero()[0].tolist()
        raise ValueError(
            "log_gate must be finite (a closed gate is a large negative number), "
            f"got log_gate[{b}, {i}, {head}] = {log_gate[b, i, head].item()}"
        )


def check_document_start(document_start: Tensor, first: int = 0) -> None:
    """Raises ValueError at the first position whose document start is impossible. Reads values.

    first: the token at which document_start begins.
    """
    position = torch.arange(document_start.shape[1], device=document_start.device) + first
    previous = document_start.roll(1, 1)
    previous[:, 0] = 0
    wrong = (document_start < previous) | (document_start > position)
    if wrong.any():
        b, i = wrong.nonzero()[0].tolist()
        raise ValueError(
            "document_start must be non-decreasing with 0 <= document_start[b, i] <= i, "
            f"got document_start[{b}, {first + i}] = {document_start[b, i].item()}"
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
    tensors, ctx.options = inputs[:7], inputs[7:]
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, out, lse)


def _differentiate(name: str) -> Callable[..., tuple[_Optional, ...]]:
    """The derivative of op `name`."""

    def differentiate(ctx: Any, d_out: _Optional, d_lse: None) -> tuple[_Optional, ...]:
        grads: list[_Optional] = [None] * (7 + len(ctx.options))
        if d_out is not None:
            backward = getattr(torch.ops.path_backend, f"{name}_backward")
            for i, grad in enumerate(backward(d_out, *ctx.saved_tensors, *ctx.options)):
                if ctx.needs_input_grad[i]:
                    grads[i] = grad
        return tuple(grads)

    return differentiate


def _refuse(ctx: Any, *grads: _Optional) -> None:
    # Without it torch only warns, and the gradient lacks this op's part.
    raise RuntimeError("path_attention has no second derivative")


def _register(name: str, forward: Callable, backward: Callable) -> None:
    """The op `name`, its backward, their fakes and derivatives."""
    for op, kernel, fake, derivative in (
        (name, forward, _attention_fake, _differentiate(name)),
        (f"{name}_backward", backward, _attention_backward_fake, _refuse),
    ):
        setup = _save if kernel is forward else None
        _library.impl(op, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"path_backend::{op}", fake, lib=_library)
        torch.library.register_autograd(
            f"path_backend::{op}", derivative, setup_context=setup, lib=_library
        )


_register("attention", _attention, _attention_backward)
_register(
    "context_parallel_attention", _context_parallel_attention, _context_parallel_attention_backward
)
