"""Every misuse of path_attention and beta_from_logits has an error that names it."""

import re

import pytest
import torch

from path_backend import checks, ops, path_attention
from path_backend.arguments import Inputs
from path_backend.beta import beta_from_logits
from path_backend.testing import make_inputs

T = 5


def starts(*values):
    return torch.tensor([values], dtype=torch.int32)


VALID = make_inputs(T, HQ=4, gate=True, documents=True, dtype=torch.float32).map_floating(
    torch.detach
)
ARGUMENTS = VALID._asdict()


def call(options=None, **changes):
    return Inputs(**(ARGUMENTS | changes)).call(path_attention, **(options or {}))


# Argument, shape handed in, shape expected.
SHAPES = [
    ("k", (1, T, 2, 8), "[B, T, H, D] = [1, 5, 2, 16]"),
    ("v", (1, 6, 2, 16), "[B, T, H, DV] = [1, 5, 2, 16]"),
    ("w", (1, T, 4, 16), "[B, T, H, D] = [1, 5, 2, 16]"),
    ("beta", (1, T, 4), "[B, T, H] = [1, 5, 2]"),
    ("log_gate", (1, T, 2), "[B, T, HQ] = [1, 5, 4]"),
    ("document_start", (1, 1), "[B, T] = [1, 5]"),
]

# Changed arguments (a shape stands for zeros), error.
CALLS = [
    (dict(q=(1, T, 64)), "q must have 4 dimensions [B, T, heads, D], got [1, 5, 64]"),
    (dict(v=(T, 64)), "v must have 4 dimensions [B, T, heads, D], got [5, 64]"),
    (dict(q=(1, 0, 4, 16)), "T must be at least 1, got q [1, 0, 4, 16]"),
    (dict(v=(1, T, 0, 16)), "H must be at least 1, got q [1, 5, 4, 16], v [1, 5, 0, 16]"),
    (dict(q=(1, T, 3, 16)), "heads of k must divide those of q, got HQ = 3 and H = 2"),
    (dict(beta=None), "w and beta must come together, got w without beta"),
    (dict(w=None), "w and beta must come together, got beta without w"),
]

# Argument, dtype handed in, error.
DTYPES = [
    ("q", torch.int32, "q must have a dtype of [torch.float32, torch.bfloat16, torch.float16, "),
    ("w", torch.bfloat16, "w must have q's dtype torch.float32, got torch.bfloat16"),
    ("beta", torch.int64, "beta must have a floating dtype, got torch.int64"),
    ("log_gate", torch.bool, "log_gate must have a floating dtype, got torch.bool"),
    ("document_start", torch.int64, "must have dtype torch.int32, got torch.int64"),
]

DOCUMENTS = [
    (starts(0, 0, 3, 3, 3), "got document_start[0, 2] = 3 after 0"),
    (starts(0, 1, 1, 0, 0), "got document_start[0, 3] = 0 after 1"),
    (starts(-1, 0, 0, 0, 0), "got document_start[0, 0] = -1"),
    (starts(1, 1, 1, 1, 1), "got document_start[0, 0] = 1"),
]


@pytest.mark.parametrize("name, shape, expected", SHAPES)
def test_shapes(name, shape, expected):
    """Catches an argument that broadcasts, or fails deep inside with a message about a matmul."""
    message = f"{name} must have shape {expected}, got {list(shape)}"
    with pytest.raises(ValueError, match=re.escape(message)):
        call(**{name: torch.zeros(shape, dtype=ARGUMENTS[name].dtype)})


@pytest.mark.parametrize("changes, message", CALLS)
def test_calls(changes, message):
    """Catches an empty or incomplete call that returns something."""
    changes = {n: torch.zeros(x) if isinstance(x, tuple) else x for n, x in changes.items()}
    with pytest.raises(ValueError, match=re.escape(message)):
        call(**changes)


