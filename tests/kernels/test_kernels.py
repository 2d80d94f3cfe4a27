"""The Triton kernels against the definition, and what the kernels promise beside it.

Small shapes run wherever the tests run: on a GPU compiled, elsewhere in Triton's interpreter, which
computes bf16 products wrongly and is given fp32 and fp16. Memory from torch.empty holds NaN
throughout. bf16 and real sizes: test_kernel_sizes.py.
"""

import importlib
import pkgutil
from dataclasses import replace

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
    assert_within_limits,
    check,
    gradient_of_out,
    kernels,
    on_device,
    torch_form,
)
from op_checks import (
    opcheck_backward,
    opcheck_forward,
    runs_under_selective_checkpointing,
)

from path_backend import ops, path_attention
from path_backend.arguments import CrossSegment
from path_backend.inference import CacheSpec, PathCache
from path_backend.reference import path_attention_reference
from path_backend.testing import as_leaves, assert_exact, make_inputs, relative_error, run

triton = pytest.importorskip("triton")
from triton.runtime.jit import KernelInterface  # noqa: E402

from path_backend.kernels import backend, config  # noqa: E402
from path_backend.kernels.frames_launch import make_frames  # noqa: E402
from path_backend.kernels.operands import _even_parts, prepare, readable, with_offsets_in_32_bits  # noqa: E402

pytestmark = NAN_IN_ALL_MEMORY


def gpu(**case):
    """A case for the card alone, in which test_kernel_sizes.py compiles the same kernels."""
    return pytest.param(case, marks=pytest.mark.gpu)


@pytest.fixture
def unchecked_values(monkeypatch):
    """Lets a call through that `path_backend.checks` refuses on a CPU, as a GPU does."""
    monkeypatch.setattr(ops, "check_values", lambda inputs: None)


def starts(T, *begins):
    """document_start [1, T] of documents that begin at 0 and at each of `begins`."""
    start = torch.zeros(1, T, dtype=torch.int32, device=DEVICE)
    for begin in begins:
        start[:, begin:] = begin
    return start


# The definition, in every corner


@pytest.mark.parametrize("kind", ["path", "path_fox"])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 128, 130, 190, 257, 320, 520])
def test_lengths(T, kind):
    """Catches an off-by-one at a chunk or where levels are cut, a row left unwritten."""
    check(on_device(T, **KINDS[kind]))


@pytest.mark.parametrize("kind", ["fox", "nope"])
@pytest.mark.parametrize("T", [1, 64, 190, 257])
def test_lengths_without_reflections(T, kind):
    """Catches a path that still reads w, or levels that are not there."""
    check(on_device(T, **KINDS[kind]))


WIDTHS = [(257, 5, 7), (257, 24, 16), (130, 16, 40), (520, 96, 24), (190, 64, 1), (130, 32, 128)]


@pytest.mark.parametrize("T, D, DV", WIDTHS)
def test_widths(T, D, DV):
    """Catches columns beyond the width that are read or written, and D taken for DV."""
    check(on_device(T, HQ=1, H=1, D=D, DV=DV, gate=True))


@pytest.mark.parametrize("T, HQ, H", [(190, 3, 1), (130, 4, 2), (260, 2, 2)])
def test_groups_of_heads(T, HQ, H):
    """Catches a query head that reads another group's keys, and dk or dw of one query head only."""
    check(on_device(T, B=2 if H == 2 else 1, HQ=HQ, H=H, gate=True))


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
    inputs = on_device(300, **KINDS[kind])
    check(inputs._replace(document_start=starts(300, *BORDERS[borders])))


@pytest.mark.parametrize("kind", ["path_fox", "fox"])
def test_documents_of_one_token_each(kind):
    """Catches a row without keys of its own chunk: 0 / 0, or a maximum of -inf."""
    inputs = on_device(200, **KINDS[kind])
    assert_every_token_sees_itself(inputs._replace(document_start=starts(200, *range(200))))


def test_documents_differ_between_rows_of_a_batch():
    """Catches document starts that are read from the first row, or at a head's stride."""
    check(on_device(200, B=2, H=1, gate=True, documents=True))


