"""Values that make a call meaningless, found before it runs.

On a CPU every call is checked: a pass over w, beta and the gates costs less than one percent of the
attention. On a GPU the host would have to wait: calls are checked there only where the environment
says PATH_BACKEND_CHECK=1, to look for the cause of a NaN, say.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from path_backend.arguments import Inputs

LARGEST_EIGENVALUE = 1.05
"""Bound of |1 - beta |w|^2|. Products of reflections grow by it for each token. Unit vectors
rounded to bf16 reach 1.016 with beta = 2; `beta_from_logits` keeps them at 1.
"""


def check_values(inputs: Inputs, starts: Sequence[int] = (0,)) -> None:
    """Raises ValueError at the first value that a call cannot mean. Reads all values on the host.

    starts: the first token of each segment of the inputs, which have equal lengths.
    """
    if inputs.q.device.type != "cpu" and os.environ.get("PATH_BACKEND_CHECK") != "1":
        return
    if inputs.document_start is not None:
        length = inputs.document_start.shape[1] // len(starts)
        for segment, first in zip(inputs.document_start.split(length, 1), starts, strict=True):
            check_document_start(segment, first)
    try:
        if inputs.log_gate is not None:
            _check_gate(inputs.log_gate)
        if inputs.w is not None and inputs.beta is not None:
            _check_reflections(inputs.w, inputs.beta)
    except ValueError:
        # A NaN in q too came from before the call, and is the caller's to see in the result. A
        # pipeline runs its stages on uninitialised memory to learn their shapes.
        if not inputs.q.isnan().any():
            raise


def check_document_start(document_start: Tensor, first: int = 0) -> None:
    """Raises ValueError at the first position whose document start is impossible.

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


def _check_gate(log_gate: Tensor) -> None:
    _refuse(
        log_gate,
        ~(log_gate <= 0) | log_gate.isinf(),
        "log_gate",
        "finite and <= 0, the logarithm of a sigmoid (a closed gate is a large negative number)",
    )


def _check_reflections(w: Tensor, beta: Tensor) -> None:
    _refuse(beta, ~((beta >= 0) & (beta <= 2)), "beta", "in [0, 2]")
    size = w.to(beta.dtype).square().sum(-1)
    eigenvalue = 1 - beta * size
    _refuse(
        size,
        ~(eigenvalue.abs() <= LARGEST_EIGENVALUE),
        "|w|^2",
        f"such that |1 - beta |w|^2| <= {LARGEST_EIGENVALUE} (unit vectors, or shorter)",
    )


def _refuse(x: Tensor, wrong: Tensor, name: str, expected: str) -> None:
    """Raises ValueError at the first wrong value of x [B, T, heads]."""
    if wrong.any():
        b, i, head = wrong.nonzero()[0].tolist()
        value = x[b, i, head].item()
        raise ValueError(f"{name} must be {expected}, got {name}[{b}, {i}, {head}] = {value}")
