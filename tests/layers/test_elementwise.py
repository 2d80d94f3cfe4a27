"""What PathInputs computes besides projections: compiled as op by op, and only where that works."""

import shutil
from functools import partial
from itertools import product

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from path_backend.layers import elementwise
from path_backend.layers.projections import PathInputs

STARTS = torch.tensor([[0] * 9, [0] * 4 + [4] * 5], dtype=torch.int32)
MODES = {
    "path": dict(reflections=True, forget_gate=False),
    "path_fox": dict(reflections=True, forget_gate=True),
}


def make_inputs(mode="path_fox", **options):
    torch.manual_seed(0)
    inputs = PathInputs(24, 4, 2, 6, w_rank=5, **MODES[mode], **options)
    inputs.init_weights()
    with torch.no_grad():  # larger than 0.02, so that every part matters
        for parameter in inputs.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return inputs


def features(length=9, batch=2):
    return torch.randn(batch, length, 24, generator=torch.Generator().manual_seed(1))


def outputs_and_gradients(inputs, call=None, starts=None, x=None):
    x = (features() if x is None else x).requires_grad_()
    call = inputs if call is None else call
    outputs = [y for y in call(x, starts, torch.float32) if y is not None]
    wanted = [x, *inputs.parameters()]
    loss = sum(y.square().mul(torch.arange(1, 1 + y.shape[-1])).sum() for y in outputs)
    return [*outputs, *torch.autograd.grad(loss, wanted)]


@pytest.fixture
def graphs(monkeypatch):
    """Compiling on this device too; a list that grows by each graph that was compiled."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

    compiled = torch.compile(elementwise.compute, backend=backend)
    monkeypatch.setattr(elementwise, "_compiled", lambda: compiled)
    monkeypatch.setattr(elementwise, "_pays", lambda features: features is not None)
    yield graphs
    torch._dynamo.reset()


@pytest.mark.parametrize("starts", [None, STARTS], ids=["whole", "documents"])
@pytest.mark.parametrize("watch", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_compiled_as_op_by_op(mode, watch, starts, graphs, monkeypatch):
    """Catches a graph break, an argument baked into the graph, statistics that a graph drops."""
    inputs = make_inputs(mode, watch=watch)
    actual = outputs_and_gradients(inputs, starts=starts)
    assert len(graphs) == 1
    stats = inputs.stats.clone() if watch else None
    monkeypatch.undo()
    expected = outputs_and_gradients(inputs, starts=starts)
    torch.testing.assert_close(actual, expected)
    if watch:
        torch.testing.assert_close(stats, inputs.stats)


def test_layers_and_lengths_share_their_graphs(graphs):
    """Catches a compilation for each layer or length, until the limit leaves all op by op."""
    first, second = make_inputs(), make_inputs()
    for length in (9, 9, 12, 40, 70, 33):
        for inputs in (first, second):
            outputs_and_gradients(inputs, x=features(length))
    assert len(graphs) == 2


@pytest.mark.parametrize("selective", [False, True])
def test_compiled_under_checkpointing(selective, graphs):
    """Catches a graph in the forward and single operators when it is computed again."""
    inputs = make_inputs(watch=True)
    expected = outputs_and_gradients(inputs)
    options = {}
    if selective:
        saved = [torch.ops.aten.mm.default]
        options["context_fn"] = partial(create_selective_checkpoint_contexts, saved)
    again = partial(checkpoint, inputs, use_reentrant=False, **options)
    torch.testing.assert_close(outputs_and_gradients(inputs, again), expected)


def test_a_compiler_that_fails_is_asked_once(monkeypatch):
    """Catches a training run that stops because it cannot be made faster."""
    calls = []

    def fails(graph, example_inputs):
        calls.append(None)
        raise OSError("no compiler here")

    inputs = make_inputs()
    expected = outputs_and_gradients(inputs)
    torch._dynamo.reset()
    monkeypatch.setattr(elementwise, "_broken", False)
    compiled = torch.compile(elementwise.compute, backend=fails)
    monkeypatch.setattr(elementwise, "_compiled", lambda: compiled)
    monkeypatch.setattr(elementwise, "_pays", lambda features: True)
    with pytest.warns(UserWarning, match="(?s)runs op by op: .*no compiler"):
        torch.testing.assert_close(outputs_and_gradients(inputs), expected)
    torch.testing.assert_close(outputs_and_gradients(inputs), expected)
    assert len(calls) == 1
    torch._dynamo.reset()


def test_more_kinds_of_calls_than_torch_compiles(graphs):
    """Catches training that stays op by op because other calls have used up torch's limit of 8."""
    inputs = make_inputs()
    kinds = list(product((torch.float32, torch.bfloat16), (None, STARTS), *[(False, True)] * 2))
    for dtype, starts, autocast, grad in kinds:
        with torch.autocast("cpu", enabled=autocast), torch.set_grad_enabled(grad):
            inputs(features(), starts, dtype)
    assert len(graphs) == len(kinds) > 8


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_a_graph_can_be_kept(monkeypatch):
    """Catches intermediate tensors given away in a first backward: zero-bubble pipelines, and
    several losses of one forward, come back for them.
    """
    torch._dynamo.reset()
    monkeypatch.setattr(elementwise, "_pays", lambda features: features is not None)
    inputs = make_inputs()
    outputs_and_gradients(inputs)
    for length in (9, 12, 12):
        x = features(length).requires_grad_()
        w, beta, log_gate = inputs(x, None, torch.float32)
        loss = (w + beta[..., None]).square().sum() + log_gate.sum()
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(loss, x)[0], first)
    torch._dynamo.reset()


def test_recorded_calls_are_not_compiled(graphs):
    """Catches make_fx of a layer, which refuses compiled functions."""
    inputs = make_inputs()
    make_fx(lambda x: inputs(x, None, torch.float32)[0])(features())
    assert not graphs


def test_tensors_of_other_types_are_not_compiled(graphs):
    """Catches a collective under way, or a DTensor, that reaches the compiler."""

    class Other(torch.Tensor):
        pass

    options = dict(head_dim=6, beta_max=2.0, dtype=torch.float32, watch=False)
    logits = torch.zeros(2, 9, 2)
    elementwise.run(torch.ones(2, 9, 12).as_subclass(Other), None, logits, None, None, **options)
    assert not graphs