@pytest.mark.parametrize("beta", ["zero", "one", "two", "high"])
@pytest.mark.parametrize("w", ["random", "constant"])
def test_edges_of_beta(beta, w):
    """Catches an unstable solve, a division by a singular product, a loss of digits in dbeta."""
    # A chunk's inverse, in fp32, loses three bits to nearly parallel w: dbeta 2e-5 interpreted.
    slack = 10 if w == "constant" else 1
    check(on_device(257, HQ=1, H=1, w=w, beta=beta, gate=True), slack=slack)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision(kind):
    """Catches a rounding of a sum, and what only the tiles of 16-bit inputs get wrong."""
    check(on_device(330, torch.float16, D=32, **KINDS[kind]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    """Catches strides of another tensor, contiguity taken for granted, reads beyond the tensor."""
    inputs = on_device(130, B=2, D=24, DV=16, gate=True, documents=True)
    moved = inputs.map_floating(lambda x: LAYOUTS[layout](x.detach()).requires_grad_())
    exact = run(path_attention_reference, as_leaves(inputs, torch.float64), gradient_of_out(inputs))
    assert_within_limits(run(kernels, moved, gradient_of_out(inputs)), exact, torch.float32)


def test_heads_that_32_bits_do_not_reach_are_copied():
    """Catches the offset of a head that overflows: whole sequences lie between two heads here."""
    T, H, D = 2**17, 128, 128
    x = torch.empty(1, T, H, D, dtype=torch.bfloat16, device="meta")
    by_head = x.new_empty(1, H, T, D).transpose(1, 2)
    assert readable(x) is x
    assert readable(by_head).stride() == x.stride()
    assert readable(by_head[:, :, :127]).stride(2) == T * D


def test_betas_that_32_bits_do_not_reach_are_copied():
    """Catches the offset of a token that overflows: beta is a column of a wide tensor here."""
    wide = torch.empty(1, 2**17, 2**14, device="meta")
    assert with_offsets_in_32_bits(wide[:, :, :8]).stride(1) == 8
    assert with_offsets_in_32_bits(wide[:, : 2**16, :8]).stride(1) == 2**14


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_the_gradient(layout):
    """Catches a backward that needs a contiguous d(out)."""
    inputs = on_device(100, B=2, DV=24)
    check(inputs, d_out=LAYOUTS[layout](gradient_of_out(inputs)))


def test_expanded_gradient_of_the_output():
    """Catches a stride of 0 read as 1: sum().backward() hands out one number."""
    inputs = on_device(130)
    check(inputs, d_out=torch.ones((), device=DEVICE).expand(1, 130, 2, 16))


def test_scale_and_gate_scale():
    """Catches a gate multiplied by the scale, and a scale left out of a gradient."""
    check(on_device(130, gate=True), scale=0.3, gate_scale=0.7)


@pytest.mark.parametrize("scale", [-0.4, 0.0])
@pytest.mark.parametrize("options", [{}, dict(gate=True), dict(documents=True)])
def test_scales_that_are_not_positive(scale, options):
    """Catches a softmax that takes the largest dot product for the largest logit."""
    check(on_device(200, **options), scale=scale)


@pytest.mark.usefixtures("unchecked_values")
@pytest.mark.parametrize("shift", [-30.0, 20.0])
def test_strong_gates(shift):
    """Catches overflow of exp2 above the diagonal or in padded rows, and gates lost to a long sum.

    Nearly one key is seen, and gradients cancel to nothing: errors are measured against 1.
    """
    inputs = on_device(200, H=1, gate=True, documents=True)
    inputs = inputs._replace(log_gate=(inputs.log_gate.detach() + shift).requires_grad_())
    d_out = gradient_of_out(inputs)
    exact = run(path_attention_reference, as_leaves(inputs, torch.float64), d_out)
    assert_exact(run(kernels, inputs, d_out), exact, 1e-4 if DEVICE == "cpu" else 5e-3)


def test_gates_far_from_the_start_keep_their_differences():
    """Catches an fp32 running sum: after -25,700 its steps are 0.002, and gates are lost."""
    inputs = on_device(330, H=1, gate=True)
    with torch.no_grad():
        inputs.log_gate[:, :257] = -100.0
    check(inputs)


# Promises beside the numbers


@pytest.fixture
def launches(monkeypatch):
    """A list that grows by (kernel, keyword arguments) at each launch."""
    launches, start = [], KernelInterface.__getitem__

    def recorded(kernel, grid):
        def call(*args, **arguments):
            launches.append((kernel, arguments))
            return start(kernel, grid)(*args, **arguments)

        return call

    monkeypatch.setattr(KernelInterface, "__getitem__", recorded)
    return launches


@pytest.mark.parametrize("kind", ["fox", "nope"])
def test_no_transform_without_reflections(kind, launches):
    """Catches chunks, upsweeps or carries that run for attention that has no use for them."""
    run(kernels, on_device(260, **KINDS[kind]))
    names = {kernel.fn.__name__ for kernel, _ in launches}
    assert "attention_dq_kernel" in names
    assert not {name for name in names for part in ("chunk", "upsweep", "carry") if part in name}


def test_every_kernel_runs_here(launches, monkeypatch):
    """Catches a kernel that no test on a CPU would run: here each of the package is launched."""
    monkeypatch.setattr(config, "PRODUCT_ROWS", 64)
    inputs = on_device(260, H=1, gate=True, documents=True)
    run(kernels, inputs)
    q, k, v = inputs.map_floating(torch.detach)[:3]
    out, lse = torch.zeros_like(q), q.new_zeros(1, 2, 260)
    pair = CrossSegment(q, k, v, None, None, None)
    backend.cross_segment_forward(pair, 1.0, out, lse)
    backend.cross_segment_backward(out, pair, lse, lse, 1.0)
    spec = CacheSpec(2, 1, 16, 16, torch.float32, forget_gate=True, group=4, prune=10.0)
    cache = PathCache(spec, inputs.q.shape[0], device=DEVICE, implementation="triton")
    for t in range(9):  # two groups are closed, and merged
        cache.attend(*(x[:, t : t + 1] for x in inputs.map_floating(torch.detach).floating))
    package = importlib.import_module("path_backend.kernels")
    modules = [
        importlib.import_module(f"{package.__name__}.{module.name}")
        for module in pkgutil.iter_modules(package.__path__)
    ]
    expected = {
        name
        for module in modules
        for name, x in vars(module).items()
        if isinstance(x, KernelInterface) and name.endswith("_kernel")
    }
    assert len(expected) >= 10
    assert {kernel.fn.__name__ for kernel, _ in launches} == expected


OF_KEYS = "k v w beta inverse product k_levels dk dk_moved dk_end dv dw d_beta dx gradient".split()


def shape_of(argument):
    """Returns the shape of a tensor, by itself or as a kernel loads tiles of it."""
    return tuple((argument[0] if isinstance(argument, tuple) else argument).shape)


def test_tensors_of_keys_do_not_grow_with_the_query_heads(launches, monkeypatch):
    """Catches k, v, w, or what is made of them, expanded to every query head."""
    monkeypatch.setattr(config, "PRODUCT_ROWS", 64)

    def sizes(HQ):
        launches.clear()
        run(kernels, on_device(260, HQ=HQ, H=1, gate=True))
        return {
            (name, kind, kernel.fn.__name__, i): shape_of(arguments[f"{name}_{kind}"])
            for i, (kernel, arguments) in enumerate(launches)
            for name in OF_KEYS
            for kind in ("ptr", "ptrs", "tiles")
            if arguments.get(f"{name}_{kind}") is not None
        }

    one = sizes(1)
    assert {"k", "v", "w", "k_levels", "dk", "dv", "dw"} <= {name for name, *_ in one}
    assert sizes(4) == one


DTYPES = [dict(dtype=torch.float16), gpu(dtype=torch.bfloat16)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("w", ["random", "constant"])
def test_the_triangular_solve_is_exact_to_fp32(w, dtype):
    """Catches tf32 in it (errors of 8e-3 for nearly parallel w) and the doubling series (1e20).

    Sums in a tensor core are truncated, not rounded: on H200 the error is 3.4 times that of fp32.
    """
    rounds = 4 if torch.cuda.is_available() else 2
    x = on_device(128, **dtype, D=64, w=w, beta="two").map(torch.detach)
    actual = make_frames(prepare(x._replace(document_start=None), 1.0)).inverse
    w = x.w.double().transpose(1, 2).unflatten(2, (-1, 64))
    beta = x.beta.double().transpose(1, 2).unflatten(2, (-1, 64))
    eye = torch.eye(64, dtype=torch.float64, device=DEVICE)
    triangle = eye + (beta[..., None] * (w @ w.mT)).triu(1)
    exact = torch.linalg.inv(triangle)
    plain = torch.linalg.solve_triangular(triangle.float(), eye.float(), upper=True)
    limit = rounds * relative_error(plain, exact) + torch.finfo(torch.float32).eps
    assert relative_error(actual, exact) < limit


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [dict(T=140), gpu(T=330, D=64, dtype=torch.bfloat16)], ids=str)
def test_gradients_are_linear_in_the_gradient_of_the_output(size, kind):
    """Catches an fp16 tensor or an epsilon in the backward: powers of two scale every bit alike."""
    inputs = on_device(**size, **KINDS[kind])
    d_out = gradient_of_out(inputs)
    expected = run(kernels, inputs, d_out)
    actual = run(kernels, inputs, d_out * 2**-27)
    for name in expected.keys() - {"out"}:
        assert torch.equal(actual[name] * 2**27, expected[name]), name


@pytest.mark.parametrize("size", [dict(T=140), gpu(T=2000, D=64)], ids=str)
def test_small_gradients_survive_fp16_inputs(size):
    """Catches fp16 in the backward of fp16 inputs: at 1e-7 it has no digits left.

    beta and the gate take fp32 gradients, so those are where the loss would show.
    """
    inputs = on_device(**size, dtype=torch.float16, **KINDS["path_fox"])
    d_out = gradient_of_out(inputs, 2.0**-10)
    exact = run(torch_form, as_leaves(inputs, torch.float64), d_out)
    actual = run(kernels, inputs, d_out)
    for name in ("dbeta", "dlog_gate"):
        assert relative_error(actual[name], exact[name]) < LIMITS[torch.float16][2], name


@pytest.mark.parametrize("B, HQ, H", [(2, 1, 1), (1, 4, 2)])
def test_scratch_is_bounded_by_groups_of_heads_with_the_same_bits(B, HQ, H, monkeypatch):
    """Catches a group of heads that writes beside its slice, or reads the first group's."""
    inputs = on_device(140, B=B, HQ=HQ, H=H, gate=True, documents=True)
    expected = run(kernels, inputs)
    monkeypatch.setattr(config, "SCRATCH_BYTES", 1)
    assert_same_bits(run(kernels, inputs), expected)


def test_more_heads_than_a_grid_holds(monkeypatch):
    """Catches a launch that a card refuses: its second dimension ends at 65,535 programs."""
    inputs = on_device(70, B=3, HQ=4, H=2, w=None, gate=True, documents=True)
    expected = run(kernels, inputs)
    for most in (4, 2):
        monkeypatch.setattr(config, "MAX_HEADS", most)
        assert_same_bits(run(kernels, inputs), expected)


def test_sums_over_long_blocks_in_parts(monkeypatch):
    """Catches a part that is left out of the gradient of a block's product, or counted twice."""
    monkeypatch.setattr(config, "PRODUCT_ROWS", 64)
    check(on_device(520, HQ=1, H=1, documents=True))


def test_two_runs_give_the_same_bits():
    """Catches an atomic, and a result that depends on what memory held before."""
    inputs = on_device(260, H=1, gate=True, documents=True)
    assert_same_bits(run(kernels, inputs), run(kernels, inputs))


@pytest.mark.usefixtures("unchecked_values")
@pytest.mark.parametrize("w", ["random", None])
@pytest.mark.parametrize("border", [128, 256])
def test_tiles_without_a_visible_pair_are_skipped(border, w):
    """Catches a mask that costs the whole triangle: NaN times a weight of 0 would show.

    The border lies on the edge of every tile, once inside a dyadic block and once on its edge.
    """
    inputs = on_device(512, HQ=1, H=1, w=w)._replace(document_start=starts(512, border))
    expected = run(kernels, inputs)

    def spoil(x):
        x = x.detach().clone()
        x[:, :border] = float("nan")
        return x.requires_grad_()

    actual = run(kernels, inputs.map_floating(spoil))
    for name, want in expected.items():
        assert torch.equal(actual[name][:, border:], want[:, border:]), name


@pytest.mark.parametrize("kind", KINDS)
def test_lse_is_the_natural_log_sum_exp(kind):
    """Catches base 2, and a row maximum that is not added back."""
    inputs = on_device(140, **KINDS[kind]).map(torch.detach)
    _, actual = torch.ops.path_backend.attention(*inputs, 0.25, "triton")
    exact = inputs.map_floating(torch.Tensor.double)
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


@pytest.mark.parametrize(
    "there, case, reason",
    [
        (99, dict(), None),
        (99, dict(D=64, dtype=torch.float32), None),
        (99, dict(w=None, D=256), None),
        (99, dict(w=None, dtype=torch.float32), None),
        (
            99,
            dict(dtype=torch.float32),
            "161 KiB of shared memory at this head width, there are 99",
        ),
        (99, dict(dtype=torch.float16), "torch.float16 takes 161 KiB"),
        (99, dict(D=64, DV=128, dtype=torch.float32), "161 KiB"),
        (163, dict(dtype=torch.float32), None),
        (163, dict(w=None, D=256, dtype=torch.float32), "192 KiB"),
    ],
)
def test_cards_with_too_little_shared_memory_are_named(there, case, reason, monkeypatch):
    """Catches a case that a small card fails in the backend, and one that it would have run."""
    card = replace(config.SM_90, shared_memory=there)
    monkeypatch.setattr(config, "architecture", lambda: card)
    inputs = make_inputs(10, **{"D": 128, "dtype": torch.bfloat16, **case})
    actual = backend.unsupported_reason(inputs)
    assert actual is None if reason is None else reason in actual


@pytest.mark.parametrize("count, most", [(16, 16), (16, 7), (8, 3), (17, 4), (5, 1), (1, 9)])
def test_groups_are_few_and_even(count, most):
    """Catches a last group that leaves SMs idle, and one that takes more scratch than the first."""
    parts = _even_parts(count, most)
    sizes = [part.stop - part.start for part in parts]
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(count))
    assert len(parts) == -(-count // most)
    assert sizes[0] == max(sizes) <= min(sizes) + 1
    assert sizes[0] <= most


# The ops on kernels, as dispatcher, compiler and checkpointing see them


def op_arguments(kind, layout=lambda x: x):
    inputs = on_device(70, **KINDS[kind])
    return inputs.map_floating(lambda x: layout(x.detach()).requires_grad_())


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_forward(kind):
    """Catches kernels whose outputs differ from the fake's in shape, dtype or strides."""
    opcheck_forward("attention", op_arguments(kind), 0.25, "triton")


@pytest.mark.parametrize(
    "kind, layout", [*((kind, "as is") for kind in KINDS), *(("path_fox", x) for x in LAYOUTS)]
)
def test_opcheck_backward(kind, layout):
    """Catches the same of the gradients: compiled code that follows assumes the fake's strides."""
    inputs = op_arguments(kind, LAYOUTS.get(layout, lambda x: x))
    opcheck_backward("attention", inputs, 0.25, "triton")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_compiles_into_one_graph(backend):
    """Catches a graph break, and strides that differ between the traced and the real op."""
    torch._dynamo.reset()

    def layer(q, *rest, **options):
        return path_attention(2 * q, *rest, implementation="triton", **options).sin()

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    inputs = on_device(130, **KINDS["path_fox"])
    expected = run(layer, inputs)
    for name, x in run(compiled, inputs).items():
        assert torch.allclose(x, expected[name], rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("saved, expected", [(True, 1), (False, 2)])
def test_selective_checkpointing_keeps_the_output(monkeypatch, saved, expected):
    """Catches kernels that a policy cannot see: the forward would run twice per step."""
    arguments = (backend, "attention_forward", "attention", kernels, on_device(70), saved)
    assert runs_under_selective_checkpointing(monkeypatch, *arguments) == expected
