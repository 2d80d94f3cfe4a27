"""What the tests of the kernels share: error limits, awkward layouts, where they run."""

import pytest
import torch

from path_backend.testing import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)

# Largest error relative to fp64, in the 2-norm: out; dq, dk, dv; dw, dbeta, gates.
LIMITS = {
    torch.bfloat16: (3e-3, 6e-3, 1e-2),
    # One fp16 rounding of q, k and the weights; gradients in fp32 storage and tf32 products.
    torch.float16: (1e-3, 2e-3, 5e-3),
    # On the card products are tf32, and bf16 in three terms; in the interpreter they are fp32.
    torch.float32: (1e-3, 2e-3, 5e-3) if DEVICE == "cuda" else (1e-6, 2e-6, 5e-6),
}
COLUMN = {"out": 0, "dw": 2, "dbeta": 2, "dlog_gate": 2, "dgate_q": 2, "dgate_k": 2}


def assert_within_limits(actual, exact, dtype, slack=1):
    assert actual.keys() == exact.keys()
    errors = {name: relative_error(actual[name], want) for name, want in exact.items()}
    for name, error in errors.items():
        limit = LIMITS[dtype][COLUMN.get(name, 1)] * slack
        assert error <= limit, f"{name}: error {error:.1e}, limit {limit:.0e}; all: {errors}"


def assert_same_bits(actual, expected):
    for name, want in expected.items():
        assert torch.equal(actual[name], want), name


def surrounded(x):
    """The numbers of x inside a tensor of NaN, on all sides."""
    margins = (1, 70, 1, 8)[: x.ndim]
    wide = x.new_full([n + 2 * m for n, m in zip(x.shape, margins, strict=True)], float("nan"))
    inner = wide[tuple(slice(m, -m) for m in margins)]
    return inner.copy_(x)


LAYOUTS = {
    "surrounded by NaN": surrounded,
    "heads before tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "last dimension strided": lambda x: x.mT.contiguous().mT,
    "batch innermost": lambda x: x.permute(1, 2, *range(3, x.ndim), 0).contiguous().movedim(-1, 0),
}