@pytest.mark.parametrize("name, dtype, message", DTYPES)
def test_dtypes(name, dtype, message):
    """Catches silent promotion: a bf16 w beside fp32 q would be multiplied as another number."""
    with pytest.raises(TypeError, match=re.escape(message)):
        call(**{name: ARGUMENTS[name].to(dtype)})


@pytest.mark.parametrize("name", ["k", "v", "w", "beta", "log_gate", "document_start"])
def test_devices(name):
    """Catches tensors of two devices that reach a kernel as pointers."""
    with pytest.raises(ValueError, match=f"{name} must be on q's device cpu, got meta"):
        call(**{name: ARGUMENTS[name].to("meta")})


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("start, message", DOCUMENTS)
def test_document_starts(start, message, compiled):
    """Catches lengths or ids handed in as starts, in eager and in compiled code."""
    torch._dynamo.reset()
    function = path_attention
    if compiled:
        function = torch.compile(path_attention, fullgraph=True, backend="aot_eager")
    inputs = make_inputs(T)._replace(document_start=start)
    expected = "document_start must be non-decreasing with 0 <= document_start[b, i] <= i, "
    with pytest.raises(ValueError, match=re.escape(expected + message)):
        inputs.call(function)


def test_document_starts_name_the_first_offending_row():
    """Catches an error that points at the wrong sequence of a batch."""
    inputs = make_inputs(T, B=2)
    start = torch.cat([starts(0, 1, 2, 3, 4), starts(0, 0, 0, 4, 4)])
    with pytest.raises(ValueError, match=re.escape("document_start[1, 3] = 4 after 0")):
        inputs._replace(document_start=start).call(path_attention)


def test_unknown_implementation():
    """Catches a typing error that quietly means "auto"."""
    message = "implementation must be one of ('auto', 'torch', 'triton'), got 'cuda'"
    with pytest.raises(ValueError, match=re.escape(message)):
        call(dict(implementation="cuda"))


def test_triton_without_a_gpu(monkeypatch):
    """Catches a request for kernels that is answered by the torch form."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    message = "implementation='triton' does not cover this call: tensors are on cpu"
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        call(dict(implementation="triton"))


def test_triton_missing(monkeypatch):
    """Catches an ImportError where torch was installed without triton, and one that is hidden."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def fail_with(name):
        def refuse(*args):
            raise ModuleNotFoundError(name=name)

        return refuse

    monkeypatch.setattr(ops, "_load_kernels", fail_with("triton.language"))
    with pytest.raises(
        NotImplementedError, match="does not cover this call: triton is not installed"
    ):
        call(dict(implementation="triton"))
    monkeypatch.setattr(ops, "_load_kernels", fail_with("path_backend.kernels.lunch"))
    with pytest.raises(ModuleNotFoundError):
        call(dict(implementation="triton"))


def test_second_derivatives_are_refused():
    """Catches a double backward that would return zeros."""
    inputs = make_inputs(T)
    (dq,) = torch.autograd.grad(inputs.call(path_attention).sum(), inputs.q, create_graph=True)
    with pytest.raises(RuntimeError, match="path_attention has no second derivative"):
        dq.sum().backward()


@pytest.mark.parametrize("beta_max", [0.0, -1.0, 2.1, float("nan")])
def test_beta_max(beta_max):
    """Catches a configuration whose reflections grow or turn backwards."""
    with pytest.raises(ValueError, match=re.escape(f"beta_max must be in (0, 2], got {beta_max}")):
        beta_from_logits(torch.zeros(1, T, 2), torch.zeros(1, T, 2, 8), beta_max)


