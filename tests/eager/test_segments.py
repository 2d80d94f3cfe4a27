"""The primitives of context parallelism against the definition, forward and gradients, in fp64."""

import pytest
import torch

from path_backend.arguments import CrossSegment, SegmentEnds
from path_backend.eager import attention, segments, softmax
from path_backend.reference import path_attention_reference
from path_backend.testing import assert_exact, make_inputs, relative_error

EXACT = 1e-10
SCALE = 0.3


@pytest.fixture(params=["usual tiles", "smallest tiles"])
def sizes(request, monkeypatch):
    """Small blocks must also cover the code of large ones: many chunks, heads in slices, tiles."""
    if request.param == "smallest tiles":
        monkeypatch.setattr(attention, "CHUNK", 8)
        monkeypatch.setattr(attention, "SLICE_ELEMENTS", 1)
        monkeypatch.setattr(softmax, "TILE_ELEMENTS", 50)


def frames_by_definition(q, k, w, beta):
    """q_start, k_end and product, one reflection after the other."""
    B, T, H, D = k.shape
    group = q.shape[2] // H
    eye = torch.eye(D, dtype=q.dtype).expand(B, H, D, D)
    if w is None:
        return q, k, None
    outer = w.unsqueeze(-1) * w.unsqueeze(-2)
    reflections = (eye.unsqueeze(1) - beta[..., None, None] * outer).unbind(1)
    q_start, k_end, prefix, suffix = [], [], eye, eye
    for i in range(T):
        prefix = prefix @ reflections[i]
        q_start.append((prefix.repeat_interleave(group, 1) @ q[:, i].unsqueeze(-1)).squeeze(-1))
    for j in reversed(range(T)):
        k_end.append((suffix.mT @ k[:, j].unsqueeze(-1)).squeeze(-1))
        suffix = reflections[j] @ suffix
    return torch.stack(q_start, 1), torch.stack(k_end[::-1], 1), prefix


def pair_by_definition(q, k, v, gate_q, gate_k, first_key, scale):
    """out and lse of the pair alone."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    logits = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if gate_q is not None:
        logits = logits + gate_q.unsqueeze(-1) + gate_k.unsqueeze(-2)
    if first_key is not None:
        hidden = torch.arange(k.shape[1]) < first_key.unsqueeze(-1)
        logits = logits.masked_fill(hidden.unsqueeze(1), float("-inf"))
    lse = logits.logsumexp(-1)
    p = (logits - lse.masked_fill(lse.isinf(), 0).unsqueeze(-1)).exp()
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


CASES = {
    "path": dict(),
    "path, beta in [1.9, 2]": dict(beta="high", B=2),
    "path, singular": dict(beta="one", HQ=4, DV=8),
    "path_fox": dict(HQ=4, DV=8, gate=True, documents=True, B=2),
    "fox": dict(w=None, HQ=4, gate=True, documents=True),
    "nope": dict(w=None),
}


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 130, 193, 320])
@pytest.mark.parametrize("case", CASES)
def test_segment_forward(case, T, sizes):
    """Catches a frame that is not the whole block's: products, moved keys at a short last chunk."""
    inputs = make_inputs(T, **CASES[case]).map_floating(torch.detach)
    inside = segments.segment_forward(inputs, SCALE)
    exact = inputs.call(path_attention_reference, scale=SCALE)
    q_start, k_end, product = frames_by_definition(*inputs[:2], *inputs[3:5])
    expected = {"out": exact, "q_start": q_start, "k_end": k_end, "product": product}
    actual = {"out": inside.out, **inside.ends._asdict()}
    if product is None:
        assert actual.pop("product") is expected.pop("product")
    assert_exact(actual, expected, EXACT)
    _, lse = torch.ops.path_backend.attention(*inputs, SCALE, "torch")
    assert_exact({"lse": inside.lse}, {"lse": lse}, EXACT)


