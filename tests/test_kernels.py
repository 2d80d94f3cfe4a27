"""The Triton kernels against the definition, and what the kernels promise beside it.

Small shapes run wherever the tests run: on a GPU compiled, elsewhere in Triton's interpreter, which
computes bf16 products wrongly and is given fp32 and fp16. Real sizes are marked gpu and compared
with the torch form in fp64. Memory from torch.empty holds NaN throughout.
"""

from functools import partial

import pytest
import torch
from kernel_checks import BF16, DEVICE, LAYOUTS, LIMITS, assert_same_bits, assert_within_limits
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from path_backend import ops, path_attention
from path_backend.beta import beta_from_logits
from path_backend.reference import path_attention_reference
from path_backend.testing import assert_exact, make_inputs, relative_error, run

triton = pytest.importorskip("triton")
from path_backend.kernels import config, launch  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("uninitialized_memory_is_nan"),
    pytest.mark.filterwarnings("ignore:.*eterministic.*:UserWarning"),
]

KINDS = {
    "path": dict(HQ=1, H=1),
    "path_fox": dict(gate=True, documents=True, H=1),
    "fox": dict(w=None, gate=True, documents=True),
    "nope": dict(w=None),
}
kernels = partial(path_attention, implementation="triton")
torch_form = partial(path_attention, implementation="torch")


def small(T, dtype=torch.float32, **case):
    return make_inputs(T, dtype=dtype, device=DEVICE, **case)


def gradient_of_out(inputs, factor=1.0):
    """d(out) in the inputs' dtype: the exact form must be given the same numbers."""
    shape = (*inputs.q.shape[:3], inputs.v.shape[3])
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(shape, generator=generator) * factor).to(inputs.q)


def check(
    inputs, reference=path_attention_reference, *, d_out=None, factor=1.0, slack=1, **options
):
    """The kernels equal the reference in fp64, output and every gradient, within LIMITS."""
    d_out = gradient_of_out(inputs, factor) if d_out is None else d_out
    exact = run(reference, inputs.leaves(torch.float64), d_out, **options)
    assert_within_limits(run(kernels, inputs, d_out, **options), exact, inputs.q.dtype, slack)


def starts(T, *begins):
    """document_start [1, T] of documents that begin at 0 and at each of `begins`."""
    start = torch.zeros(1, T, dtype=torch.int32, device=DEVICE)
    for begin in begins:
        start[:, begin:] = begin
    return start


def assert_every_token_sees_itself(inputs):
    """The result of documents of one token: out is v, and only v has a gradient."""
    d_out = gradient_of_out(inputs)
    results = run(kernels, inputs, d_out)
    group = inputs.q.shape[2] // inputs.v.shape[2]
    expected = {
        "out": inputs.v.repeat_interleave(group, 2),
        "dv": d_out.double().unflatten(2, (-1, group)).sum(3),
    }
    for name, x in results.items():
        want = expected.get(name, torch.zeros_like(x)).to(x.dtype)
        assert torch.allclose(x, want, rtol=torch.finfo(x.dtype).eps, atol=1e-4), name


# The definition, in every corner


@pytest.mark.parametrize("kind", ["path", "path_fox"])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 128, 130, 190, 257, 320, 520])
def test_lengths(T, kind):
    """Catches an off-by-one at a chunk or where the tree of blocks is cut, a row left unwritten."""
    check(small(T, **KINDS[kind]))


@pytest.mark.parametrize("kind", ["fox", "nope"])
@pytest.mark.parametrize("T", [1, 64, 190, 257])
def test_lengths_without_reflections(T, kind):
    """Catches a path that still reads w, or levels that are not there."""
    check(small(T, **KINDS[kind]))


WIDTHS = [(257, 5, 7), (257, 24, 16), (130, 16, 40), (520, 96, 24), (190, 64, 1), (130, 32, 128)]


@pytest.mark.parametrize("T, D, DV", WIDTHS)
def test_widths(T, D, DV):
    """Catches columns beyond the width that are read or written, and D taken for DV."""
    check(small(T, HQ=1, H=1, D=D, DV=DV, gate=True))


