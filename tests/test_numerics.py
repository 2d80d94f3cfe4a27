"""Precision: error budgets per dtype, small gradients, long gates, and products that never grow."""

import pytest
import torch
import torch.nn.functional as F

from path_backend import path_attention
from path_backend.beta import BETA_MAX, beta_from_logits
from path_backend.eager.carry import carry
from path_backend.eager.chunk import chunk_transform
from path_backend.reference import path_attention_reference
from path_backend.testing import as_leaves, assert_within_budget, make_inputs, relative_error, run

CASES = {
    "random": dict(),
    "high beta": dict(beta="high", gate=True),
    "nearly constant w, beta 2": dict(w="constant", beta="two"),
    "documents": dict(gate=True, documents=True, HQ=4),
    "fox": dict(w=None, gate=True),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_stay_within_twice_those_of_plain_torch(dtype, case):
    """Catches a step in less than fp32: an unstable solve, a bf16 product, a rounded softmax."""
    inputs = make_inputs(300, D=32, dtype=dtype, **CASES[case])
    shape = (1, 300, inputs.q.shape[2], 32)
    d_out = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = run(path_attention_reference, as_leaves(inputs, torch.float64), d_out)
    plain = run(
        path_attention_reference, as_leaves(inputs, torch.float32), d_out, dtype=torch.float32
    )
    actual = run(path_attention, inputs, d_out)
    plain = {name: x.to(actual[name].dtype) for name, x in plain.items()}
    assert_within_budget(actual, exact, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_linear_in_the_gradient_of_the_output(dtype, case):
    """Catches an fp16 tensor or an epsilon in the backward: a mean loss makes d(out) about 1e-8.

    Powers of two scale every product and sum exactly, so not one bit may differ.
    """
    inputs = make_inputs(200, dtype=dtype, **CASES[case])
    d_out = torch.randn(1, 200, inputs.q.shape[2], 16).to(dtype)
    expected = run(path_attention, inputs, d_out)
    for exponent in (7, 14, 20, 27):
        actual = run(path_attention, inputs, d_out * 2**-exponent)
        for name in expected.keys() - {"out"}:
            assert torch.equal(actual[name], expected[name] * 2**-exponent), (name, exponent)


def test_gates_far_from_the_start_keep_their_differences():
    """Catches one fp32 cumulative sum: after -200,000 its steps are 0.016, and gates are lost.

    The length is no multiple of the chunk: differences in the last one must not span the padding.
    """
    inputs = make_inputs(4100, HQ=1, H=1, w=None, gate=True, dtype=torch.float32)
    with torch.no_grad():
        inputs.log_gate[:, :2048] = -100.0
    actual, exact = (run(path_attention, x) for x in (inputs, as_leaves(inputs, torch.float64)))
    for name, want in exact.items():
        assert relative_error(actual[name], want) < 1e-5, name


def test_gate_gradient_carries_only_the_rounding_of_pairs_across_the_gate():
    """Catches row sums of dS taken as zero: the error of a bf16 output in delta then adds up.

    The gates forget fast, so few pairs cross one. 2e-3 with the row sums, 0.17 without.
    """
    inputs = make_inputs(2048, HQ=1, H=1, w=None, gate=True, dtype=torch.bfloat16)
    inputs = inputs._replace(log_gate=(inputs.log_gate.detach() - 3).requires_grad_())
    d_out = torch.randn(1, 2048, 1, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = run(path_attention, as_leaves(inputs, torch.float64), d_out)
    actual = run(path_attention, inputs, d_out)
    assert relative_error(actual["dlog_gate"], exact["dlog_gate"]) < 5e-3


STEPS, WIDTH = 65_536, 32


# 2^-e of one value a little above 2^-2 (1 + 2^-8), halfway between two neighbours in bf16: every
# coordinate of the unit vector is rounded up by almost 2^-8.
EXPONENTS = [0] * 15 + [1] * 3 + [2] + [3] * 3 + [8] * 10


def adversarial_w(dtype):
    """Nearly constant w [1, STEPS, 1, WIDTH]: norm 1 in fp32, |w|^2 = 1.007 once in bf16."""
    noise = torch.randn(STEPS, WIDTH, generator=torch.Generator().manual_seed(0))
    w = 2.0 ** -torch.tensor(EXPONENTS) * (1 + 1e-4 * noise)
    return F.normalize(w, dim=-1).to(dtype)[None, :, None]


def chunked(w, beta, dtype):
    """Random rows for q and k, with w and beta, as 1,024 chunks of 64 in `dtype`."""
    x = torch.randn(1, STEPS // 64, 64, WIDTH, generator=torch.Generator().manual_seed(1))
    w, beta = (y.squeeze(2).unflatten(1, (-1, 64)).to(dtype) for y in (w, beta))
    return x.to(dtype), x.to(dtype), w, beta


def largest_growth(w, beta):
    """Largest norm, over its start, that q or k reaches anywhere in the fp32 sweep of all steps."""
    q, k, w, beta = chunked(w, beta, torch.float64)
    chunks = chunk_transform(q, k, w, beta)
    product, q_start, k_end = (x.float() for x in (chunks.product, chunks.q_start, chunks.k_end))
    q_start = q_start.flatten(1, 2).unsqueeze(2)
    start = q.float().flatten(1, 2).norm(dim=-1)
    growth = 0.0
    for level in carry(q_start, k_end.flatten(1, 2), product, 64):
        for tile, rows, keys in level.off_diagonals:
            for x, norm in ((rows.squeeze(3), tile.rows_of(start)), (keys, tile.keys_of(start))):
                growth = max(growth, (x.norm(dim=-1) / norm).nan_to_num(float("inf")).max().item())
    return growth


@pytest.mark.parametrize("beta_max", [BETA_MAX, 2.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_never_grow(dtype, beta_max):
    """Catches a clip against 1 instead of |w|^2, against w before rounding, or after the product.

    In fp64 every product is a contraction; the fp32 sweep may add its rounding, 1e-5 at the end.
    """
    w = adversarial_w(dtype)
    beta, clipped = beta_from_logits(torch.full(w.shape[:3], 50.0), w, beta_max)
    assert clipped.all()
    assert largest_growth(w, beta) < 1 + 1e-5

    _, _, w, beta = chunked(w, beta, torch.float64)
    products = chunk_transform(w, w, w, beta).product
    assert torch.linalg.matrix_norm(products, 2).max() <= 1 + 1e-12


@pytest.mark.parametrize("beta", [BETA_MAX, 2.0])
def test_bf16_diverges_without_the_clip(beta):
    """Catches an adversary too weak to need the clip: the test above would prove nothing."""
    w = adversarial_w(torch.bfloat16)
    assert largest_growth(w, torch.full(w.shape[:3], beta)) > 1e6


def test_clip_counts_and_leaves_the_others_alone():
    """Catches a clip share of the wrong betas, and an activation that is not 2 sigmoid."""
    logits = torch.tensor([-50.0, 0.0, 3.0, 6.0, 50.0])[None, :, None]
    w = F.normalize(torch.ones(1, 5, 1, 16), dim=-1)
    beta, clipped = beta_from_logits(logits, w)
    assert clipped.flatten().tolist() == [False, False, False, True, True]
    assert torch.equal(beta[~clipped], 2 * torch.sigmoid(logits[~clipped]))
    assert beta[clipped].tolist() == [BETA_MAX, BETA_MAX]
    assert BETA_MAX == torch.tensor(BETA_MAX).bfloat16().item() < 2


def test_beta_from_bf16_logits_is_fp32():
    """Catches a sigmoid in bf16, whose steps near 2 are 0.008."""
    logits = torch.linspace(-6, 4, 50).bfloat16()[None, :, None]
    beta, _ = beta_from_logits(logits, torch.zeros(1, 50, 1, 8, dtype=torch.bfloat16))
    assert beta.dtype == torch.float32
    assert torch.equal(beta, 2 * logits.float().sigmoid())


def test_gradient_of_the_clip():
    """Catches a gradient through a clipped logit, and none to w: the limit is 2 / |w|^2 there."""
    logits = torch.tensor([0.5, 50.0, 50.0], dtype=torch.float64)[None, :, None].requires_grad_()
    w = torch.tensor([[0.6, 0.8], [0.9, 0.9], [0.0, 0.0]], dtype=torch.float64)[None, :, None]
    w.requires_grad_()
    beta, _ = beta_from_logits(logits, w)
    d_logits, dw = torch.autograd.grad(beta.sum(), (logits, w))
    s = torch.sigmoid(logits[0, 0, 0])
    assert torch.allclose(d_logits.flatten(), torch.stack([2 * s * (1 - s), 0 * s, 0 * s]))
    expected = torch.tensor([[0.0, 0.0], [-2 * 2 * 0.9 / 1.62**2] * 2, [0.0, 0.0]]).double()
    assert torch.allclose(dw[0, :, 0], expected, rtol=1e-4)
