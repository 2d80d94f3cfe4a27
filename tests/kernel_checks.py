"""Helpers of the kernels' tests: error limits, awkward layouts, where they run."""

from functools import partial

import pytest
import torch

from path_backend import path_attention
from path_backend.reference import path_attention_reference
from path_backend.testing import as_leaves, make_inputs, relative_error, run

NAN_IN_ALL_MEMORY = [
    pytest.mark.usefixtures("uninitialized_memory_is_nan"),
    pytest.mark.filterwarnings("ignore:.*eterministic.*:UserWarning"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Largest error relative to fp64, in the 2-norm: out; dq, dk, dv; dw, dbeta, gates.
LIMITS = {
    torch.bfloat16: (3e-3, 6e-3, 1e-2),
    # One fp16 rounding of q, k and the weights; gradients in fp32 storage.
    torch.float16: (1e-3, 2e-3, 5e-3),
    # On the card products have three terms, of tf32 or bf16; in the interpreter they are fp32.
    torch.float32: (1e-3, 2e-3, 5e-3) if DEVICE == "cuda" else (1e-6, 2e-6, 5e-6),
}
COLUMN = {"out": 0, "dw": 2, "dbeta": 2, "dlog_gate": 2, "dgate_q": 2, "dgate_k": 2}


KINDS = {
    "path": dict(HQ=1, H=1),
    "path_fox": dict(gate=True, documents=True, H=1),
    "fox": dict(w=None, gate=True, documents=True),
    "nope": dict(w=None),
}
kernels = partial(path_attention, implementation="triton")
torch_form = partial(path_attention, implementation="torch")


def on_device(T, dtype=torch.float32, **case):
    return make_inputs(T, dtype=dtype, device=DEVICE, **case)


def gradient_of_out(inputs, factor=1.0):
    """d(out) in the inputs' dtype: the exact form must be given the same numbers."""
    shape = (*inputs.q.shape[:3], inputs.v.shape[3])
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(shape, generator=generator) * factor).to(inputs.q)


def check(
    inputs, reference=path_attention_reference, *, d_out=None, factor=1.0, slack=1, **options
):
    """The kernels equal the reference in fp64, output and every gradient, within LIMITS."""
    d_out = gradient_of_out(inputs, factor) if d_out is None else d_out
    exact = run(reference, as_leaves(inputs, torch.float64), d_out, **options)
    assert_within_limits(run(kernels, inputs, d_out, **options), exact, inputs.q.dtype, slack)


def assert_every_token_sees_itself(inputs):
    """The result of documents of one token: out is v, and only v has a gradient."""
    d_out = gradient_of_out(inputs)
    results = run(kernels, inputs, d_out)
    group = inputs.q.shape[2] // inputs.v.shape[2]
    expected = {
        "out": inputs.v.repeat_interleave(group, 2),
        "dv": d_out.double().unflatten(2, (-1, group)).sum(3),
    }
    for name, x in results.items():
        want = expected.get(name, torch.zeros_like(x)).to(x.dtype)
        assert torch.allclose(x, want, rtol=torch.finfo(x.dtype).eps, atol=1e-4), name


def assert_within_limits(actual, exact, dtype, slack=1):
    assert actual.keys() == exact.keys()
    errors = {name: relative_error(actual[name], want) for name, want in exact.items()}
    for name, error in errors.items():
        limit = LIMITS[dtype][COLUMN.get(name, 1)] * slack
        assert error <= limit, f"{name}: error {error:.1e}, limit {limit:.0e}; all: {errors}"


def assert_same_bits(actual, expected):
    for name, want in expected.items():
        assert torch.equal(actual[name], want), name


def surrounded(x, columns=3):
    """The numbers of x inside a tensor of NaN, on all sides; with 3 columns at odd addresses."""
    margins = (1, 70, 1, columns)[: x.ndim]
    wide = x.new_full([n + 2 * m for n, m in zip(x.shape, margins, strict=True)], float("nan"))
    inner = wide[tuple(slice(m, -m) for m in margins)]
    return inner.copy_(x)


LAYOUTS = {
    "surrounded by NaN": surrounded,
    "heads before tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "last dimension strided": lambda x: x.mT.contiguous().mT,
    "batch innermost": lambda x: x.permute(1, 2, *range(3, x.ndim), 0).contiguous().movedim(-1, 0),
}
