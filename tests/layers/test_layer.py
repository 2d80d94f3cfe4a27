"""The layer against its formulas written out, and what it promises to a host model."""

import copy
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from path_backend.layers.attention import (
    PathAttention,
    StickBreakingOperator,
    document_start_from_eos,
)
from path_backend.layers.baselines import stick_breaking_attention
from path_backend.layers.elementwise import causal_conv
from path_backend.layers.projections import PathInputs, ShortConv
from path_backend.reference import path_attention_reference

DIM, HEADS, KV_HEADS, HEAD_DIM = 24, 4, 2, 6
MODES = {
    "path": dict(reflections=True, forget_gate=False),
    "path_fox": dict(reflections=True, forget_gate=True),
    "fox": dict(reflections=False, forget_gate=True),
    "nope": dict(reflections=False, forget_gate=False),
    "stick_breaking": dict(reflections=False, forget_gate=False, stick_breaking=True),
}


@pytest.mark.usefixtures("uninitialized_memory_is_nan")
@pytest.mark.filterwarnings("ignore:.*eterministic.*:UserWarning")
def test_a_new_layer_has_its_parameters():
    """Catches a parameter that holds what lay in memory until someone calls init_weights."""
    options = dict(MODES["path_fox"], w_rank=5, gate_start=0.9)
    inputs = PathInputs(DIM, HEADS, KV_HEADS, HEAD_DIM, **options)
    for name, parameter in inputs.named_parameters():
        assert parameter.isfinite().all(), name
    assert torch.allclose(inputs.gate.bias.sigmoid(), torch.tensor(0.9))


def make_layer(mode="path_fox", qk_norm=False, dtype=torch.float64, seed=0, **options):
    torch.manual_seed(seed)
    norms = [nn.RMSNorm(HEAD_DIM), nn.RMSNorm(HEAD_DIM)] if qk_norm else [None, None]
    layer = PathAttention(
        nn.Linear(DIM, HEADS * HEAD_DIM, bias=False),
        nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False),
        nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False),
        nn.Linear(HEADS * HEAD_DIM, DIM, bias=False),
        head_dim=HEAD_DIM,
        q_norm=norms[0],
        k_norm=norms[1],
        **{"w_rank": 5, **MODES[mode], **options},
    ).to(dtype)
    layer.init_weights()
    with torch.no_grad():  # larger than 0.02, so that every part matters
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def written_out(layer, x, document_start=None):
    """The layer's output in fp64, one token at a time where order matters."""
    B, T, _ = x.shape
    path = layer.path
    q, k, v = (
        (x @ linear.weight.T).view(B, T, -1, HEAD_DIM) for linear in (layer.wq, layer.wk, layer.wv)
    )
    if layer.q_norm is not None:
        eps = torch.finfo(x.dtype).eps
        q = q / (q.square().mean(-1, keepdim=True) + eps).sqrt() * layer.q_norm.weight
        k = k / (k.square().mean(-1, keepdim=True) + eps).sqrt() * layer.k_norm.weight
    w = beta = log_gate = None
    if path.w_up is not None:
        h = x if path.w_down is None else x @ path.w_down.weight.T
        h = h @ path.w_up.weight.T
        rows = []
        for t in range(T):
            row = torch.zeros_like(h[:, t])
            for back in range(path.conv.weight.shape[1]):
                for b in range(B):
                    first = 0 if document_start is None else int(document_start[b, t])
                    if t - back >= first:
                        row[b] += path.conv.weight[:, -1 - back] * h[b, t - back]
            rows.append(row)
        w = torch.stack(rows, 1)
        w = (w * torch.sigmoid(w)).view(B, T, -1, HEAD_DIM)
        w = w / (w.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        beta = 2 / (1 + torch.exp(-(x @ path.beta.weight.T + path.beta.bias)))
        beta = beta.clamp_max(path.beta_max)
    if path.gate is not None:
        log_gate = -torch.log1p(torch.exp(-(x @ path.gate.weight.T + path.gate.bias)))
    if isinstance(layer.inner_attention, StickBreakingOperator):
        out = stick_breaking_attention(q, k, v, document_start=document_start)
    else:
        out = path_attention_reference(q, k, v, w, beta, log_gate, document_start=document_start)
    return out.reshape(B, T, -1) @ layer.wo.weight.T


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options", [{}, {"w_rank": 0}, {"conv_width": 1}, {"qk_norm": True}], ids=str
)
def test_formulas(mode, options):
    """A wrong activation, tap order, norm, head order, or a part left out of one mode."""
    layer = make_layer(mode, **options)
    x = torch.randn(2, 9, DIM, dtype=torch.float64)
    torch.testing.assert_close(layer(x), written_out(layer, x), rtol=1e-10, atol=1e-12)


