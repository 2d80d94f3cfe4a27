"""The implementations that are compared: our kernels, torch's SDPA, flash-linear-attention.

An Implementation turns inputs that all share into a Problem. The wheel fla-core is imported when
one of its rows is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from path_backend.arguments import Inputs
from path_backend.attention import path_attention
from path_backend.testing import as_leaves


class Problem(NamedTuple):
    """One implementation on given inputs: what to run, what to differentiate, what to know."""

    call: Callable[[], Tensor]
    leaves: dict[str, Tensor]
    note: str = ""


class Implementation(NamedTuple):
    build: Callable[[Inputs], Problem]
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    scales_gate: bool = False
    """Its gate is multiplied by the scale of the dot products."""


def ours(w: bool, gate: bool) -> Implementation:
    """path_attention on kernels, with or without reflections and gate."""

    def build(inputs: Inputs) -> Problem:
        if not w:
            inputs = inputs._replace(w=None, beta=None)
        if not gate:
            inputs = inputs._replace(log_gate=None)
        inputs = as_leaves(inputs)
        return Problem(
            lambda: inputs.call(path_attention, implementation="triton"), inputs.differentiable()
        )

    return Implementation(build)


def sdpa(backend: SDPBackend) -> Implementation:
    """Causal attention of torch, on [B, T, H, D] tensors seen as [B, H, T, D] as models do."""

    def build(inputs: Inputs) -> Problem:
        group = inputs.q.shape[2] // inputs.k.shape[2]

        def problem(expand: bool) -> Problem:
            leaves = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
            if expand:
                for name in "kv":
                    leaves[name] = leaves[name].repeat_interleave(group, 2)
            leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
            note = "k and v expanded to HQ heads outside the clock" if expand else ""
            gqa = group > 1 and not expand

            def call() -> Tensor:
                q, k, v = (x.transpose(1, 2) for x in leaves.values())
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
                return out.transpose(1, 2)

            return Problem(call, leaves, note)

        shared = problem(expand=False)
        if group == 1:
            return shared
        try:
            shared.call()
        except RuntimeError:  # no kernel of this backend takes grouped heads
            return problem(expand=True)
        return shared

    return Implementation(build, lambda: sdpa_kernel(backend))


def fla(module: str) -> ModuleType:
    """A module of flash-linear-attention."""
    return import_module(f"fla.{module}")


def fla_path(gate: bool) -> Implementation:
    """flash-linear-attention's PaTH, which takes w, beta and the gate in fp32."""

    def build(inputs: Inputs) -> Problem:
        attention = fla("ops.path_attn").parallel_path_attn
        if not gate:
            inputs = inputs._replace(log_gate=None)
        leaves = as_leaves(inputs).differentiable()
        leaves["w"] = leaves["w"].detach().float().requires_grad_()
        arguments = (*leaves.values(), *(() if gate else (None,)))
        return Problem(lambda: attention(*arguments)[0], leaves)

    return Implementation(build, scales_gate=gate)


def fla_fox() -> Implementation:
    """flash-linear-attention's Forgetting Transformer."""

    def build(inputs: Inputs) -> Problem:
        attention = fla("ops.forgetting_attn").parallel_forgetting_attn
        leaves = as_leaves(inputs._replace(w=None, beta=None)).differentiable()
        return Problem(lambda: attention(*leaves.values()), leaves)

    return Implementation(build)


REFERENCE = "sdpa_flash"
IMPLEMENTATIONS = {
    REFERENCE: sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "path": ours(w=True, gate=False),
    "path_fox": ours(w=True, gate=True),
    "fox": ours(w=False, gate=True),
    "fla_path": fla_path(gate=False),
    "fla_path_fox": fla_path(gate=True),
    "fla_fox": fla_fox(),
}
OURS = ("path", "path_fox", "fox")
WITH_REFLECTIONS = {"path": False, "path_fox": True, "fla_path": False, "fla_path_fox": True}
"""Implementations of the accuracy table, and whether they have a gate."""
