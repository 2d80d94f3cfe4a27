"""Context parallelism equals one device: output and every gradient, of every token.

The algorithm first with all ranks simulated in threads, then the public function on gloo groups.
"""

import pytest
import torch
from context_simulation import shard, simulate, unshard
from ranks import on_ranks

from path_backend import dyadic, path_attention
from path_backend.context_parallel import Layout, context_parallel_attention
from path_backend.testing import Inputs, assert_exact, make_inputs, run

EXACT = 1e-10
METHODS = ("allgather", "ring")
CASES = {
    "path": dict(DV=8),
    "path, beta in [1.9, 2]": dict(beta="high", w="constant"),
    "path_fox": dict(HQ=4, gate=True, documents=True, B=2),
    "fox": dict(w=None, HQ=4, gate=True),
    "nope": dict(w=None, documents=True),
}
LAYOUTS = {
    "1 rank": Layout.head_tail(1, 20),
    "2, contiguous": Layout.contiguous(2, 40),
    "2, head-tail": Layout.head_tail(2, 20),
    "4, contiguous": Layout.contiguous(4, 20),
    "4, head-tail": Layout.head_tail(4, 20),
    "8, contiguous": Layout.contiguous(8, 20),
    "8, head-tail": Layout.head_tail(8, 20),
    "2, in disorder": Layout(((60, 0, 100), (40, 80, 20)), 20),
}


def gradient_of_out(inputs):
    """d(out), the same on every rank."""
    shape = (*inputs.q.shape[:3], inputs.v.shape[3])
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(inputs.q.dtype)


def check(inputs, layout, method):
    d_out = gradient_of_out(inputs)
    assert_exact(simulate(inputs, d_out, layout, method), run(path_attention, inputs, d_out), EXACT)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_equals_one_device(monkeypatch, case, layout, method):
    """Catches a product, gate or gradient that is lost, doubled or misplaced between pieces."""
    monkeypatch.setattr(dyadic, "CHUNK", 8)
    layout = LAYOUTS[layout]
    check(make_inputs(layout.pieces * layout.length, **CASES[case]), layout, method)


def rank_main(group, inputs, d_out, layout, method):
    """The public function and its gradients on one rank."""
    rank = group.rank()
    local = Inputs(*(shard(x, layout, rank) for x in inputs)).leaves()
    options = dict(layout=layout, group=group, rotate_method=method)
    return run(context_parallel_attention, local, shard(d_out, layout, rank), **options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_process_groups_equal_one_device(ranks, method):
    """Catches what the simulation cannot show: the process group, the op, autograd."""
    layout = Layout.head_tail(ranks, 20)
    inputs = make_inputs(layout.pieces * 20, **CASES["path_fox"])
    d_out = gradient_of_out(inputs)
    expected = run(path_attention, inputs, d_out)
    parts = on_ranks(ranks, rank_main, inputs.map(torch.detach), d_out, layout, method)
    for part in parts:
        if isinstance(part, Exception):
            raise part
    whole = {name: unshard([part[name] for part in parts], layout) for name in parts[0]}
    assert_exact(whole, expected, EXACT)
