"""The dyadic form against the definition, and against attentions that others defined."""

import random
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from path_backend import ops, path_attention
from path_backend.eager import attention, softmax
from path_backend.reference import path_attention_reference
from path_backend.testing import BETAS, as_leaves, assert_exact, make_inputs, run

# fp64, up to 300 steps: rounding is near 1e-14.
EXACT = 1e-10


def check(inputs, **options):
    """path_attention equals the definition, output and every gradient."""
    assert_exact(
        run(path_attention, inputs, **options),
        run(path_attention_reference, inputs, **options),
        EXACT,
    )


def random_case(seed):
    draw = random.Random(seed)
    H, group = draw.choice([(1, 1), (1, 3), (2, 1), (2, 2)])
    return make_inputs(
        draw.randint(1, 300),
        B=draw.choice([1, 2]),
        HQ=H * group,
        H=H,
        D=draw.choice([1, 5, 8, 16, 24]),
        DV=draw.choice([1, 7, 16]),
        w=draw.choice(["random", "random", "constant", None]),
        beta=draw.choice(sorted(BETAS)),
        gate=draw.random() < 0.5,
        documents=draw.random() < 0.5,
        strided=draw.random() < 0.5,
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_definition_on_random_cases(seed):
    """Catches a wrong formula in any corner: lengths, widths, groups, gates, documents, strides."""
    check(random_case(seed))


@pytest.mark.parametrize("beta", sorted(BETAS))
@pytest.mark.parametrize("T", [1, 63, 64, 65, 130, 193, 300])
def test_equals_the_definition_around_chunk_borders(T, beta):
    """Catches an off-by-one at a chunk, a short last block, a division by a singular product."""
    check(make_inputs(T, beta=beta, HQ=4, DV=8, gate=True, documents=True))


def test_equals_the_definition_for_every_shape_of_the_tree(monkeypatch):
    """Catches a lost product or square where the tree of blocks is cut off, at any level."""
    monkeypatch.setattr(attention, "CHUNK", 4)
    for T in range(1, 72):
        check(make_inputs(T, D=4, beta="high", gate=T % 2 == 0))


@pytest.mark.parametrize("w", ["random", None])
@pytest.mark.parametrize("documents", [False, True])
def test_equals_the_definition_in_the_smallest_tiles(monkeypatch, w, documents):
    """Catches a wrong slice of rows, blocks or heads: large problems split, small ones do not."""
    monkeypatch.setattr(attention, "CHUNK", 8)
    monkeypatch.setattr(attention, "SLICE_ELEMENTS", 1)
    monkeypatch.setattr(softmax, "TILE_ELEMENTS", 50)
    check(make_inputs(75, B=2, HQ=4, D=8, w=w, gate=True, documents=documents))


def test_the_oracle_multiplies_the_reflections_in_order():
    """Catches an oracle with the products reversed, or shifted by one token."""
    inputs = make_inputs(6, HQ=1, H=1, D=4, DV=3, gate=True)
    q, k, v, w, beta, log_gate = (x[0, :, 0].detach() for x in inputs[:6])
    expected = []
    for i in range(6):
        logits = []
        for j in range(i + 1):
            product = torch.eye(4, dtype=q.dtype)
            for s in range(j + 1, i + 1):
                product = product @ (
                    torch.eye(4, dtype=q.dtype) - beta[s] * torch.outer(w[s], w[s])
                )
            logits.append(0.3 * k[j] @ product @ q[i] + 0.7 * log_gate[j + 1 : i + 1].sum())
        expected.append(torch.stack(logits).softmax(0) @ v[: i + 1])
    out = inputs.call(path_attention_reference, scale=0.3, gate_scale=0.7)
    assert torch.allclose(out[0, :, 0], torch.stack(expected), atol=1e-14)


def test_scale_and_gate_scale():
    """Catches a gate that is multiplied by the scale, and options that are dropped."""
    check(make_inputs(100, gate=True), scale=0.3, gate_scale=0.7)


def test_gates_above_one(monkeypatch):
    """Catches padded rows that take part: their logits overflow here, and 0 * inf is NaN."""
    monkeypatch.setattr(ops, "check_values", lambda *inputs: None)
    inputs = make_inputs(70, gate=True)
    check(inputs._replace(log_gate=(inputs.log_gate.detach() + 20).requires_grad_()))


def sdpa(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("w", ["random", None])
def test_without_reflections_it_is_causal_attention(w):
    """Catches an oracle and a form that share a mistake: scale, mask or grouping of heads."""
    inputs = make_inputs(150, B=2, HQ=4, DV=8, w=w, beta="zero")
    out = inputs.call(path_attention)
    assert torch.allclose(out, sdpa(*inputs[:3]), atol=1e-12)


def test_fox_is_the_forgetting_transformer():
    """Catches a gate that includes the key's own, or forgets between chunks.

    Independent of cumulative sums: the bias of (i, j) is the sum of the gates in between.
    """
    T = 140
    inputs = make_inputs(T, w=None, gate=True)
    q, k, v, _, _, log_gate, _ = inputs
    rows = []
    for i in range(T):
        bias = torch.stack([log_gate[:, j + 1 : i + 1].sum(1) for j in range(i + 1)], -1)
        logits = torch.einsum("bhd,bjhd->bhj", q[:, i], k[:, : i + 1]) / 4 + bias
        rows.append(torch.einsum("bhj,bjhd->bhd", logits.softmax(-1), v[:, : i + 1]))
    out = inputs.call(path_attention)
    assert torch.allclose(out, torch.stack(rows, 1), atol=1e-12)


def test_packed_documents_equal_separate_calls():
    """Catches reflections or gates that leak across a document's border."""
    T, cuts = 200, (0, 30, 31, 150, 200)
    inputs = make_inputs(T, HQ=4, gate=True)
    start = torch.zeros(1, T, dtype=torch.int32)
    parts = []
    for begin, end in zip(cuts, cuts[1:], strict=False):
        start[:, begin:end] = begin
        parts.append(inputs.map_floating(lambda x, a=begin, b=end: x[:, a:b]).call(path_attention))
    packed = inputs._replace(document_start=start).call(path_attention)
    assert torch.allclose(packed, torch.cat(parts, 1), atol=1e-12)


@pytest.mark.parametrize("closed", [-400.0, -1e9, -1e30])
def test_a_closed_gate(closed):
    """Catches sums that hold the log of a closed gate: digits are lost, of tokens before it too."""
    inputs = make_inputs(200, gate=True, dtype=torch.float32)
    before = path_attention(*inputs[:6])[:, :70].clone()
    inputs.log_gate.data[:, 70] = -1e4
    exact = run(path_attention_reference, as_leaves(inputs, torch.float64))
    inputs.log_gate.data[:, 70] = closed
    found = run(path_attention, inputs)
    assert torch.equal(found["out"][:, :70], before)
    assert_exact(found, exact, 1e-5)


def test_empty_tiles_of_documents_are_skipped(monkeypatch):
    """Catches a mask that costs the whole triangle: here only the chunks' own tiles remain."""
    seen = []
    add = softmax.OnlineSoftmax.add
    monkeypatch.setattr(
        softmax.OnlineSoftmax, "add", lambda *args: (seen.append(args[3]), add(*args))[1]
    )
    inputs = make_inputs(512)
    start = (torch.arange(512, dtype=torch.int32) // 64 * 64)[None]
    inputs._replace(document_start=start).call(path_attention)
    assert [tile.causal for tile in seen] == [True]


MEMORY = """
import resource, torch
from path_backend import path_attention
from path_backend.testing import make_inputs
inputs = make_inputs({T}, HQ=4, H=4, D=64, gate=True, dtype=torch.float32)
make_inputs(64, dtype=torch.float32).call(path_attention).sum().backward()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
inputs.call(path_attention).sum().backward()
print((peak() - before) / 2**20)
"""


def test_memory_has_no_square_of_the_length():
    """Catches one T x T tensor in the forward or the backward: 1 GiB for these four heads."""
    script = [sys.executable, "-c", MEMORY.format(T=8192)]
    done = subprocess.run(script, capture_output=True, text=True, check=True, timeout=300)
    assert float(done.stdout) < 1.0, f"peak grew by {done.stdout.strip()} GiB"
