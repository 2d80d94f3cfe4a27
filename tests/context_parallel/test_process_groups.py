"""Context parallelism on gloo groups of up to 8 processes, and what happens when ranks disagree."""

import time

import pytest
import torch
from context_simulation import gradient_of_out, shard, unshard
from kernel_checks import assert_within_limits
from ranks import on_ranks

from path_backend import path_attention
from path_backend.arguments import Inputs
from path_backend.attention import context_parallel_attention
from path_backend.context_parallel.layout import Layout
from path_backend.testing import as_leaves, assert_exact, make_inputs, run

EXACT = 1e-10
CASES = {
    "path": dict(DV=8, beta="high"),
    "path_fox": dict(gate=True, documents=True, B=2),
    "fox": dict(w=None, gate=True),
    "nope": dict(w=None, documents=True),
    "bf16": dict(gate=True, dtype=torch.bfloat16),
}


def attend(group, inputs, layout, method):
    """The public function and its gradients, of one rank's tokens."""
    rank = group.rank()
    local = as_leaves(Inputs(*(shard(x, layout, rank) for x in inputs)))
    options = dict(layout=layout, group=group, exchange=method)
    d_out = shard(gradient_of_out(inputs), layout, rank)
    return run(context_parallel_attention, local, d_out, **options)


def attend_to_all(group, cases, layouts):
    return {
        (case, i, method): attend(group, inputs, layout, method)
        for case, inputs in cases.items()
        for i, layout in enumerate(layouts)
        for method in ("allgather", "ring", "heads")
    }


LAYOUTS = {
    2: [Layout.head_tail(2, 70), Layout.contiguous(2, 140)],
    4: [Layout.head_tail(4, 35), Layout.contiguous(4, 70)],
    8: [Layout.head_tail(8, 20)],
}


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_equals_one_device(ranks):
    """Catches what the simulation cannot show: the process group, the op, autograd."""
    layouts = LAYOUTS[ranks]
    T = layouts[0].segments * layouts[0].length
    heads = dict(H=ranks, HQ=2 * ranks)  # each rank has its own, by "heads"
    cases = {case: make_inputs(T, **(CASES[case] | heads)) for case in CASES}
    detached = {case: inputs.map_floating(torch.detach) for case, inputs in cases.items()}
    parts = on_ranks(ranks, attend_to_all, detached, layouts)
    for part in parts:
        if isinstance(part, Exception):
            raise part
    for key in parts[0]:
        inputs, layout = cases[key[0]], layouts[key[1]]
        exact = as_leaves(inputs, torch.float64)
        expected = run(path_attention, exact, gradient_of_out(inputs))
        actual = {
            name: unshard([part[key][name] for part in parts], layout) for name in parts[0][key]
        }
        if inputs.q.dtype == torch.float64:
            assert_exact(actual, expected, EXACT)
        else:
            assert_within_limits(actual, expected, inputs.q.dtype)


