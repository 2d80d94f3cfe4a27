"""The ops as the dispatcher, the compiler and selective checkpointing see them."""

import shutil
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from op_checks import (
    CASES,
    assert_saves_only_inputs_output_and_lse,
    opcheck_backward,
    opcheck_forward,
    runs_under_selective_checkpointing,
)
from torch.utils.flop_counter import FlopCounterMode

from path_backend import eager, flops, kernels, ops, path_attention
from path_backend.testing import as_leaves, assert_exact, make_inputs, run


@pytest.mark.parametrize("case", CASES)
def test_opcheck_forward(case):
    """Catches a wrong schema, a fake that lies about its outputs, a missing gradient."""
    opcheck_forward("attention", make_inputs(70, **CASES[case]), 0.25, "torch")


@pytest.mark.parametrize("case", CASES)
def test_opcheck_backward(case):
    """Catches the same in the backward op, and gradients that alias one another or an input."""
    opcheck_backward("attention", make_inputs(70, **CASES[case]), 0.25, "torch")


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_compiles_into_one_graph(case, dynamic):
    """Catches a graph break in the checks, and lengths that are baked in."""
    torch._dynamo.reset()
    compiled = torch.compile(path_attention, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for T in (70, 131) if dynamic else (70,):
        inputs = make_inputs(T, **CASES[case])
        assert_exact(run(compiled, inputs), run(path_attention, inputs), 1e-12)


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_compiles_with_inductor():
    """Catches strides or dtypes that only generated code depends on."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, *rest, **options: path_attention(2 * q, *rest, **options).sin(), fullgraph=True
    )
    inputs = make_inputs(70, gate=True, documents=True)

    def eager(q, *rest, **options):
        return path_attention(2 * q, *rest, **options).sin()

    assert_exact(run(compiled, inputs), run(eager, inputs), 1e-12)


@pytest.mark.parametrize("saved, expected", [(True, 1), (False, 2)])
def test_selective_checkpointing_keeps_the_output(monkeypatch, saved, expected):
    """Catches an op that a policy cannot name: attention would run twice per step."""
    arguments = (eager, "attention_forward", "attention", path_attention, make_inputs(70), saved)
    assert runs_under_selective_checkpointing(monkeypatch, *arguments) == expected


def test_saves_only_inputs_output_and_lse():
    """Catches a transform kept alive between forward and backward."""
    inputs = make_inputs(200, gate=True, documents=True)
    assert_saves_only_inputs_output_and_lse(path_attention, inputs)


def test_lse_is_the_natural_log_sum_exp_without_gradient():
    """Catches base 2, a forgotten maximum, and a promise of a gradient that nobody computes."""
    inputs = make_inputs(100, w=None)
    _, lse = torch.ops.path_backend.attention(*inputs, 0.25, "torch")
    logits = torch.einsum("bihd,bjhd->bhij", inputs.q, inputs.k) / 4
    hidden = torch.ones(100, 100, dtype=torch.bool).triu(1)
    assert torch.allclose(lse, logits.masked_fill(hidden, float("-inf")).logsumexp(-1), atol=1e-12)
    assert not lse.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_of_outputs_and_gradients(dtype):
    """Catches gradients in compute precision, or beta's gradient rounded to bf16."""
    inputs = make_inputs(10, gate=True, dtype=dtype)
    results = run(path_attention, inputs)
    assert results["out"].dtype == dtype
    for name, x in inputs.differentiable().items():
        assert results[f"d{name}"].dtype == x.dtype
        assert results[f"d{name}"].is_contiguous()


def test_beta_and_gate_may_have_any_floating_dtype():
    """Catches an op that is handed a bf16 beta, and gradients of another dtype than the leaf's."""
    inputs = make_inputs(10, gate=True, dtype=torch.float32)
    rounded = inputs._replace(beta=inputs.beta.bfloat16(), log_gate=inputs.log_gate.bfloat16())
    rounded = as_leaves(rounded)
    widened = rounded._replace(beta=rounded.beta.float(), log_gate=rounded.log_gate.float())
    results = run(path_attention, rounded)
    assert results["dbeta"].dtype == results["dlog_gate"].dtype == torch.bfloat16
    assert torch.equal(results["out"], run(path_attention, widened)["out"])


def test_only_the_gradients_that_are_needed():
    """Catches gradients attached to inputs that asked for none."""
    inputs = make_inputs(10).map_floating(torch.detach)
    inputs.v.requires_grad_()
    inputs.call(path_attention).sum().backward()
    assert inputs.v.grad is not None
    assert inputs.q.grad is None and inputs.w.grad is None


def test_an_expanded_gradient_of_the_output():
    """Catches a backward that needs contiguous d(out): sum().backward() hands it stride 0."""
    inputs = make_inputs(70)
    ones = torch.ones(1, 70, 2, 16, dtype=torch.float64)
    assert_exact(
        run(path_attention, inputs, ones[:, :1, :1, :1].expand_as(ones)),
        run(path_attention, inputs, ones),
        1e-14,
    )


def test_autocast_leaves_the_transform_in_fp32():
    """Catches an fp32 sweep that autocast turns into bf16, a hundred times less exact."""
    inputs = make_inputs(200, dtype=torch.float32)
    expected = run(path_attention, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        results = run(path_attention, inputs)
    for name, want in expected.items():
        assert torch.equal(results[name], want), name


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_tensors_on_another_gpu_than_the_current_one():
    """Catches kernels launched where the tensors are not: Triton takes the current device."""
    here, there = (make_inputs(200, dtype=torch.float32, device=f"cuda:{i}") for i in range(2))
    expected, actual = run(path_attention, here), run(path_attention, there)
    for name, want in expected.items():
        assert torch.equal(actual[name].to(want.device), want), name


def test_an_op_computes_on_the_device_of_its_tensors(monkeypatch):
    """Catches the same where there is no GPU: forward and backward enter the device of q."""
    entered = []

    def device_of(x):
        entered.append(x)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    inputs = make_inputs(10)
    run(path_attention, inputs)
    assert len(entered) == 2
    assert all(x.data_ptr() == inputs.q.data_ptr() for x in entered)


CUDA = torch.device("cuda")


def call_on(device):
    """A call whose tensors are on a device that need not be there."""
    return SimpleNamespace(q=SimpleNamespace(device=torch.device(device), dtype=torch.float32))


@pytest.fixture
def fake_kernels(monkeypatch):
    """A stand-in for the kernels whose verdict the test sets."""
    fake = SimpleNamespace(reason=None, unsupported_reason=lambda inputs: fake.reason)
    monkeypatch.setattr(kernels, "backend", fake, raising=False)
    monkeypatch.setitem(sys.modules, "path_backend.kernels.backend", fake)
    ops._announce.cache_clear()
    return fake


def test_auto_uses_the_kernels_where_they_cover_the_case(fake_kernels):
    """Catches a fallback that is always taken, and kernels tried on the CPU."""
    assert ops.choose_backend(call_on(CUDA), "auto") is fake_kernels
    assert ops.choose_backend(call_on(CUDA), "torch") is eager
    assert ops.choose_backend(call_on("cpu"), "auto") is eager


def test_auto_announces_its_fallback_once(fake_kernels):
    """Catches a silent slow path, and a warning at every layer and step."""
    fake_kernels.reason = "head dimension 100"
    with pytest.warns(UserWarning, match="not on kernels: head dimension 100") as caught:
        assert ops.choose_backend(call_on(CUDA), "auto") is eager
        assert ops.choose_backend(call_on(CUDA), "auto") is eager
    assert len(caught) == 1


def test_interpreted_kernels_run_on_cpu_when_asked(fake_kernels, monkeypatch):
    """Catches kernel tests on CPU that quietly test the torch form."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert ops.choose_backend(call_on("cpu"), "triton") is fake_kernels


@pytest.mark.parametrize("w", ["random", None])
def test_flop_counter_knows_the_op(w):
    """Catches an MFU without attention: torch counts an unknown op as nothing."""
    B, T, HQ, H, D, DV = 2, 100, 4, 2, 16, 8
    inputs = as_leaves(make_inputs(T, B=B, HQ=HQ, H=H, D=D, DV=DV, w=w, dtype=torch.float32))
    attention = 2 * B * T * T * HQ * (D + DV)
    transform = B * T * flops.transform_flops(HQ, H, D, T) if w else 0
    with FlopCounterMode(display=False) as counter:
        out = inputs.call(path_attention)
    assert counter.get_total_flops() == attention + transform
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == attention * 5 // 2 + 2 * transform
