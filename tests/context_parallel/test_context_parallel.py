"""Context parallelism equals one device: output and every gradient, of every token.

All ranks are simulated in threads here; test_process_groups.py has real groups.
"""

import weakref

import pytest
import torch
from context_simulation import gradient_of_out, shard, simulate
from kernel_checks import assert_within_limits

from path_backend import path_attention
from path_backend.arguments import Inputs
from path_backend.benchmarks.context_parallel import bytes_sent
from path_backend.context_parallel import by_tokens
from path_backend.context_parallel.collectives import Ring
from path_backend.context_parallel.layout import Layout
from path_backend.eager import attention, segments
from path_backend.testing import as_leaves, assert_exact, make_inputs, relative_error, run

EXACT = 1e-10
METHODS = ("allgather", "ring")
CASES = {
    "path": dict(DV=8),
    "path, beta in [1.9, 2]": dict(beta="high", w="constant"),
    "path, singular products": dict(beta="one"),
    "path_fox": dict(HQ=4, gate=True, documents=True, B=2),
    "fox": dict(w=None, HQ=4, gate=True),
    "nope": dict(w=None, documents=True),
}
LAYOUTS = {
    "1 rank": Layout.head_tail(1, 20),
    "2, contiguous": Layout.contiguous(2, 40),
    "2, head-tail": Layout.head_tail(2, 20),
    "4, contiguous": Layout.contiguous(4, 20),
    "4, head-tail": Layout.head_tail(4, 20),
    "8, contiguous": Layout.contiguous(8, 20),
    "8, head-tail": Layout.head_tail(8, 20),
    "2, in disorder": Layout(((60, 0, 100), (40, 80, 20)), 20),
}


def check(inputs, layout, method):
    d_out = gradient_of_out(inputs)
    expected = run(path_attention, inputs, d_out)
    assert_exact(simulate(inputs, d_out, layout, method), expected, EXACT)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_equals_one_device(monkeypatch, case, layout, method):
    """Catches a product, gate or gradient that is lost, doubled or misplaced between segments."""
    monkeypatch.setattr(attention, "CHUNK", 8)
    layout = LAYOUTS[layout]
    check(make_inputs(layout.segments * layout.length, **CASES[case]), layout, method)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_ulysses_equals_one_device(case, layout):
    """Catches heads and tokens mixed up on their way: any order of segments, GQA, documents."""
    layout = LAYOUTS[layout]
    heads = dict(H=8, HQ=16 if "HQ" in CASES[case] else 8)
    inputs = make_inputs(layout.segments * layout.length, **(CASES[case] | heads))
    check(inputs, layout, "heads")


@pytest.mark.parametrize("length", [1, 63, 130])
def test_pieces_of_odd_length(length):
    """Catches padding of a chunk that leaks into a product, a gate sum or another segment."""
    layout = Layout.head_tail(2, length)
    check(make_inputs(4 * length, HQ=4, gate=True), layout, "ring")


# First tokens of the documents; segments are 20 tokens long.
DOCUMENTS = {
    "cut at a segment border": (0, 40, 80),
    "cut by segment borders": (0, 33, 75, 90),
    "spanning three segments": (0, 15, 70),
    "spanning all but the ends": (0, 1, 159),
    "one token before a border": (0, 19, 20, 100),
    "one token after a border": (0, 20, 21, 60, 61, 100),
    "two tokens at a border": (0, 38, 40, 42, 79, 81),
}


@pytest.mark.parametrize("layout", ["4, contiguous", "4, head-tail"])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_documents(documents, layout):
    """Catches a mask that counts from the wrong segment, and rows that see nothing of one."""
    layout = LAYOUTS[layout]
    T = layout.segments * layout.length
    start = torch.zeros(1, T, dtype=torch.int32)
    for first in DOCUMENTS[documents]:
        start[:, first:] = first
    inputs = make_inputs(T, gate=True)._replace(document_start=start)
    check(inputs, layout, "ring")