def test_every_parameter_learns():
    """A parameter that the output does not depend on, as after a wrong detach."""
    layer = make_layer(qk_norm=True)
    layer(torch.randn(2, 9, DIM, dtype=torch.float64)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("mode", MODES)
def test_packed_documents_equal_separate_ones(mode):
    """The convolution, the reflections or the gate reaching across the start of a document."""
    layer = make_layer(mode)
    lengths = (1, 2, 7)
    parts = [torch.randn(1, n, DIM, dtype=torch.float64) for n in lengths]
    starts = torch.tensor([[0, 1, 1, *[3] * 7]], dtype=torch.int32)
    separate = torch.cat([layer(part) for part in parts], dim=1)
    packed = layer(torch.cat(parts, dim=1), starts)
    torch.testing.assert_close(packed, separate, rtol=1e-10, atol=1e-12)


def test_document_start_counts_for_the_written_out_layer():
    """Document starts that differ between the rows of a batch being mixed up."""
    layer = make_layer()
    x = torch.randn(2, 6, DIM, dtype=torch.float64)
    starts = torch.tensor([[0, 0, 0, 3, 3, 5], [0, 1, 1, 1, 4, 4]], dtype=torch.int32)
    torch.testing.assert_close(
        layer(x, starts), written_out(layer, x, starts), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("cut", [1, 4])
def test_conv_continues_from_history(width, cut):
    """A halo of the wrong length or side, or one read across the start of a document."""
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    weight = torch.randn(3, width, dtype=torch.float64)
    starts = torch.tensor([[0, 0, 0, 3, 3, 3, 3], [0, 0, 0, 0, 0, 0, 6]], dtype=torch.int32)
    whole = causal_conv(x, weight, starts)
    before = F.pad(x, (0, 0, width - 1, 0))[:, cut : cut + width - 1]
    piece = causal_conv(x[:, cut:], weight, starts[:, cut:] - cut, before)
    torch.testing.assert_close(piece, whole[:, cut:])


def test_document_start_from_eos():
    """The end-of-text token counted to the next document, or ends at the edges of a row."""
    eos = 9
    tokens = torch.tensor([[1, 9, 2, 2, 9, 9], [9, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 9]])
    expected = [[0, 0, 2, 2, 2, 5], [0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]
    starts = document_start_from_eos(tokens, eos)
    assert starts.dtype == torch.int32
    assert starts.tolist() == expected


def test_autocast_leaves_beta_and_gate_in_fp32():
    """Logits rounded to bf16 under autocast, or the operator receiving mixed dtypes."""
    layer = make_layer(dtype=torch.float32, qk_norm=True)
    x = torch.randn(2, 9, DIM)
    exact = layer.path(x, None, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        w, beta, log_gate = layer.path(x, None, torch.bfloat16)
        out = layer(x)
    assert w.dtype == out.dtype == torch.bfloat16
    assert torch.equal(beta, exact[1]) and torch.equal(log_gate, exact[2])


def test_bf16_layer_keeps_reflections_contractive():
    """w normalised in bf16 or beta clipped against the w before rounding: |1 - beta w^2| > 1."""
    layer = make_layer("path", dtype=torch.bfloat16, beta_max=2.0)
    with torch.no_grad():
        layer.path.beta.bias.fill_(50)
    x = torch.randn(2, 200, DIM, dtype=torch.bfloat16)
    w, beta, _ = layer.path(x, None, torch.bfloat16)
    assert beta.dtype == torch.float32
    eigenvalue = 1 - beta * w.float().square().sum(-1)
    assert eigenvalue.abs().max() <= 1
    assert eigenvalue.min() < -0.99  # or the test would hold for any small beta


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.skipif(DEVICE == "cpu" and not shutil.which("g++"), reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_layer_keeps_reflections_contractive(dtype):
    """Beta clipped against the w before rounding: compilers leave out a cast and the cast back.

    Every coordinate of a unit vector of 254 equal ones is rounded up, in bf16 by almost 2^-8.
    """
    torch._dynamo.reset()
    options = dict(reflections=True, forget_gate=False, w_rank=0, beta_max=2.0, watch=True)
    inputs = PathInputs(8, 1, 1, 254, **options).to(DEVICE, dtype)
    inputs.stats = inputs.stats.float()
    with torch.no_grad():
        for parameter in inputs.parameters():
            parameter.fill_(50 if parameter is inputs.beta.bias else 1)
    x = torch.ones(1, 9, 8, device=DEVICE, dtype=dtype)
    w, beta, _ = torch.compile(inputs, fullgraph=True)(x, None, dtype)
    eigenvalue = 1 - beta.double() * w.double().square().sum(-1)
    assert -1 <= eigenvalue.min() < -0.999
    assert abs(inputs.stats[2] - eigenvalue.min()) < 1e-6


@pytest.mark.parametrize("mode", MODES)
def test_init_weights_sets_everything(mode):
    """A parameter or buffer left as `to_empty` made it."""
    layer = make_layer(mode, dtype=torch.float32, qk_norm=True, watch=True)
    for tensor in [*layer.parameters(), *layer.buffers()]:
        tensor.data.fill_(float("nan"))
    layer.init_weights(init_std=0.001)
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        if name.endswith("bias") or name.endswith("stats"):
            assert tensor.eq(0).all(), name
        elif "norm" in name:
            assert tensor.eq(1).all(), name
        else:
            std = 0.001 if name == "wo.weight" else 0.02
            assert 0.5 * std < tensor.std() < 1.6 * std, name


@pytest.mark.parametrize("mode", ["path_fox", "fox"])
def test_gate_start(mode):
    """A start that the gate's bias does not have, or that goes to beta too."""
    layer = make_layer(mode, gate_start=0.998)
    layer.init_weights()
    gates = layer.path.gate.bias.sigmoid()
    torch.testing.assert_close(gates, torch.full_like(gates, 0.998))
    assert layer.path.beta is None or layer.path.beta.bias.eq(0).all()


@pytest.mark.parametrize("gate_start", [0.0, 1.0, -1.0, float("nan")])
def test_gate_start_out_of_range(gate_start):
    """A start that no bias has."""
    with pytest.raises(ValueError, match=rf"gate_start must be in \(0, 1\), got {gate_start}"):
        make_layer(gate_start=gate_start)


def test_small_layers_that_a_host_changes_are_called():
    """A hook that does not fire, or a layer put around one of them passed over."""

    class Doubled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return 2 * self.inner(x)

    x = torch.randn(1, 5, DIM, dtype=torch.float64)
    inputs = make_layer().path
    _, _, plain = inputs(x, None, x.dtype)
    calls = []
    handle = inputs.beta.register_forward_hook(lambda *call: calls.append(call))
    torch.testing.assert_close(inputs(x, None, x.dtype)[2], plain)
    assert len(calls) == 1
    handle.remove()
    for layer in (inputs.beta, inputs.conv):
        handle = layer.register_full_backward_hook(lambda *call: calls.append(call))
        inputs(x.requires_grad_(), None, x.dtype)[0 if layer is inputs.conv else 1].sum().backward()
        handle.remove()
    assert len(calls) == 3
    logits = inputs.gate(x)
    forward = inputs.gate.forward
    inputs.gate.forward = lambda x: 3 * forward(x)
    torch.testing.assert_close(inputs(x, None, x.dtype)[2], F.logsigmoid(3 * logits))
    inputs.gate.forward = forward
    inputs.gate = Doubled(inputs.gate)
    torch.testing.assert_close(inputs(x, None, x.dtype)[2], F.logsigmoid(2 * logits))


@pytest.mark.parametrize("mode", ["path", "path_fox", "fox"])
def test_statistics(mode):
    """A statistic of the wrong tensor or order, or one that evaluation overwrites."""
    layer = make_layer(mode, watch=True, beta_max=1.2)
    x = torch.randn(2, 9, DIM, dtype=torch.float64)
    w, beta, log_gate = layer.path(x, None, torch.float64)
    expected = {}
    if beta is not None:
        expected["beta_mean"] = beta.mean()
        expected["beta_clipped"] = beta.eq(1.2).double().mean()
        expected["eigenvalue_min"] = (1 - beta * w.square().sum(-1)).min()
        assert 0 < expected["beta_clipped"] < 1
    if log_gate is not None:
        expected["gate_mean"] = log_gate.exp().mean()
    layer(x)
    assert layer.path.stat_names == tuple(expected)
    torch.testing.assert_close(layer.path.stats, torch.stack(list(expected.values())))
    assert "path.stats" not in layer.state_dict()
    before = layer.path.stats.clone()
    layer.eval()(2 * x)
    assert torch.equal(layer.path.stats, before)


def test_compiles_as_one_graph():
    """Data-dependent Python in the layer, or statistics that break or vanish when compiled."""
    layer = make_layer(watch=True, qk_norm=True)
    x = torch.randn(2, 9, DIM, dtype=torch.float64)
    starts = torch.tensor([[0] * 9, [0] * 4 + [4] * 5], dtype=torch.int32)
    compiled_layer = copy.deepcopy(layer)
    compiled = torch.compile(compiled_layer, backend="aot_eager", fullgraph=True)
    expected, got = layer(x, starts), compiled(x, starts)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(compiled_layer.path.stats, layer.path.stats)
    expected.sum().backward()
    got.sum().backward()
    for a, b in zip(layer.parameters(), compiled_layer.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad)


def test_errors():
    """A layer that cannot work being built."""
    options = dict(reflections=True, forget_gate=False)
    with pytest.raises(ValueError, match="multiple of key/value heads, got 4 and 3"):
        PathInputs(DIM, 4, 3, 6, **options)
    with pytest.raises(ValueError, match="conv_width must be a whole number of at least 1, got 0"):
        ShortConv(8, 0)
    linear = nn.Linear(DIM, 10)
    with pytest.raises(ValueError, match="wq.out_features must be a multiple of head_dim = 6"):
        PathAttention(linear, linear, linear, linear, head_dim=6)
    with pytest.raises(ValueError, match="neither .* got reflections = True, forget_gate = False"):
        make_layer("path", stick_breaking=True)


WRONG_SIZES = [
    (dict(dim=24, n_heads=5), "n_heads must divide dim = 24 without a head_dim, got 5"),
    (dict(dim=24, n_heads=4, n_kv_heads=3), "query heads must be a multiple of key/value heads"),
    (dict(dim=24, n_heads=4, head_dim=0), "head_dim must be a whole number of at least 1, got 0"),
    (dict(dim=24, n_heads="4"), "n_heads must be a whole number of at least 1, got '4'"),
    (dict(dim=24, n_heads=4, w_rank="5"), "w_rank must be a whole number of at least 0, got '5'"),
    (dict(dim=24, n_heads=4, w_rank=25), "w_rank must be at most 24, the features of x, got 25"),
    (dict(dim=24, n_heads=4, implementation="trton"), "implementation must be one of"),
]


@pytest.mark.parametrize("sizes, message", WRONG_SIZES)
def test_sizes_that_do_not_fit(sizes, message):
    """Catches a layer that is built, and fails in its first forward or in none."""
    with pytest.raises(ValueError, match=re.escape(message)):
        PathAttention.from_sizes(**({"w_rank": 5} | sizes))


def test_from_sizes_is_the_layer():
    """Catches projections of other widths, and weights that nobody drew."""
    layer = PathAttention.from_sizes(24, 4, 2, 8, qk_norm=True, w_rank=5, forget_gate=True)
    assert layer(torch.randn(2, 7, 24)).shape == (2, 7, 24)
    assert layer.wk.weight.shape == (16, 24) and layer.q_norm.weight.shape == (8,)
    assert 0.015 < layer.wq.weight.std() < 0.025


@pytest.mark.parametrize("shape", [(7, 24), (2, 0, 24), (2, 7, 23)])
def test_inputs_that_are_no_sequences(shape):
    """Catches an error in torch's words about a view."""
    message = f"x must have shape [B, T, 24] with T >= 1, got {list(shape)}"
    with pytest.raises(ValueError, match=re.escape(message)):
        PathAttention.from_sizes(24, 4, w_rank=5)(torch.randn(shape))


def test_values_of_another_width_are_named():
    """Catches a message that blames k."""
    wq, wk, wo = (nn.Linear(24, 24, bias=False) for _ in range(3))
    with pytest.raises(ValueError, match="wv.out_features must be those of wk, 24, got 12"):
        PathAttention(wq, wk, nn.Linear(24, 12, bias=False), wo, head_dim=6, w_rank=5)


@pytest.mark.parametrize("mode", MODES)
def test_meta_device(mode):
    """Catches a layer that tools cannot trace without memory: meta has no autocast."""
    layer = PathAttention.from_sizes(24, 4, 2, w_rank=5, **MODES[mode]).to("meta")
    assert layer(torch.empty(2, 7, 24, device="meta")).shape == (2, 7, 24)
