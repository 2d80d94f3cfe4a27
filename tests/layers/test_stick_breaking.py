"""Stick-breaking attention against its definition, token by token."""

import pytest
import torch

from path_backend.layers.baselines import stick_breaking_attention


def by_definition(q, k, v, scale, document_start=None):
    """Walk from every query back to the start of its document, breaking the stick at each key."""
    B, T, HQ, _ = q.shape
    group = HQ // k.shape[2]
    out = torch.zeros(B, T, HQ, v.shape[3], dtype=torch.float64)
    for b in range(B):
        for i in range(T):
            first = 0 if document_start is None else int(document_start[b, i])
            for head in range(HQ):
                stick = 1.0
                for j in range(i - 1, first - 1, -1):
                    share = torch.sigmoid(scale * q[b, i, head] @ k[b, j, head // group]).item()
                    out[b, i, head] += stick * share * v[b, j, head // group]
                    stick *= 1 - share
    return out


def inputs(B=2, T=9, HQ=4, H=2, D=5, DV=3, dtype=torch.float64, spread=1.0):
    torch.manual_seed(0)
    q = spread * torch.randn(B, T, HQ, D, dtype=torch.float64)
    k, v = torch.randn(B, T, H, D), torch.randn(B, T, H, DV)
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("T", [1, 2, 9])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_definition(T, scale):
    """The diagonal counted, the product over the wrong keys, or heads paired in another order."""
    q, k, v = inputs(T=T)
    out = stick_breaking_attention(q, k, v, scale=scale)
    torch.testing.assert_close(out, by_definition(q, k, v, scale or 5**-0.5))
    assert out[:, 0].eq(0).all()


def test_documents():
    """A stick that goes on into the document before."""
    q, k, v = inputs()
    starts = torch.tensor([[0, 0, 0, 3, 3, 3, 6, 7, 7], [0, 1, 1, 1, 1, 5, 5, 5, 5]]).int()
    out = stick_breaking_attention(q, k, v, document_start=starts)
    torch.testing.assert_close(out, by_definition(q, k, v, 5**-0.5, starts))


@pytest.mark.parametrize("spread", [1.0, 100.0])
def test_fp32_is_exact_to_rounding(spread):
    """Logarithms of shares that reach 0 or 1, or differences of long sums, losing the weights."""
    q, k, v = inputs(B=1, T=300, HQ=1, H=1, dtype=torch.float32, spread=spread)
    exact = stick_breaking_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(
        stick_breaking_attention(q, k, v).double(), exact, rtol=1e-3, atol=1e-5 * spread
    )


def test_bf16_and_autocast_keep_fp32_logits():
    """Logits rounded to bf16 by the inputs' dtype or by autocast."""
    q, k, v = inputs(T=64, dtype=torch.bfloat16)
    exact = stick_breaking_attention(*(x.double() for x in (q, k, v)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = stick_breaking_attention(q, k, v)
    assert out.dtype == torch.bfloat16
    assert (out - exact).norm() < 5e-3 * exact.norm()


def test_gradients():
    """A gradient that stops at a mask, or a nan from what is hidden."""
    tensors = [x.requires_grad_() for x in inputs(B=1, T=5, D=2, DV=2)]
    starts = torch.tensor([[0, 0, 0, 3, 3]]).int()
    assert torch.autograd.gradcheck(
        lambda q, k, v: stick_breaking_attention(q, k, v, document_start=starts), tensors
    )


def test_refuses_head_counts():
    """Query heads that no key/value head belongs to."""
    q, k, v = inputs(HQ=3)
    with pytest.raises(ValueError, match="must divide those of q, got HQ = 3 and H = 2"):
        stick_breaking_attention(q, k, v)
