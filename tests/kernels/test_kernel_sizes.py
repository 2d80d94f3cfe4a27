"""The kernels at real sizes and in bf16, compiled, against the torch form in fp64; on a GPU.

Compiling takes most of the time. Neighbours share kernels: parameters that need others vary last,
and `pytest -n 12 --dist worksteal` gives a worker neighbours.
"""

from functools import partial

import pytest
import torch
from kernel_checks import (
    DEVICE,
    KINDS,
    LAYOUTS,
    LIMITS,
    NAN_IN_ALL_MEMORY,
    assert_every_token_sees_itself,
    assert_same_bits,
    check,
    gradient_of_out,
    kernels,
    on_device,
    torch_form,
)
from op_checks import (
    opcheck_backward,
    opcheck_forward,
)

from path_backend import ops, path_attention
from path_backend.benchmarks.operator import replayed
from path_backend.beta import beta_from_logits
from path_backend.testing import run

triton = pytest.importorskip("triton")

pytestmark = [pytest.mark.gpu, *NAN_IN_ALL_MEMORY]
bf16 = partial(on_device, dtype=torch.bfloat16)
DTYPES = pytest.mark.parametrize("dtype", LIMITS, ids=lambda x: str(x).removeprefix("torch."))


# Those that compile longest first, so that none is left over at the end


@DTYPES
@pytest.mark.parametrize("D", [128, 96, 64, 32])
@pytest.mark.parametrize("kind", ["path_fox", "fox"])
def test_widths(kind, D, dtype):
    """Catches a tile configuration that does not fit the card, or that nobody ever compiled."""
    check(on_device(2000, dtype, D=D, **KINDS[kind]), torch_form)


@DTYPES
def test_wide_heads_without_reflections(dtype):
    """Catches shared memory that overflows at a width of 256."""
    check(on_device(2000, dtype, D=256, **KINDS["fox"]), torch_form)


@pytest.mark.parametrize("kind", ["path_fox", "nope"])
def test_lengths_compile_nothing_new(kind, compilations):
    """Catches specialisation on T or on a stride that follows it: seconds at every new length.

    Warmed up by a length of one chunk, one of two, and two of many: with 512 products on a level
    they are made in other tiles.
    """

    def step(T):
        run(kernels, bf16(T, D=80, **{**KINDS[kind], "B": 2, "HQ": 8, "H": 4}))

    # No other test has this width, so what is warm does not depend on their order.
    assert compilations(step, 40, 100, 5000, 9000), "the hook sees no compilation"
    short = (1, 2, 16, 63, 64, 65, 96, 127, 128, 129, 192, 250, 256)
    assert not compilations(step, *short, 257, 500, 512, 1000, 2048, 3333, 8300)


@pytest.mark.parametrize("DV", [64, 128])
@pytest.mark.parametrize("layout", ["surrounded by NaN", "heads before tokens"])
def test_groups_of_heads_and_values_of_another_width(layout, DV):
    """Catches D taken for DV where one of them decides the tile, dk, dv or dw of some heads of a
    group, and aligned rows taken for granted.
    """
    case = dict(B=2, HQ=8, H=2, D=192 - DV, DV=DV, gate=True, documents=True)
    inputs = bf16(1111, **case)
    moved = inputs.map_floating(lambda x: LAYOUTS[layout](x.detach()).requires_grad_())
    check(moved, torch_form, d_out=LAYOUTS[layout](gradient_of_out(inputs)))


def test_tokens_far_apart():
    """Catches 32-bit offsets: inputs that are columns of one tensor of 2^31 elements and more."""
    inputs = bf16(2100, D=64, **KINDS["path_fox"])
    wide = torch.empty(2100, 2**20, dtype=torch.bfloat16, device=DEVICE)
    columns = iter(range(0, 2**20, 2**17))

    def place(x):
        if x.ndim < 4:
            return x.detach().requires_grad_()
        start, width = next(columns), x[0, 0].numel()
        view = wide[:, start : start + width].view(x.shape)
        return view.copy_(x.detach()).requires_grad_()

    check(inputs.map_floating(place), torch_form)


def test_the_longest_sequence():
    """Catches levels that only a long sequence has, and sums that lose digits over them."""
    case = dict(B=2, HQ=2, H=1, D=128, gate=True, documents=True)
    check(bf16(131_072, **case), torch_form)


REPEATED = [
    dict(T=33_000, HQ=2, H=1, D=128, gate=True, documents=True),
    dict(T=33_000, B=2, HQ=4, H=2, D=128, gate=True, documents=True),
    dict(T=9000, HQ=16, H=16, D=128),
    dict(T=9000, HQ=16, H=8, D=64),
    dict(T=9000, HQ=16, H=8, D=64, gate=True),
    dict(T=9000, HQ=8, H=8, D=128, gate=True, w=None),
]