@pytest.mark.parametrize("T, HQ, H", [(190, 3, 1), (130, 4, 2), (260, 2, 2)])
def test_groups_of_heads(T, HQ, H):
    """Catches a query head that reads another group's keys, and dk or dw of one query head only."""
    check(small(T, B=2 if H == 2 else 1, HQ=HQ, H=H, gate=True))


BORDERS = {
    "at chunk edges": (64, 128, 256),
    "beside chunk edges": (63, 65, 127, 129, 255, 257),
    "of one token": (100, 101, 102, 103, 104),
    "of one token at an edge": (127, 128, 129, 256, 257),
    "in the last token": (299,),
}


@pytest.mark.parametrize("kind", ["path", "fox"])
@pytest.mark.parametrize("borders", BORDERS)
def test_documents(borders, kind):
    """Catches a tile that is skipped though a row needs it, and a product that crosses a border."""
    inputs = small(300, **KINDS[kind])
    check(inputs._replace(document_start=starts(300, *BORDERS[borders])))


@pytest.mark.parametrize("kind", ["path_fox", "fox"])
def test_documents_of_one_token_each(kind):
    """Catches a row without keys of its own chunk: 0 / 0, or a maximum of -inf."""
    inputs = small(200, **KINDS[kind])
    assert_every_token_sees_itself(inputs._replace(document_start=starts(200, *range(200))))


def test_documents_differ_between_rows_of_a_batch():
    """Catches document starts that are read from the first row, or at a head's stride."""
    check(small(200, B=2, H=1, gate=True, documents=True))