def attend_on_gpu(group, inputs, layout, method, implementation):
    """As attend, on this rank's GPU; every result also twice, to see whether its bits are."""
    rank = group.rank()
    local = Inputs(*(None if x is None else shard(x, layout, rank).cuda() for x in inputs))
    d_out = shard(gradient_of_out(inputs), layout, rank).cuda()
    options = dict(layout=layout, group=group, exchange=method, implementation=implementation)
    first, second = (
        run(context_parallel_attention, as_leaves(local), d_out, **options) for _ in range(2)
    )
    same = all(torch.equal(x, second[name]) for name, x in first.items())
    return {name: x.cpu() for name, x in first.items()}, same


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("method", ["allgather", "ring", "heads"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", ["path", "path_fox", "fox"])
def test_gpus_equal_one_device(case, dtype, method, ranks):
    """Catches a kernel that reads what NCCL has not delivered yet, strides, sums without order."""
    layout = Layout.head_tail(ranks, 1000 // ranks)
    heads = dict(HQ=16, H=8, D=64, DV=64, dtype=dtype)
    inputs = make_inputs(2000, **(CASES[case] | heads))
    device = as_leaves(as_leaves(inputs, torch.float64).map_floating(torch.Tensor.cuda))
    if device.document_start is not None:
        device = device._replace(document_start=device.document_start.cuda())
    expected = run(path_attention, device, gradient_of_out(inputs).cuda(), implementation="torch")
    implementation = "torch" if dtype == torch.float64 else "triton"
    arguments = (inputs.map_floating(torch.detach), layout, method, implementation)
    parts = on_ranks(ranks, attend_on_gpu, *arguments, backend="nccl")
    for part in parts:
        if isinstance(part, Exception):
            raise part
    assert all(same for _, same in parts)
    actual = {name: unshard([part[name] for part, _ in parts], layout) for name in expected}
    expected = {name: x.cpu() for name, x in expected.items()}
    if dtype == torch.float64:
        assert_exact(actual, expected, EXACT)
    else:
        assert_within_limits(actual, expected, dtype)


def compile_and_attend(group, inputs, layout):
    compiled = torch.compile(context_parallel_attention, fullgraph=True, backend="aot_eager")
    local = as_leaves(Inputs(*(shard(x, layout, group.rank()) for x in inputs)))
    options = dict(layout=layout, group=group)
    return run(compiled, local, **options), run(context_parallel_attention, local, **options)


def test_compiles_on_two_ranks():
    """Catches a graph that holds the rank or the group of the first."""
    layout = Layout.head_tail(2, 20)
    inputs = make_inputs(80, gate=True, documents=True).map_floating(torch.detach)
    for outcome in on_ranks(2, compile_and_attend, inputs, layout):
        assert_exact(*outcome, EXACT)


def attend_differently(group, changes):
    """A good call, and one in which rank 1 differs."""
    layout = Layout.head_tail(2, 20)
    inputs = make_inputs(40, gate=True, documents=True, dtype=torch.float32)
    arguments = dict(layout=layout, group=group, exchange="ring")
    inputs.call(context_parallel_attention, **arguments)
    if group.rank() == 1:
        if "length" in changes:
            inputs = make_inputs(changes.pop("length"), gate=True, documents=True)
            inputs = as_leaves(inputs, torch.float32)
        if "without" in changes:
            inputs = inputs._replace(**{changes.pop("without"): None})
        arguments |= changes
    inputs.call(context_parallel_attention, **arguments)


DISAGREEMENTS = [
    (dict(length=39), "and rank 1 has q [1, 39, 2, 16]"),
    (dict(length=39, layout=Layout.contiguous(2, 39)), "2 segments of 39 tokens at"),
    (dict(layout=Layout(((20, 40), (0, 60)), 20)), "4 segments of 20 tokens at"),
    (dict(without="log_gate"), "given q k v w beta document_start;"),
    (dict(exchange="allgather"), "allgather, scale 0.25"),
    (dict(scale=0.3), "ring, scale 0.3"),
]


@pytest.mark.parametrize("changes, message", DISAGREEMENTS)
def test_ranks_that_disagree(changes, message):
    """Catches a hang, a wrong result, or an error on one rank only."""
    for outcome in on_ranks(2, attend_differently, changes):
        assert isinstance(outcome, ValueError), outcome
        assert "all ranks must make the same call, but rank 0 has q [1, 40, 2, 16]" in str(outcome)
        assert message in str(outcome)


def attend_with_other_tokens(group):
    inputs = make_inputs(40, dtype=torch.float32)
    inputs.call(context_parallel_attention, layout=Layout.head_tail(2, 21), group=group)


def test_tensors_that_do_not_match_the_layout():
    """Catches segments cut at the wrong tokens."""
    for outcome in on_ranks(2, attend_with_other_tokens):
        assert isinstance(outcome, ValueError), outcome
        assert "q must have the 42 tokens that the layout gives each rank, got 40" in str(outcome)


def attend_with_one_head(group):
    inputs = make_inputs(40, H=1, HQ=2)
    layout = Layout.head_tail(2, 20)
    inputs.call(context_parallel_attention, layout=layout, group=group, exchange="heads")


def test_heads_that_the_ranks_do_not_divide():
    """Catches heads that some rank lacks."""
    for outcome in on_ranks(2, attend_with_one_head):
        assert isinstance(outcome, ValueError), outcome
        assert "got H = 1 and 2 ranks" in str(outcome)


def attend_unless_failed(group, where, method):
    """Rank 1 fails before its call or inside it, or stays away. Rank 0: seconds until it fails."""
    layout = Layout.head_tail(2, 20)
    inputs = make_inputs(40, documents=True)
    if group.rank() == 1:
        if where == "before":
            raise ZeroDivisionError
        if where == "absent":
            time.sleep(10)
            return None
        if where == "inside":
            inputs = inputs._replace(document_start=inputs.document_start - 1)
    begin = time.monotonic()
    try:
        return inputs.call(context_parallel_attention, layout=layout, group=group, exchange=method)
    except RuntimeError:
        return time.monotonic() - begin


@pytest.mark.parametrize("method", ["allgather", "ring", "heads"])
@pytest.mark.parametrize(
    "where, kind", [("before", ZeroDivisionError), ("inside", ValueError), ("absent", type(None))]
)
def test_a_rank_that_fails_fails_the_others(where, kind, method):
    """Catches ranks that wait for ever for one that is gone."""
    seconds, outcome = on_ranks(2, attend_unless_failed, where, method, timeout=3)
    assert isinstance(outcome, kind), outcome
    assert seconds < 8