@pytest.mark.parametrize("case", CASES)
def test_segment_ends_are_those_of_the_forward(case, sizes):
    """Catches a backward that meets other queries and keys than the forward did."""
    inputs = make_inputs(100, **CASES[case]).map_floating(torch.detach)
    ends = segments.segment_ends(inputs)
    for name, want in segments.segment_forward(inputs, SCALE).ends._asdict().items():
        actual = getattr(ends, name)
        assert actual is want is None or torch.equal(actual, want), name


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 130, 193])
@pytest.mark.parametrize("case", CASES)
def test_segment_backward(case, T, sizes):
    """Catches a gradient of a frame that is lost, doubled or mixed up on its way down the levels.

    The other blocks are a constant softmax weight that shrinks the rows' own probabilities.
    """
    inputs = make_inputs(T, **CASES[case])
    leaves = inputs.differentiable()
    generator = torch.Generator().manual_seed(1)

    def draw(like):
        return torch.randn(like.shape, dtype=torch.float64, generator=generator)

    out = inputs.call(path_attention_reference, scale=SCALE)
    frames = frames_by_definition(*inputs[:2], *inputs[3:5])
    d_frames = [None if x is None else draw(x) for x in frames]
    lse = segments.segment_forward(inputs.map_floating(torch.detach), SCALE).lse
    others, other_lse = draw(out), draw(lse)
    # softmax over own and other keys; the gradient of the shares flows through the logits.
    logit_lse = reference_lse(inputs)
    share = torch.sigmoid(logit_lse - other_lse).mT.unsqueeze(-1)
    merged = share * out + (1 - share) * others
    d_out = draw(out)
    total = (merged * d_out).sum()
    total = total + sum(
        (x * d).sum() for x, d in zip(frames, d_frames, strict=True) if d is not None
    )
    exact = torch.autograd.grad(
        total, list(leaves.values()), allow_unused=True, materialize_grads=True
    )

    final_lse = torch.logaddexp(lse, other_lse)
    plain, d_ends = inputs.map_floating(torch.detach), SegmentEnds(*d_frames)
    grads = segments.segment_backward(d_out, plain, merged.detach(), final_lse, SCALE, d_ends)
    actual = dict(zip(inputs._fields[:6], grads, strict=True))
    assert {name for name, grad in actual.items() if grad is not None} == leaves.keys()
    expected = dict(zip(leaves, exact, strict=True))
    assert_exact({name: actual[name] for name in expected}, expected, EXACT)


def reference_lse(inputs):
    """lse [B, HQ, T] of the definition, differentiable."""
    q, k, _, w, beta, log_gate, start = inputs
    T, group = q.shape[1], q.shape[2] // k.shape[2]
    columns, x = [], q[:, :0]
    k, w, beta = (None if y is None else y.repeat_interleave(group, 2) for y in (k, w, beta))
    for j in reversed(range(T)):
        x = torch.cat([q[:, j : j + 1], x], 1)
        columns.append(torch.nn.functional.pad((x * k[:, j : j + 1]).sum(-1), (0, 0, j, 0)))
        if w is not None:
            w_j = w[:, j : j + 1]
            x = x - beta[:, j : j + 1, :, None] * w_j * (w_j * x).sum(-1, keepdim=True)
    logits = torch.stack(columns[::-1], -1) * SCALE
    if log_gate is not None:
        G = log_gate.cumsum(1)
        logits = logits + G.unsqueeze(-1) - G.mT.unsqueeze(1)
    position = torch.arange(T)
    hidden = (position > position.unsqueeze(-1)).unsqueeze(0)
    if start is not None:
        hidden = hidden | (position < start.unsqueeze(-1))
    return logits.masked_fill(hidden.unsqueeze(2), float("-inf")).logsumexp(-1).mT


def make_pair(Tq, Tk, gate=True, documents=True, HQ=4, H=2, D=16, DV=8, B=2):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    gates = [draw(B, HQ, Tq), draw(B, HQ, Tk)] if gate else [None, None]
    first_key = torch.randint(0, 2 * Tk, (B, Tq), generator=generator) - Tk // 2
    first_key = first_key.clamp_min(0).int() if documents else None
    rest = (*gates, first_key)
    return draw(B, Tq, HQ, D), draw(B, Tk, H, D), draw(B, Tk, H, DV), *rest