@pytest.mark.parametrize("case", REPEATED)
def test_two_runs_give_the_same_bits(case):
    """Catches an atomic, a race between warps, a scan whose order depends on the schedule, and a
    copy into a tile that a product still reads.
    """
    inputs = bf16(**case)
    expected = run(kernels, inputs)
    for _ in range(3):
        assert_same_bits(run(kernels, inputs), expected)


# The accuracy that the project promises


HARD = {
    "random": dict(),
    "beta in [1.9, 2]": dict(beta="high"),
    "nearly constant w, beta 2": dict(w="constant", beta="two"),
}


@pytest.mark.parametrize("factor", [1.0, 1e-8])
@pytest.mark.parametrize("case", HARD)
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("D", [128, 64])
def test_accuracy_at_4096(D, gate, case, factor):
    """Catches a product in too few digits, and gradients that underflow at a real loss's scale.

    beta is clipped against the rounded w, as the layer does.
    """
    inputs = bf16(4096, D=D, gate=gate, **HARD[case])
    beta, _ = beta_from_logits(torch.logit(inputs.beta.detach() / 2), inputs.w.detach())
    check(inputs._replace(beta=beta.requires_grad_()), torch_form, factor=factor)


# Width 64: all of these share their kernels


@pytest.mark.parametrize("T", [33_000, 4096, 2000, 130, 63, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_lengths(kind, T):
    """Catches what needs many tiles: pipelines, int32 offsets, reductions in parts."""
    check(bf16(T, D=64, **KINDS[kind]), torch_form)


@pytest.mark.parametrize("length", [1, 100, 2048])
@pytest.mark.parametrize("kind", ["path_fox", "fox"])
def test_documents(kind, length):
    """Catches tiles skipped or kept by the wrong border where a row of tiles is long."""
    inputs = bf16(32_768, D=64, **KINDS[kind])
    position = torch.arange(32_768, dtype=torch.int32, device=DEVICE)
    inputs = inputs._replace(document_start=(position // length * length)[None])
    if length > 1:
        check(inputs, torch_form)
    else:
        assert_every_token_sees_itself(inputs)


@pytest.mark.parametrize("kind", ["path", "path_fox", "fox"])
def test_memory_grows_linearly(kind):
    """Catches scratch of T x T, or of T times the number of tiles: 4 times at twice the length.

    The levels, their number a logarithm, make it 2.3 times at most.
    """

    def extra(T):
        inputs = bf16(T, D=64, **KINDS[kind])
        d_out = gradient_of_out(inputs)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(kernels, inputs, d_out)
        return torch.cuda.max_memory_allocated() - before

    peaks = [extra(T) for T in (8192, 16_384, 32_768, 65_536, 131_072)]
    for short, long in zip(peaks, peaks[1:], strict=False):
        assert long < 2.6 * short, [f"{peak / 2**20:.0f} MiB" for peak in peaks]


# What "auto" does, and the ops as the dispatcher sees them


@pytest.mark.parametrize("kind", KINDS)
def test_auto_runs_the_kernels(kind):
    """Catches a default that never reaches them."""
    inputs = bf16(2000, D=64, **KINDS[kind])
    assert_same_bits(run(path_attention, inputs), run(kernels, inputs))


@pytest.mark.parametrize("kind", KINDS)
def test_a_cuda_graph_replays_forward_and_backward(kind):
    """Catches a wait for the host, a descriptor or a scratch tensor that does not outlive a call,
    and anything that the host computes from values.
    """
    case = KINDS[kind] | dict(D=64, documents=True)
    inputs, others = (bf16(1500, seed=seed, **case) for seed in (0, 1))
    d_out = gradient_of_out(inputs)
    results = []
    replay = replayed(lambda: results.append(run(kernels, inputs, d_out)))
    with torch.no_grad():
        for x, other in zip(inputs, others, strict=True):
            if x is not None:
                x.copy_(other)
    replay()
    assert_same_bits(results[-1], run(kernels, others, d_out))


def test_wide_heads_with_reflections_fall_back_and_say_so():
    """Catches a silent slow path, and a launch that the card refuses."""
    ops._announce.cache_clear()
    inputs = on_device(200, D=256)
    with pytest.warns(UserWarning, match="not on kernels: q has head width 256"):
        actual = run(path_attention, inputs)
    assert_same_bits(actual, run(torch_form, inputs))


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind):
    """Catches kernels whose results differ from the fakes' in shape, dtype or strides."""
    inputs = bf16(2000, D=64, **KINDS[kind])
    opcheck_forward("attention", inputs, 0.25, "triton")
    opcheck_backward("attention", inputs, 0.25, "triton")