@pytest.mark.parametrize("method", [*METHODS, "heads"])
def test_results_are_the_same_bits_each_time(method):
    """Catches sums in the order of arrival."""
    layout = LAYOUTS["4, head-tail"]
    inputs = make_inputs(160, HQ=4, H=4, gate=True, dtype=torch.bfloat16)
    first, second = (simulate(inputs, gradient_of_out(inputs), layout, method) for _ in range(2))
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


ADVERSARIAL = {
    "beta in [1.9, 2]": dict(beta="high", gate=True),
    "nearly constant w": dict(beta="high", w="constant", gate=True),
    "nearly constant w, beta 2": dict(beta="two", w="constant"),
}


@pytest.mark.parametrize("case", ADVERSARIAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_do_not_grow_with_the_number_of_ranks(dtype, case):
    """Catches products in less than fp32, and keys rounded once per segment that they cross.

    In bf16 moved queries are rounded once, moved keys twice: the limits of one device hold.
    """
    T = 1024
    inputs = make_inputs(T, D=32, HQ=2, H=1, dtype=dtype, **ADVERSARIAL[case])
    d_out = gradient_of_out(inputs)
    exact = run(path_attention, as_leaves(inputs, torch.float64), d_out)
    one = run(path_attention, inputs, d_out)
    for ranks in (2, 4, 8):
        layout = Layout.head_tail(ranks, T // (2 * ranks))
        actual = simulate(inputs, d_out, layout, "ring")
        if dtype == torch.bfloat16:
            assert_within_limits(actual, exact, dtype)
            continue
        for name, want in exact.items():
            limit = 1.5 * relative_error(one[name], want) + 1e-7
            error = relative_error(actual[name], want)
            assert error <= limit, f"{ranks} ranks, {name}: {error:.1e}, limit {limit:.1e}"


def test_gates_after_large_ones_keep_their_differences():
    """Catches gates taken as differences of fp32 sums, over a segment or a whole sequence."""
    inputs = make_inputs(1024, HQ=1, H=1, w=None, gate=True, dtype=torch.float32)
    with torch.no_grad():  # large in the first half of every third segment
        inputs.log_gate.mul_(0.1)
        inputs.log_gate[:, torch.arange(1024) % 384 < 64] *= 1e5
    d_out = gradient_of_out(inputs)
    exact = run(path_attention, as_leaves(inputs, torch.float64), d_out)
    actual = simulate(inputs, d_out, Layout.head_tail(4, 128), "ring")
    for name, want in exact.items():
        assert relative_error(actual[name], want) < 1e-5, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_linear_in_the_gradient_of_the_output(dtype):
    """Catches a gradient between ranks in a dtype without digits for a mean loss's 1e-8."""
    inputs = make_inputs(160, HQ=4, gate=True, dtype=dtype)
    layout, d_out = LAYOUTS["4, head-tail"], gradient_of_out(inputs)
    expected = simulate(inputs, d_out, layout, "ring")
    for exponent in (7, 27):
        actual = simulate(inputs, d_out * 2**-exponent, layout, "ring")
        for name in expected.keys() - {"out"}:
            assert torch.equal(actual[name], expected[name] * 2**-exponent), (name, exponent)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("left", [torch.bfloat16, torch.float16, torch.float32])
def test_products_of_terms_are_as_exact_as_fp32(monkeypatch, left, device):
    """Catches a term too few. Operands are bf16, so tf32 and bf16 modes change nothing."""
    if device == "cuda":
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 100, 64, generator=generator).to(device, left)
    y = torch.randn(2, 3, 64, 32, generator=generator).to(device)
    exact = x.double() @ y.double()
    assert relative_error(by_tokens.multiply(x, y), exact) < 4e-7
    assert all(
        term.dtype == torch.bfloat16 for term in [*by_tokens._terms(x), *by_tokens._terms(y)]
    )
    assert torch.equal(sum(term.double() for term in by_tokens._terms(x)), x.double())


class Counting:
    """A transport of one rank of eight that counts the received tensors alive at each transfer."""

    rank, ranks = 0, 8

    def __init__(self):
        self.received, self.most = [], 0

    def shift(self, x, distance):
        result = x.clone()
        self.received.append(weakref.ref(result))
        self.most = max(self.most, sum(y() is not None for y in self.received))
        return lambda: result


def test_the_ring_holds_few_pieces_at_a_time():
    """Catches segments kept after their turn: memory would grow with the number of ranks."""
    transport = Counting()
    ring = Ring(transport, [torch.zeros(4)])
    for source, _ in ring.visit():
        ring.give_back(source, [torch.ones(4)])
    assert ring.collect()[0].tolist() == [8.0] * 4
    # The last segments, those being attended to, the next, and one gradient.
    assert transport.most <= 4


class Delayed:
    """A transport of one rank of many that records what happens when."""

    rank, ranks = 0, 3

    def __init__(self):
        self.events = []

    def shift(self, x, distance):
        self.events.append(f"start {distance}")

        def wait():
            self.events.append(f"end {distance}")
            return x

        return wait


def test_transfers_overlap_the_attention():
    """Catches a ring that waits for the next segments, or for gradients, before it computes."""
    transport = Delayed()
    ring = Ring(transport, [torch.zeros(1)])
    for source, _ in ring.visit():
        transport.events.append(f"attend {source}")
        ring.give_back(source, [torch.ones(1)])
    ring.collect()
    assert transport.events == [
        "start 1",
        "attend 0",
        "end 1",
        "start 1",
        "attend 2",
        "start 2",
        "end 1",
        "attend 1",
        "end 2",
        "start 1",
        "end 1",
    ]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("method", [*METHODS, "heads"])
@pytest.mark.parametrize("case", ["path", "path_fox", "fox", "nope"])
def test_communication_is_what_the_formula_says(case, method, ranks):
    """Catches tensors sent twice, or in more bytes than needed: PARALLELISM.md is wrong then."""
    options = CASES[case] | dict(B=2, HQ=16, H=8, D=16, DV=8)
    inputs = make_inputs(40 * ranks, **options, dtype=torch.bfloat16)
    layout = Layout.head_tail(ranks, 20)
    sent = []
    simulate(inputs, gradient_of_out(inputs), layout, method, sent=sent)
    local = Inputs(*(shard(x, layout, 0) for x in inputs))
    assert sent == [sum(bytes_sent(local, ranks, 2, method))] * ranks


def test_the_formula_gives_the_megabytes_of_the_readme():
    """Catches a formula that was changed in one of two places: T = 65536, two ranks, `path`."""
    q, k, beta = (torch.empty(1, 32768, *x, device="meta") for x in ((32, 128), (8, 128), (8,)))
    q, k = q.bfloat16(), k.bfloat16()
    local = Inputs(q, k, k, k, beta, None, None)
    for method, megabytes in (("ring", [135, 405]), ("heads", [372, 741])):
        assert [round(x / 1e6) for x in bytes_sent(local, 2, 2, method)] == megabytes


@pytest.mark.parametrize("method", ["allgather", "heads"])
def test_a_closed_gate(method):
    """Catches sums over segments that hold the log of a closed gate, and no digit of another's."""
    inputs = make_inputs(80, gate=True)
    d_out = gradient_of_out(inputs)
    inputs.log_gate.data[:, 30] = -1e4
    exact = run(path_attention, inputs, d_out)
    inputs.log_gate.data[:, 30] = -1e20
    assert_exact(simulate(inputs, d_out, Layout.head_tail(2, 20), method), exact, 1e-9)


def test_the_backward_computes_no_attention_inside_segments():
    """Catches a backward that runs the forward's attention again to find the frames."""

    class Backend:
        def __getattr__(self, name):
            calls.append(name)
            return getattr(segments, name)

    calls = []
    inputs = make_inputs(80)
    simulate(inputs, gradient_of_out(inputs), Layout.head_tail(2, 20), "ring", Backend())
    assert calls.count("segment_forward") == 4
    assert calls.count("cross_segment_forward") == calls.count("cross_segment_backward") == 6
