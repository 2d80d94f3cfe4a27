"""The kernels of a decode step against the training forward; in the interpreter without a GPU."""

import pytest
import torch
from cache_checks import KINDS, append, appended, assert_equal, cache_for, inputs_of, tokens, whole

from path_backend.inference import RollbackError

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# On the card the prefill's products have terms of 16 bits; the decode itself is fp32.
LIMIT = 1e-5 if DEVICE == "cpu" else 1e-3


def by_kernels(T, *, group=4, **case):
    """Inputs in fp32, and a cache that kernels decode from."""
    options = {n: case.pop(n) for n in ("capacity", "rollback_window") if n in case}
    inputs = inputs_of(T, dtype=torch.float32, device=DEVICE, **case)
    return inputs, cache_for(inputs, group=group, implementation="triton", **options)


def check(out, inputs, start=0):
    exact = whole(inputs)[:, start : start + out.shape[1]]
    error = (out.double() - exact).abs().amax((0, 2, 3))
    assert error.max() <= LIMIT, f"token {start + int(error.argmax())}: error {error.max():.2e}"


@pytest.mark.parametrize("kind", KINDS)
def test_token_by_token(kind):
    """Closings and merges by kernels: 10 groups, and blocks of all sizes up to 8 of them."""
    inputs, cache = by_kernels(42, B=2, documents=True, **KINDS[kind])
    check(appended(cache, inputs, [1] * 42), inputs)
    assert cache.tensors["position"].tolist() == [42, 10] == [cache.tokens, cache.closed]
