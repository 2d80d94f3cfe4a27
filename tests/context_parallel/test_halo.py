"""The convolution over sequences in segments, against the one over whole sequences."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from context_simulation import Board, SimulatedTransport, shard, unshard
from ranks import on_ranks

from path_backend.context_parallel.halo import give_back, halo, take
from path_backend.context_parallel.layout import Layout
from path_backend.layers.elementwise import causal_conv
from path_backend.layers.projections import ShortConv
from path_backend.layers.segmented import Segmented

TOKENS, CHANNELS, WIDTH = 24, 3, 4
LAYOUTS = {
    "2, contiguous": Layout.contiguous(2, 12),
    "2, head-tail": Layout.head_tail(2, 6),
    "3, in disorder": Layout(((20, 0), (4, 12), (16, 8)), 4),
    "6, short segments": Layout.head_tail(6, 2),
    "12, one token": Layout.head_tail(12, 1),
}


@pytest.mark.parametrize("rows", [1, 3, 6, 15])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_before_every_segment(layout, rows):
    """Rows of the wrong segment or side, or fewer where they span several; a gradient misplaced."""
    layout = LAYOUTS[layout]
    x = torch.randn(2, TOKENS, CHANNELS, dtype=torch.float64, requires_grad=True)
    padded = F.pad(x, (0, 0, rows, 0))
    expected = [
        torch.stack([padded[:, start : start + rows] for start in segments], dim=1)
        for segments in layout.starts
    ]
    d_halos = [torch.randn_like(e) for e in expected]
    torch.autograd.backward(expected, d_halos)
    board = Board(layout.ranks)

    def on_rank(rank):
        transport = SimulatedTransport(board, rank)
        part = shard(x.detach(), layout, rank)
        return take(part, rows, layout, transport), give_back(
            d_halos[rank], rows, layout, transport
        )

    with ThreadPoolExecutor(layout.ranks) as threads:
        halos, d_parts = zip(*threads.map(on_rank, range(layout.ranks)), strict=True)
    for found, e in zip(halos, expected, strict=True):
        assert torch.equal(found, e)
    torch.testing.assert_close(unshard(d_parts, layout), x.grad)


def sequences():
    """x [2, T, C], a weight, documents of 1, 2 and many tokens that borders of segments cut."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, TOKENS, CHANNELS, dtype=torch.float64, generator=generator)
    weight = torch.randn(CHANNELS, WIDTH, dtype=torch.float64, generator=generator)
    first = torch.zeros(2, TOKENS, dtype=torch.int32)
    for row, starts in enumerate([[1, 3, 5, 6, 18, 19], [12, 13]]):
        first[row, starts] = torch.tensor(starts, dtype=torch.int32)
    return x, weight, first.cummax(dim=1).values


def differentiate(out, tokens):
    """Backward from a gradient that differs between tokens."""
    (out * torch.arange(1.0, TOKENS + 1)[tokens, None]).sum().backward()


def conv_on_rank(group, layouts, documents, compiled):
    """Output, gradient of x and of the weight for each layout, from one module."""
    conv, segmented, results = ShortConv(CHANNELS, WIDTH), Segmented(group), []
    run = torch.compile(conv, backend="aot_eager", fullgraph=True) if compiled else conv
    for layout in layouts:
        x, weight, document_start = sequences()
        conv.weight = torch.nn.Parameter(weight)
        segmented.layout = layout
        part = shard(x, layout, group.rank()).requires_grad_()
        tokens = shard(torch.arange(TOKENS)[None], layout, group.rank())[0]
        out = run(part, document_start[:, tokens] if documents else None, segmented)
        differentiate(out, tokens)
        results.append((out.detach(), part.grad, conv.weight.grad))
    return results


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
def test_conv_on_ranks(documents, compiled):
    """A halo or its gradient lost, given twice, or read across the start of a document.

    On rank 0 of a contiguous layout nothing depends on the halo: its backward must still join the
    other's. Compiled: a break of the graph, or the layout of the first call in the second.
    """
    layouts = [LAYOUTS["2, contiguous"], LAYOUTS["2, head-tail"]]
    results = on_ranks(2, conv_on_rank, layouts, documents, compiled)
    for result in results:
        if isinstance(result, Exception):
            raise result
    x, weight, document_start = sequences()
    x.requires_grad_(), weight.requires_grad_()
    out = causal_conv(x, weight, document_start if documents else None)
    differentiate(out, slice(None))
    for i, layout in enumerate(layouts):
        parts, d_parts, d_weights = zip(*(result[i] for result in results), strict=True)
        torch.testing.assert_close(unshard(parts, layout), out)
        torch.testing.assert_close(unshard(d_parts, layout), x.grad)
        torch.testing.assert_close(sum(d_weights), weight.grad)


def halo_on_rank(group):
    x = torch.full((1, 4, 1), 1.0 + group.rank(), dtype=torch.bfloat16)
    return halo(x, 2, Layout.contiguous(2, 4), group)


def test_halo_keeps_the_dtype():
    """Rows sent in another dtype, or rank 0 seeing its own or the last rank's tokens."""
    first, second = on_ranks(2, halo_on_rank)
    assert first.dtype == second.dtype == torch.bfloat16
    assert first.eq(0).all() and second.eq(1).all()


def second_derivative_on_rank(group):
    """Of sum(halo^3): 6 halo where a rank's tokens are in a halo."""
    x = torch.arange(1.0, 5.0).view(1, 4, 1).requires_grad_()
    loss = halo(x, 2, Layout.contiguous(2, 4), group).pow(3).sum()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    return torch.autograd.grad(dx.sum(), x)[0]


def test_second_derivative_of_a_halo():
    """Catches a backward without derivative: torch warns and takes it for zero."""
    first, second = on_ranks(2, second_derivative_on_rank)
    assert first.flatten().tolist() == [0, 0, 18, 24]
    assert second.eq(0).all()


def test_shards_without_layout():
    """A layer that runs on a part of each sequence as if it were the whole."""
    conv = ShortConv(CHANNELS, WIDTH)
    with pytest.raises(ValueError, match="segmented.layout must be set before a forward, got None"):
        conv(torch.zeros(1, 4, CHANNELS), None, Segmented(None))
