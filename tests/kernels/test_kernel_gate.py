"""The kernels that sum log gates and differentiate these sums, against sums of torch in fp64.

Small shapes run in Triton's interpreter where there is no GPU. What attention makes of the sums:
test_kernels.py.
"""

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import (
    DEVICE,
    KINDS,
    LAYOUTS,
    NAN_IN_ALL_MEMORY,
    assert_same_bits,
    check,
    kernels,
    on_device,
)

from path_backend.testing import run

pytest.importorskip("triton")

from path_backend.kernels import config, gate  # noqa: E402
from path_backend.kernels.constants import CLOSED_GATE, GATE_SPAN  # noqa: E402

pytestmark = NAN_IN_ALL_MEMORY
SPAN = GATE_SPAN
EPS = torch.finfo(torch.float32).eps


def long(*shape):
    return pytest.param(*shape, marks=pytest.mark.gpu)


# More than SPAN spans: a program adds up totals in several steps.
SHAPES = [
    (1, 1, 1),
    (2, SPAN - 1, 3),
    (1, SPAN, 8),
    (2, SPAN + 1, 9),
    (1, 3 * SPAN + 5, 17),
    (1, SPAN * SPAN + 2 * SPAN + 1, 1),
    long(2, 8192, 16),
    long(1, 131_072, 32),
    long(1, 2**20 + 1, 2),
]


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def assert_sums(log_gate):
    """Offsets are exact to fp64, and a span's own sums, without its first token, to fp32."""
    T = log_gate.shape[1]
    inside, offset = gate.running_sums(log_gate)
    inside = inside[..., :T]
    assert inside.dtype == torch.float32 and offset.dtype == torch.float64
    terms = log_gate.mT.double() / torch.log(torch.tensor(2.0, dtype=torch.float64)).item()
    terms = terms.clamp(min=CLOSED_GATE)
    exact = terms.cumsum(-1)
    assert offset.shape == exact[..., ::SPAN].shape
    assert torch.allclose(offset, exact[..., ::SPAN], rtol=1e-12, atol=1e-12)
    own = F.pad(terms, (0, -T % SPAN)).unflatten(-1, (-1, SPAN)).clone()
    own[..., 0] = 0
    own = own.cumsum(-1).flatten(-2)[..., :T]
    assert torch.allclose(inside.double(), own, rtol=EPS, atol=1e-10)


@pytest.mark.parametrize("B, T, HQ", SHAPES)
def test_running_sums(B, T, HQ):
    """Catches a span or head left out at the edge of a tile, another batch's, natural units."""
    assert_sums(F.logsigmoid(draw(B, T, HQ)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_running_sums_of_any_layout(layout):
    """Catches strides taken for those of a contiguous tensor, and reads beyond it."""
    assert_sums(LAYOUTS[layout](F.logsigmoid(draw(2, 2 * SPAN + 3, 9))))


def test_closed_gates_leave_later_sums_exact():
    """Catches fp32 offsets, after sums of -1e6 in steps of 0.06, and a closed gate at the start of
    a span in every sum of it.
    """
    log_gate = F.logsigmoid(draw(1, 3 * SPAN, 2))
    log_gate[:, : SPAN + 1] = -1e4
    assert_sums(log_gate)


@pytest.mark.parametrize("B, T, HQ", SHAPES)
def test_gradient(B, T, HQ):
    """Catches a suffix that lacks its own term or its own span, and fp32 in the difference or the
    carry: terms of 1e4 cancel, what is left is of the size of 0.01.
    """
    alternating = 1e4 * (1 - 2 * (torch.arange(T, device=DEVICE) % 2))
    row_sum = alternating.expand(B, HQ, T).contiguous()
    col_sum = 0.01 * draw(B, HQ, T)
    d_log_gate = gate.gradient(row_sum, col_sum)
    terms = row_sum.double() - col_sum.double()
    exact = terms.flip(-1).cumsum(-1).flip(-1).mT
    assert d_log_gate.dtype == torch.float32 and d_log_gate.is_contiguous()
    assert torch.allclose(d_log_gate.double(), exact, rtol=EPS, atol=1e-7)


def test_grids_of_many_sequences(monkeypatch):
    """Catches sequences and heads in a dimension of the grid that holds 65,535."""
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda **arguments: None

    for name in ("totals", "", "gradient_totals", "gradient"):
        monkeypatch.setattr(gate, f"gate_{name}_kernel".replace("__", "_"), Kernel())
    gate.running_sums(torch.zeros(config.MAX_HEADS + 1, 2, 1))
    gate.gradient(*torch.zeros(2, config.MAX_HEADS + 1, 1, 2))
    assert grids == [(config.MAX_HEADS + 1, 1)] * 4


@pytest.mark.gpu
def test_deterministic_algorithms_are_enough():
    """Catches an operator without a deterministic form, as torch.cumsum: a job that asks for
    deterministic algorithms would stop.
    """
    inputs = on_device(2000, torch.bfloat16, D=64, **KINDS["path_fox"])
    torch.use_deterministic_algorithms(True, warn_only=False)  # the fixture resets it
    assert_same_bits(run(kernels, inputs), run(kernels, inputs))


@pytest.mark.parametrize("kind", ["path_fox", "fox"])
@pytest.mark.parametrize("closed", [-400.0, -1e9])
def test_a_closed_gate_inside_a_span(closed, kind):
    """Catches a running sum that holds the log of a closed gate and no digit of what follows."""
    inputs = on_device(SPAN + 2, **KINDS[kind])
    with torch.no_grad():
        inputs.log_gate[:, SPAN // 2] = closed
    # a sum of 512 has 14 bits behind the point, which shows beside the interpreter's fp32
    check(inputs, slack=100 if DEVICE == "cpu" else 1)