def test_beta_and_w_of_different_heads():
    """Catches a beta per query head under grouped queries, which would broadcast."""
    message = (
        "w must have the shape of logits and a last dimension, [1, 5, 4, 'D'], got [1, 5, 2, 8]"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        beta_from_logits(torch.zeros(1, T, 4), torch.zeros(1, T, 2, 8))


@pytest.mark.parametrize("name", ["q", "k", "w", "beta", "log_gate", "document_start"])
@pytest.mark.parametrize("value", [[1.0], 1.0])
def test_what_is_no_tensor(name, value):
    """Catches an AttributeError from inside in place of the argument's name."""
    with pytest.raises(TypeError, match=f"{name} must be a Tensor, got {type(value).__name__}"):
        call(**{name: value})


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(scale="a"), TypeError, "scale must be a number, got str"),
        (dict(gate_scale=None), TypeError, "gate_scale must be a number, got NoneType"),
        (dict(scale=float("nan")), ValueError, "scale must be finite, got nan"),
        (dict(gate_scale=float("inf")), ValueError, "gate_scale must be finite, got inf"),
    ],
)
def test_numbers(options, error, message):
    """Catches NaN outputs from a factor that is none."""
    with pytest.raises(error, match=message):
        call(options)


def test_gate_scale_without_a_gate():
    """Catches a factor that is accepted and ignored."""
    with pytest.raises(ValueError, match="gate_scale needs a log_gate, got gate_scale = 0.5"):
        call(dict(gate_scale=0.5), log_gate=None)


IMPOSSIBLE = {
    "an infinite gate": (dict(log_gate=-torch.inf), "log_gate must be finite", "-inf"),
    "a gate that is no logarithm": (dict(log_gate=0.5), "log_gate must be finite and <= 0", "0.5"),
    "a gate that is NaN": (dict(log_gate=torch.nan), "log_gate must be finite", "nan"),
    "beta above 2": (dict(beta=2.5), "beta must be in [0, 2]", "2.5"),
    "beta below 0": (dict(beta=-0.5), "beta must be in [0, 2]", "-0.5"),
    "beta that is NaN": (dict(beta=torch.nan), "beta must be in [0, 2]", "nan"),
    "w that is NaN": (dict(w=torch.nan), "|w|^2 must be such that", "nan"),
    "w that is long": (dict(w=2.0, beta=1.5), "|w|^2 must be such that", "= 64.0"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_values_that_mean_nothing_are_named(case):
    """Catches a NaN that turns up thousands of tokens later, without a word of its cause."""
    values, message, got = IMPOSSIBLE[case]
    changed = {}
    for name, value in values.items():
        changed[name] = getattr(VALID, name).clone()
        changed[name][0, 3, 1] = value
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        call(**changed)
    assert "[0, 3, 1] = " in str(caught.value) and str(caught.value).endswith(got)


def test_nan_from_before_the_call_spreads():
    """Catches a pipeline that cannot learn its stages' shapes from uninitialised memory."""
    nan = {name: torch.full_like(x, torch.nan) for name, x in VALID.differentiable().items()}
    assert call(**nan).isnan().all()


def test_contractions_are_taken():
    """Catches a check that refuses short or long w whose reflections are contractions."""
    call(w=VALID.w * 0)
    call(w=VALID.w * 2, beta=VALID.beta / 8)


def test_values_on_a_gpu_are_checked_when_asked(monkeypatch):
    """Catches a switch that does nothing, and a host that waits for a GPU at every call."""
    inputs = Inputs(*(None if x is None else x.to("meta") for x in VALID))
    checked = []
    monkeypatch.setattr(checks, "_check_reflections", lambda *_: checked.append("reflections"))
    monkeypatch.setattr(checks, "_check_gate", lambda *_: checked.append("gate"))
    inputs = inputs._replace(document_start=None)
    checks.check_values(inputs)
    assert not checked
    monkeypatch.setenv("PATH_BACKEND_CHECK", "1")
    checks.check_values(inputs)
    assert checked == ["gate", "reflections"]


def test_forward_mode_is_refused():
    """Catches a tangent of zero: torch's answer where an op has no forward-mode formula."""
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda q: call(q=q), (VALID.q,), (torch.ones_like(VALID.q),))
