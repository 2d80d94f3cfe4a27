"""The ops of context parallelism as the dispatcher, the compiler and checkpointing see them."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from op_checks import (
    CASES,
    assert_saves_only_inputs_output_and_lse,
    opcheck_backward,
    opcheck_forward,
    runs_under_selective_checkpointing,
)

from path_backend import path_attention
from path_backend.attention import context_parallel_attention
from path_backend.context_parallel import by_tokens
from path_backend.context_parallel.layout import Layout
from path_backend.testing import assert_exact, make_inputs, run

LAYOUT = Layout.head_tail(1, 35)


@pytest.fixture(scope="module")
def group():
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def options(group, method):
    return ([0, 35], 35, group.group_name, method, 0.25, "torch")


@pytest.mark.parametrize("method", ["allgather", "ring", "heads"])
@pytest.mark.parametrize("case", CASES)
def test_opcheck_forward(group, case, method):
    """Catches a wrong schema, a fake that lies about its outputs, a missing gradient."""
    inputs = make_inputs(70, **CASES[case])
    opcheck_forward("context_parallel_attention", inputs, *options(group, method))


@pytest.mark.parametrize("method", ["allgather", "ring", "heads"])
@pytest.mark.parametrize("case", CASES)
def test_opcheck_backward(group, case, method):
    """Catches the same in the backward op, and gradients that alias one another or an input."""
    inputs = make_inputs(70, **CASES[case])
    opcheck_backward("context_parallel_attention", inputs, *options(group, method))


@pytest.mark.parametrize("case", CASES)
def test_one_rank_equals_one_device(group, case):
    """Catches outputs and gradients of another dtype, and an op that loses an argument."""
    inputs = make_inputs(70, **CASES[case])
    actual = run(partial(context_parallel_attention, layout=LAYOUT, group=group), inputs, scale=0.3)
    expected = run(path_attention, inputs, scale=0.3)
    for name, want in expected.items():
        assert actual[name].dtype == want.dtype and actual[name].is_contiguous(), name
    assert_exact(actual, expected, 1e-12 if case != "bf16" else 2e-2)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_compiles_into_one_graph(group, case, dynamic):
    """Catches a graph break at the layout, the group or the checks."""
    torch._dynamo.reset()
    call = partial(context_parallel_attention, layout=LAYOUT, group=group)
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    inputs = make_inputs(70, **CASES[case])
    assert_exact(run(compiled, inputs), run(call, inputs), 1e-12)


@pytest.mark.parametrize("saved, expected", [(True, 1), (False, 2)])
def test_selective_checkpointing_keeps_the_output(group, monkeypatch, saved, expected):
    """Catches an op that a policy cannot name: attention would run twice per step."""
    call = partial(context_parallel_attention, layout=LAYOUT, group=group)
    op = "context_parallel_attention"
    arguments = (by_tokens, "forward", op, call, make_inputs(70), saved)
    assert runs_under_selective_checkpointing(monkeypatch, *arguments) == expected


def test_saves_only_inputs_output_and_lse(group):
    """Catches keys of other ranks, or frames, kept alive between forward and backward."""
    inputs = make_inputs(70, gate=True, documents=True)
    call = partial(context_parallel_attention, layout=LAYOUT, group=group)
    assert_saves_only_inputs_output_and_lse(call, inputs)


def test_autocast_leaves_the_transform_in_fp32(group):
    """Catches an fp32 sweep that autocast turns into bf16, a hundred times less exact."""
    inputs = make_inputs(70, dtype=torch.float32)
    call = partial(context_parallel_attention, layout=LAYOUT, group=group)
    expected = run(call, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        results = run(call, inputs)
    for name, want in expected.items():
        assert torch.equal(results[name], want), name


def test_there_is_no_second_derivative(group):
    """Catches a second derivative of zero."""
    inputs = make_inputs(70)
    out = inputs.call(context_parallel_attention, layout=LAYOUT, group=group)
    (dq,) = torch.autograd.grad(out.sum(), inputs.q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()


ERRORS = [
    (
        dict(exchange="alltoall"),
        "exchange must be one of ('allgather', 'ring', 'heads'), got 'alltoall'",
    ),
    (dict(layout=Layout.contiguous(2, 35)), "the layout is for 2 ranks, the group has 1"),
    (
        dict(layout=Layout.contiguous(1, 35)),
        "q must have the 35 tokens that the layout gives each rank, got 70",
    ),
    (dict(gate_scale=2.0), "gate_scale needs a log_gate"),
]


@pytest.mark.parametrize("changes, message", ERRORS)
def test_errors(group, changes, message):
    """Catches a call that does not fit its layout and attends to something."""
    arguments = dict(layout=LAYOUT, group=group) | changes
    with pytest.raises(ValueError, match=re.escape(message)):
        make_inputs(70).call(context_parallel_attention, **arguments)
