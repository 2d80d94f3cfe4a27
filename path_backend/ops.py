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

from path_backend import eager, flops
from path_backend.arguments import Backend, Inputs
from path_backend.checks import check_values
from path_backend.context_parallel import by_heads, by_tokens
from path_backend.context_parallel.collectives import GroupTransport, Transport
from path_backend.context_parallel.layout import Layout
from path_backend.context_parallel.plan import Plan
from path_backend.precision import without_autocast

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
    check_values(x)
    with _computing(x.q):
        return choose_backend(x, implementation).attention_forward(x, scale)


def _attention_backward(d_out: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    x, (out, lse, scale, implementation) = _split(arguments)
    with _computing(x.q):
        backend = choose_backend(x, implementation)
        grads = backend.attention_backward(d_out, x, out, lse, scale)
    return tuple(x.q.new_empty(0) if g is None else g for g in grads)


def _context_parallel_attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    x, (starts, length, group_name, exchange, scale, implementation) = _split(arguments)
    transport = GroupTransport(group_name)
    call = by_tokens.describe(x, starts, length, exchange, scale)
    transport.agree(call, x.q.device)
    with _computing(x.q):
        plan = _make_plan(x, transport, starts, length, exchange, scale, implementation)
        check_values(x, plan.layout.starts[transport.rank])
        return _algorithm(exchange).forward(x, plan)


def _context_parallel_attention_backward(d_out: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    x, (out, lse, starts, length, group_name, exchange, scale, implementation) = _split(arguments)
    transport = GroupTransport(group_name)
    with _computing(x.q):
        plan = _make_plan(x, transport, starts, length, exchange, scale, implementation)
        grads = _algorithm(exchange).backward(d_out, x, out, lse, plan)
    return tuple(x.q.new_empty(0) if g is None else g for g in grads)


def _split(arguments: tuple[Any, ...]) -> tuple[Inputs, tuple[Any, ...]]:
    """Returns the tensors of path_attention, and the arguments after them."""
    count = len(Inputs._fields)
    return Inputs(*arguments[:count]), arguments[count:]


def _make_plan(
    x: Inputs,
    transport: Transport,
    starts: list[int],
    length: int,
    exchange: str,
    scale: float,
    implementation: str,
) -> Plan:
    layout = Layout.from_flat(tuple(starts), length, transport.ranks)
    if x.q.shape[1] != layout.tokens:
        raise ValueError(
            f"q must have the {layout.tokens} tokens that the layout gives each rank, "
            f"got {x.q.shape[1]}"
        )
    return Plan(layout, transport, exchange, scale, choose_backend(x, implementation))


@contextlib.contextmanager
def _computing(q: Tensor) -> Iterator[None]:
    """Makes q's GPU the current one, on which Triton launches, and turns autocast off, which would
    run the fp32 transform in bf16.
    """
    with without_autocast(q), torch.cuda.device_of(q):
        yield


def _algorithm(exchange: str) -> ModuleType:
    return by_heads if exchange == "heads" else by_tokens


def choose_backend(inputs: Inputs, implementation: str) -> Backend:
    """Returns what computes this case: the eager form or the kernels. "auto" warns once for each
    reason why a CUDA call is not on kernels.

    Raises NotImplementedError if "triton" does not cover the case.
    """
    device = inputs.q.device
    if implementation == "torch" or (implementation == "auto" and device.type != "cuda"):
        return eager
    reason = why_not_kernels(device, inputs)
    if reason is None:
        return _load_kernels()
    if implementation == "triton":
        raise NotImplementedError(f"implementation='triton' does not cover this call: {reason}")
    _announce(reason)
    return eager


def why_not_kernels(device: torch.device, inputs: Inputs) -> str | None:
    """Returns why the Triton kernels cannot take this call, or None."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        return f"tensors are on {device}; the kernels need CUDA, or TRITON_INTERPRET=1"
    if interpreted and inputs.q.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly (seen in 3.7.1 and 3.9)"
    try:
        kernels = _load_kernels()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        return "triton is not installed"
    return kernels.unsupported_reason(inputs)


def _load_kernels() -> Any:
    from path_backend.kernels import backend

    return backend


@functools.cache
def _announce(reason: str) -> None:
    """Warns once per reason."""
    warnings.warn(f"path_attention runs in plain torch, not on kernels: {reason}", stacklevel=3)


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
flops.register(torch.ops.path_backend)
