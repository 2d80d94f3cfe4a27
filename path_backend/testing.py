"""Helpers that tests share: input factories, a way to run a form with its gradients, budgets.

Shapes as path_attention. Inputs are drawn on the CPU in fp64 from a seed and then rounded, so that
a case holds the same numbers on every device and, up to rounding, in every dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from path_backend.arguments import Inputs

BETAS = {
    "random": lambda x: 2 * torch.sigmoid(x),
    "high": lambda x: 1.9 + 0.1 * torch.sigmoid(x),
    "zero": lambda x: torch.zeros_like(x),
    "one": lambda x: torch.ones_like(x),
    "edge": lambda x: torch.full_like(x, 2 - 2**-20),
    "two": lambda x: torch.full_like(x, 2.0),
}


def as_leaves(inputs: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    """Fresh leaves that require gradients, with the same strides; of another dtype if given."""
    return inputs.map_floating(lambda x: x.detach().to(dtype or x.dtype).requires_grad_())


def make_inputs(
    T: int,
    *,
    B: int = 1,
    HQ: int = 2,
    H: int = 2,
    D: int = 16,
    DV: int | None = None,
    w: str | None = "random",
    beta: str = "random",
    gate: bool = False,
    documents: bool = False,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    strided: bool = False,
    seed: int = 0,
) -> Inputs:
    """Leaves that require gradients.

    w: "random", "constant" (one direction and 1 % of noise), None (no reflections). beta: a key of
    BETAS. beta and log_gate are fp32, fp64 for fp64. documents: about eight per row, at random
    places. strided: q, k, v, w as views of wider tensors and beta, log_gate transposed.
    """
    generator = torch.Generator().manual_seed(seed)
    precise = torch.promote_types(dtype, torch.float32)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def place(x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.to(device, dtype)
        if strided and x.ndim == 4:
            x = torch.cat([x, torch.zeros_like(x)], -1)[..., : x.shape[-1]]
        elif strided:
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        return x.requires_grad_()

    q, k, v = draw(B, T, HQ, D), draw(B, T, H, D), draw(B, T, H, D if DV is None else DV)
    direction = draw(B, 1, H, D) + 0.01 * draw(B, T, H, D) if w == "constant" else draw(B, T, H, D)
    unit = F.normalize(direction, dim=-1)
    strength = BETAS[beta](draw(B, T, H))
    log_gate = F.logsigmoid(draw(B, T, HQ) + 3)
    start = draw_documents(B, T, generator).to(device) if documents else None
    return Inputs(
        place(q, dtype),
        place(k, dtype),
        place(v, dtype),
        None if w is None else place(unit, dtype),
        None if w is None else place(strength, precise),
        place(log_gate, precise) if gate else None,
        start,
    )


def draw_documents(B: int, T: int, generator: torch.Generator) -> Tensor:
    """document_start int32 [B, T] of about eight documents per row."""
    begins = torch.rand(B, T, generator=generator) < 8 / max(T, 8)
    position = torch.arange(T, dtype=torch.int32)
    return torch.where(begins, position, 0).cummax(1).values.to(torch.int32)


def run(
    function: Callable[..., Tensor],
    inputs: Inputs,
    d_out: Tensor | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """The output and the gradient of every input: {"out": ..., "dq": ..., ..., "dlog_gate": ...}.

    d_out: [B, T, HQ, DV]; by default drawn from a fixed seed and rounded to the output's dtype.
    """
    out = inputs.call(function, **options)
    if d_out is None:
        generator = torch.Generator().manual_seed(1)
        d_out = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    named = inputs.differentiable()
    # One token meets no reflection: the definition does not read w and beta then.
    grads = torch.autograd.grad(
        out, list(named.values()), d_out.to(out), allow_unused=True, materialize_grads=True
    )
    return {"out": out.detach()} | {f"d{n}": g for n, g in zip(named, grads, strict=True)}


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """|actual - exact| / |exact| in the 2-norm, in fp64; the absolute norm if exact is zero."""
    exact = exact.double()
    scale = exact.norm().item()
    return (actual.double() - exact).norm().item() / (scale or 1.0)


def assert_exact(actual: dict[str, Tensor], exact: dict[str, Tensor], tolerance: float) -> None:
    """Every entry within `tolerance` of the largest value of its exact one (or of 1)."""
    assert actual.keys() == exact.keys()
    for name, want in exact.items():
        error = (actual[name] - want).abs().max().item()
        limit = tolerance * max(1.0, want.abs().max().item())
        assert error <= limit, f"{name}: largest error {error:.2e}, allowed {limit:.2e}"


def assert_within_budget(
    actual: dict[str, Tensor], exact: dict[str, Tensor], plain: dict[str, Tensor]
) -> None:
    """Largest error against fp64: at most twice that of plain torch, plus one ulp.

    plain: the definition in compute precision, each result rounded once to its dtype. The ulp is
    that of the output's dtype also for fp32 gradients, since a backward reads the rounded output.
    """
    assert actual.keys() == exact.keys() == plain.keys()
    eps = torch.finfo(actual["out"].dtype).eps
    for name, want in exact.items():
        error, reference = ((x[name].double() - want).abs().max() for x in (actual, plain))
        budget = 2 * reference + eps * want.abs().max()
        assert error <= budget, f"{name}: largest error {error:.2e}, budget {budget:.2e}"