PAIRS = [(1, 1), (1, 70), (70, 1), (63, 130), (130, 64)]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("shape", PAIRS)
def test_pair_forward_merges(shape, gate, documents, sizes):
    """Catches a merge that forgets what came before, and rows that see nothing turned into NaN."""
    first = [None if x is None else x.detach() for x in make_pair(*shape, gate, documents)]
    second = [None if x is None else x.flip(0) for x in first]
    q, _, v = first[:3]
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"))
    segments.cross_segment_forward(CrossSegment(*first), SCALE, out, lse)
    expected = pair_by_definition(*first, SCALE)
    assert torch.allclose(lse, expected[1], atol=EXACT)
    assert torch.allclose(out, expected[0], atol=EXACT)

    before = out.clone(), lse.clone()
    segments.cross_segment_forward(CrossSegment(*second), SCALE, out, lse)
    other, other_lse = pair_by_definition(*second, SCALE)
    total = torch.logaddexp(before[1], other_lse)
    assert torch.allclose(lse, total, atol=EXACT)
    seen = ~total.isinf()
    shares = [
        (x - total.masked_fill(~seen, 0)).exp().mT.unsqueeze(-1) for x in (before[1], other_lse)
    ]
    assert torch.allclose(out, shares[0] * before[0] + shares[1] * other, atol=EXACT)


def test_a_pair_that_nobody_sees_changes_no_bit():
    """Catches a rounding of rows whose document starts later: packed documents must not touch."""
    q, k, v, gate_q, gate_k, _ = (None if x is None else x.detach() for x in make_pair(20, 30))
    out, lse = q.new_ones(2, 20, 4, 8), q.new_zeros(2, 4, 20)
    hidden = torch.full((2, 20), 30, dtype=torch.int32)
    pair = CrossSegment(q, k, v, gate_q, gate_k, hidden)
    segments.cross_segment_forward(pair, SCALE, out, lse)
    assert (out == 1).all() and (lse == 0).all()


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("shape", PAIRS)
def test_pair_backward(shape, gate, documents, sizes):
    """Catches a gradient of the pair's own softmax where that of all keys is wanted."""
    pair = make_pair(*shape, gate, documents)
    out, lse = pair_by_definition(*pair, SCALE)
    generator = torch.Generator().manual_seed(1)
    others, d_out = (torch.randn(out.shape, dtype=out.dtype, generator=generator) for _ in range(2))
    other_lse = torch.randn(lse.shape, dtype=lse.dtype, generator=generator)
    share = torch.sigmoid(lse - other_lse).mT.unsqueeze(-1)
    merged = share * out + (1 - share) * others
    leaves = [x for x in pair[:5] if x is not None]
    exact = torch.autograd.grad((merged * d_out).sum(), leaves)

    inputs = [None if x is None else x.detach() for x in pair]
    delta = (d_out * merged.detach()).sum(-1).mT
    total = torch.logaddexp(lse.detach(), other_lse)
    grads = segments.cross_segment_backward(d_out, CrossSegment(*inputs), total, delta, SCALE)
    actual = [x for x in grads if x is not None]
    assert len(actual) == len(exact)
    for grad, want in zip(actual, exact, strict=True):
        assert torch.allclose(grad, want, atol=EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_precision_and_dtypes(dtype):
    """Catches bf16 sums: results are fp32, and moved queries and keys are rounded once."""
    inputs = make_inputs(200, HQ=4, gate=True, beta="high", dtype=dtype).map_floating(torch.detach)
    inside = segments.segment_forward(inputs, SCALE)
    exact = segments.segment_forward(inputs.map_floating(torch.Tensor.double), SCALE)
    actual, expected = ({"out": x.out, "lse": x.lse, **x.ends._asdict()} for x in (inside, exact))
    assert {actual[name].dtype for name in ("out", "lse", "product")} == {torch.float32}
    assert actual["q_start"].dtype == actual["k_end"].dtype == dtype
    for name, want in expected.items():
        limit = torch.finfo(actual[name].dtype).eps + 1e-6
        assert relative_error(actual[name], want) < limit, name


def test_scale_zero_is_a_scale():
    """Catches frames found by dividing by the scale."""
    inputs = make_inputs(70).map_floating(torch.detach)
    actual, expected = (segments.segment_forward(inputs, scale).ends for scale in (0.0, 1.0))
    assert torch.equal(actual.q_start, expected.q_start)