@pytest.mark.parametrize("beta", ["zero", "one", "two", "high"])
@pytest.mark.parametrize("w", ["random", "constant"])
def test_edges_of_beta(beta, w):
    """Catches an unstable solve, a division by a singular product, a loss of digits in dbeta."""
    # A chunk's inverse, in fp32, loses three bits to nearly parallel w: dbeta 2e-5 interpreted.
    slack = 10 if w == "constant" else 1
    check(small(257, HQ=1, H=1, w=w, beta=beta, gate=True), slack=slack)


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision(kind, dtype):
    """Catches a rounding of a sum, and what only the tiles of 16-bit inputs get wrong."""
    check(small(330, dtype, D=32, **KINDS[kind]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    """Catches strides of another tensor, contiguity taken for granted, reads beyond the tensor."""
    inputs = small(130, B=2, D=24, DV=16, gate=True, documents=True)
    moved = inputs.map(lambda x: LAYOUTS[layout](x.detach()).requires_grad_())
    exact = run(path_attention_reference, inputs.leaves(torch.float64), gradient_of_out(inputs))
    assert_within_limits(run(kernels, moved, gradient_of_out(inputs)), exact, torch.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_the_gradient(layout):
    """Catches a backward that needs a contiguous d(out)."""
    inputs = small(100, B=2, DV=24)
    check(inputs, d_out=LAYOUTS[layout](gradient_of_out(inputs)))


def test_expanded_gradient_of_the_output():
    """Catches a stride of 0 read as 1: sum().backward() hands out one number."""
    inputs = small(130)
    check(inputs, d_out=torch.ones((), device=DEVICE).expand(1, 130, 2, 16))


def test_scale_and_gate_scale():
    """Catches a gate multiplied by the scale, and a scale left out of a gradient."""
    check(small(130, gate=True), scale=0.3, gate_scale=0.7)


@pytest.mark.parametrize("scale", [-0.4, 0.0])
@pytest.mark.parametrize("options", [{}, dict(gate=True), dict(documents=True)])
def test_scales_that_are_not_positive(scale, options):
    """Catches a softmax that takes the largest dot product for the largest logit."""
    check(small(200, **options), scale=scale)


@pytest.mark.parametrize("shift", [-30.0, 20.0])
def test_strong_gates(shift):
    """Catches overflow of exp2 above the diagonal or in padded rows, and gates lost to a long sum.

    Nearly one key is seen, and gradients cancel to nothing: errors are measured against 1.
    """
    inputs = small(200, H=1, gate=True, documents=True)
    inputs = inputs._replace(log_gate=(inputs.log_gate.detach() + shift).requires_grad_())
    d_out = gradient_of_out(inputs)
    exact = run(path_attention_reference, inputs.leaves(torch.float64), d_out)
    assert_exact(run(kernels, inputs, d_out), exact, 1e-4 if DEVICE == "cpu" else 5e-3)


def test_gates_far_from_the_start_keep_their_differences():
    """Catches an fp32 running sum: after -25,700 its steps are 0.002, and gates are lost."""
    inputs = small(330, H=1, gate=True)
    with torch.no_grad():
        inputs.log_gate[:, :257] = -100.0
    check(inputs)


# Promises beside the numbers


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_linear_in_the_gradient_of_the_output(kind, dtype):
    """Catches an fp16 tensor or an epsilon in the backward: powers of two scale every bit alike."""
    inputs = small(140, dtype, **KINDS[kind])
    d_out = gradient_of_out(inputs)
    expected = run(kernels, inputs, d_out)
    actual = run(kernels, inputs, d_out * 2**-27)
    for name in expected.keys() - {"out"}:
        assert torch.equal(actual[name] * 2**27, expected[name]), name


def test_small_gradients_survive_fp16_inputs():
    """Catches fp16 in the backward of fp16 inputs: at 1e-7 it has no digits left.

    beta and the gate take fp32 gradients, so those are where the loss would show.
    """
    inputs = small(140, torch.float16, gate=True)
    d_out = gradient_of_out(inputs, 2.0**-10)
    exact = run(path_attention_reference, inputs.leaves(torch.float64), d_out)
    actual = run(kernels, inputs, d_out)
    for name in ("dbeta", "dlog_gate"):
        assert relative_error(actual[name], exact[name]) < LIMITS[torch.float16][2], name


@pytest.mark.parametrize("B, HQ, H", [(2, 1, 1), (1, 4, 2)])
def test_scratch_is_bounded_by_groups_of_heads_with_the_same_bits(B, HQ, H, monkeypatch):
    """Catches a group of heads that writes beside its slice, or reads the first group's."""
    inputs = small(140, B=B, HQ=HQ, H=H, gate=True, documents=True)
    expected = run(kernels, inputs)
    monkeypatch.setattr(config, "SCRATCH_BYTES", 1)
    assert_same_bits(run(kernels, inputs), expected)


def test_sums_over_long_blocks_in_parts(monkeypatch):
    """Catches a part that is left out of the gradient of a block's product, or counted twice."""
    monkeypatch.setattr(config, "PRODUCT_ROWS", 64)
    check(small(520, HQ=1, H=1, documents=True))


def test_two_runs_give_the_same_bits():
    """Catches an atomic, and a result that depends on what memory held before."""
    inputs = small(260, H=1, gate=True, documents=True)
    assert_same_bits(run(kernels, inputs), run(kernels, inputs))


@pytest.mark.parametrize("w", ["random", None])
@pytest.mark.parametrize("border", [128, 256])
def test_tiles_without_a_visible_pair_are_skipped(border, w):
    """Catches a mask that costs the whole triangle: NaN times a weight of 0 would show.

    The border lies on the edge of every tile, once inside a dyadic block and once on its edge.
    """
    inputs = small(512, HQ=1, H=1, w=w)._replace(document_start=starts(512, border))
    expected = run(kernels, inputs)

    def spoil(x):
        x = x.detach().clone()
        x[:, :border] = float("nan")
        return x.requires_grad_()

    actual = run(kernels, inputs.map(spoil))
    for name, want in expected.items():
        assert torch.equal(actual[name][:, border:], want[:, border:]), name


@pytest.mark.parametrize("kind", KINDS)
def test_lse_is_the_natural_log_sum_exp(kind):
    """Catches base 2, and a row maximum that is not added back."""
    inputs = small(140, **KINDS[kind]).map(torch.detach)
    _, actual = torch.ops.path_backend.attention(*inputs, 0.25, "triton")
    exact = inputs.map(torch.Tensor.double)
    _, expected = torch.ops.path_backend.attention(*exact, 0.25, "torch")
    assert actual.dtype == torch.float32
    assert (actual - expected).abs().max() < (1e-5 if DEVICE == "cpu" else 3e-3)


UNCOVERED = [
    (dict(dtype=torch.float64), "dtype torch.float64 is not bfloat16, float16 or float32"),
    (dict(D=144, dtype=torch.float32), "q has head width 144, the kernels hold at most 128"),
    (dict(DV=144, dtype=torch.float32), "v has head width 144, the kernels hold at most 128"),
    (dict(w=None, D=272, dtype=torch.float32), "q has head width 272, the kernels hold at most"),
]


@pytest.mark.parametrize("case, message", UNCOVERED)
def test_uncovered_cases_are_refused_by_name(case, message):
    """Catches a request for kernels that gets the torch form, or fails inside the compiler."""
    inputs = make_inputs(10, device=DEVICE, **case)
    expected = f"implementation='triton' does not cover this call: {message}"
    with pytest.raises(NotImplementedError, match=expected):
        inputs.call(kernels)


# The ops on kernels, as dispatcher, compiler and checkpointing see them


def op_arguments(kind, layout=lambda x: x):
    inputs = small(70, **KINDS[kind])
    return inputs.map(lambda x: layout(x.detach()).requires_grad_())


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_forward(kind):
    """Catches kernels whose outputs differ from the fake's in shape, dtype or strides."""
    arguments = (*op_arguments(kind), 0.25, "triton")
    torch.library.opcheck(torch.ops.path_backend.attention.default, arguments)


@pytest.mark.parametrize(
    "kind, layout", [*((kind, "as is") for kind in KINDS), *(("path_fox", x) for x in LAYOUTS)]
)
def test_opcheck_backward(kind, layout):
    """Catches the same of the gradients: compiled code that follows assumes the fake's strides."""
    inputs = op_arguments(kind, LAYOUTS.get(layout, lambda x: x)).map(torch.detach)
    out, lse = torch.ops.path_backend.attention(*inputs, 0.25, "triton")
    arguments = (torch.randn_like(out), *inputs, out, lse, 0.25, "triton")
    torch.library.opcheck(torch.ops.path_backend.attention_backward.default, arguments)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_compiles_into_one_graph(backend):
    """Catches a graph break, and strides that differ between the traced and the real op."""
    torch._dynamo.reset()

    def layer(q, *rest, **options):
        return path_attention(2 * q, *rest, implementation="triton", **options).sin()

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    inputs = small(130, **KINDS["path_fox"])
    expected = run(layer, inputs)
    for name, x in run(compiled, inputs).items():
        assert torch.allclose(x, expected[name], rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("saved, expected", [(True, 1), (False, 2)])
def test_selective_checkpointing_keeps_the_output(monkeypatch, saved, expected):
    """Catches kernels that a policy cannot see: the forward would run twice per step."""
    calls, forward = [], launch.attention_forward
    monkeypatch.setattr(
        launch, "attention_forward", lambda *args: (calls.append(None), forward(*args))[1]
    )
    operators = [torch.ops.path_backend.attention.default] if saved else []
    contexts = partial(create_selective_checkpoint_contexts, operators)
    inputs = small(70)
    out = checkpoint(kernels, *inputs[:5], use_reentrant=False, context_fn=contexts)
    out.sum().backward()
    assert len(calls) == expected
    assert inputs.w.grad is not None


# Real sizes, on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["path", "path_fox", "fox"])
@pytest.mark.parametrize("T", [1, 63, 130, 2000, 4096, 33000])
def test_real_lengths(T, kind):
    """Catches what needs many tiles: pipelines, int32 offsets, reductions in parts."""
    check(small(T, torch.bfloat16, D=64, **KINDS[kind]), torch_form)


@pytest.mark.gpu
def test_the_longest_sequence():
    """Catches offsets beyond 2^31 elements, and levels that only a long sequence has."""
    case = dict(B=2, HQ=2, H=1, D=128, gate=True, documents=True)
    check(small(131_072, torch.bfloat16, **case), torch_form)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("D", [32, 64, 96, 128])
@pytest.mark.parametrize("kind", ["path_fox", "fox"])
def test_real_widths(kind, D, dtype):
    """Catches a tile configuration that does not fit the card, or that nobody ever compiled."""
    check(small(2000, dtype, D=D, **KINDS[kind]), torch_form)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LIMITS)
def test_wide_heads_without_reflections(dtype):
    """Catches shared memory that overflows at a width of 256."""
    check(small(2000, dtype, D=256, **KINDS["fox"]), torch_form)


@pytest.mark.gpu
def test_wide_heads_with_reflections_fall_back_and_say_so():
    """Catches a silent slow path, and a launch that the card refuses."""
    ops._announce.cache_clear()
    inputs = small(200, D=256)
    with pytest.warns(UserWarning, match="not on kernels: q has head width 256"):
        actual = run(path_attention, inputs)
    assert_same_bits(actual, run(torch_form, inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_auto_runs_the_kernels(kind):
    """Catches a default that never reaches them."""
    inputs = small(300, torch.bfloat16, **KINDS[kind])
    assert_same_bits(run(path_attention, inputs), run(kernels, inputs))


HARD = {
    "random": dict(),
    "beta in [1.9, 2]": dict(beta="high"),
    "nearly constant w, beta 2": dict(w="constant", beta="two"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [1.0, 1e-8])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("case", HARD)
@pytest.mark.parametrize("D", [64, 128])
def test_accuracy_at_4096(D, case, gate, factor):
    """Catches a product in too few digits, and gradients that underflow at a real loss's scale.

    beta is clipped against the rounded w, as the layer does.
    """
    inputs = small(4096, torch.bfloat16, D=D, gate=gate, **HARD[case])
    beta, _ = beta_from_logits(torch.logit(inputs.beta.detach() / 2), inputs.w.detach())
    check(inputs._replace(beta=beta.requires_grad_()), torch_form, factor=factor)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [dict(HQ=1, H=1), dict(B=2, HQ=8, H=2)])
def test_two_real_runs_give_the_same_bits(heads):
    """Catches an atomic, a race between warps, a scan whose order depends on the schedule."""
    inputs = small(33_000, torch.bfloat16, D=128, gate=True, documents=True, **heads)
    expected = run(kernels, inputs)
    for _ in range(3):
        assert_same_bits(run(kernels, inputs), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["path_fox", "nope"])
def test_lengths_compile_nothing_new(kind, monkeypatch):
    """Catches specialisation on T or on a stride that follows it: seconds at every new length.

    Warmed up by one length of one chunk, of two, and of many.
    """
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **event: compiled.append(event)
    )

    def compilations(*lengths):
        compiled.clear()
        for T in lengths:
            run(kernels, small(T, torch.bfloat16, D=80, **KINDS[kind]))
        return [event["repr"] for event in compiled]

    # No other test has this width, so what is warm does not depend on their order.
    assert compilations(40, 100, 5000), "the hook sees no compilation"
    short = (1, 2, 16, 63, 64, 65, 96, 127, 128, 129, 192, 250, 256)
    assert not compilations(*short, 257, 500, 512, 1000, 2048, 3333, 4096)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["path", "path_fox", "fox"])
def test_memory_grows_linearly(kind):
    """Catches scratch of T x T, or of T times the number of tiles."""

    def extra(T):
        inputs = small(T, torch.bfloat16, D=64, **KINDS[kind])
        d_out = gradient_of_out(inputs)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(kernels, inputs, d_out)
        return torch.cuda.max_memory_allocated() - before

    peaks = [extra(T) for T in (8192, 16_384, 32_768, 65_536)]
    for short, long in zip(peaks, peaks[1:], strict=False):
        assert long < 2.6 * short, [f"{peak / 2**20:.0f} MiB" for peak in peaks]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["path_fox", "fox"])
@pytest.mark.parametrize("length", [1, 100, 2048])
def test_real_documents(length, kind):
    """Catches tiles skipped or kept by the wrong border where a row of tiles is long."""
    inputs = small(32_768, torch.bfloat16, D=64, **KINDS[kind])
    position = torch.arange(32_768, dtype=torch.int32, device=DEVICE)
    start = (position // length * length)[None]
    inputs = inputs._replace(document_start=start)
    if length > 1:
        check(inputs, torch_form)
    else:
        assert_every_token_sees_itself(inputs)
