"""Which tokens lie where: what a layout accepts, and how ranks read it from positions."""

import re

import pytest
import torch
from ranks import on_ranks

from path_backend.context_parallel.layout import Layout, layout_from_positions

WRONG = [
    (((0, 30), (10, 20)), 0, "the length of a segment must be at least 1, got 0"),
    ((), 10, "every rank must hold the same number of segments, got []"),
    (((), ()), 10, "every rank must hold the same number of segments, got [0, 0]"),
    (((0, 10), (20,)), 10, "every rank must hold the same number of segments, got [2, 1]"),
    (((0,), (20,)), 10, "expected one that starts at 10, got starts ((0,), (20,))"),
    (((0,), (0,)), 10, "expected one that starts at 10, got starts ((0,), (0,))"),
    (
        ((10,), (20,)),
        10,
        "2 segments of 10 tokens must cover the sequence: expected one that starts",
    ),
]


@pytest.mark.parametrize("starts, length, message", WRONG)
def test_a_layout_covers_the_sequence(starts, length, message):
    """Catches tokens that no rank holds, or two: attention would be wrong without a word."""
    with pytest.raises(ValueError, match=re.escape(message)):
        Layout(starts, length)


def test_pieces_that_ranks_cannot_share():
    """Catches a layout of another group."""
    with pytest.raises(ValueError, match="3 segments cannot be shared among 2 ranks equally"):
        Layout.from_flat((0, 10, 20), 10, 2)


def test_head_tail_is_that_of_torch():
    """Catches pairs of segments other than r and 2 * ranks - 1 - r, and a wrong way back."""
    layout = Layout.head_tail(3, 10)
    assert layout.starts == ((0, 50), (10, 40), (20, 30))
    assert [layout.held_by(rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert layout.home == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]
    assert (layout.ranks, layout.segments, layout.tokens) == (3, 6, 20)
    assert Layout.from_flat((0, 50, 10, 40, 20, 30), 10, 3) == layout


def positions_of(layout, rank):
    segments = [torch.arange(start, start + layout.length) for start in layout.starts[rank]]
    return torch.cat(segments)[None]


def read_layouts(group, cases):
    """On one rank: what layout_from_positions returns or raises for each of the cases."""
    outcomes = []
    for positions in cases:
        try:
            outcomes.append(layout_from_positions(positions[group.rank()], group))
        except (ValueError, TypeError) as error:
            outcomes.append(repr(error))
    return outcomes


def rows(*values):
    return torch.tensor(values)


LAYOUTS = [
    Layout.contiguous(2, 30),
    Layout.head_tail(2, 15),
    Layout.head_tail(2, 1),
    Layout(((30, 0), (10, 20)), 10),
    Layout(((0, 8, 4), (16, 12, 20)), 4),
]
ERRORS = [  # positions of rank 0 and of rank 1
    (rows([0, 1]), rows([2, 3, 4]), "rank 0 has positions [1, 2] with equal rows, and rank 1 has"),
    (rows([0, 1], [0, 1]), rows([2, 3], [2, 4]), "rank 1 has positions [2, 2] with different rows"),
    (rows([0, 1], [1, 2]), rows([2, 3], [2, 4]), "rows of positions must be equal, got different"),
    (rows([0, 1]), rows([3, 4]), "expected one that starts at 2, got starts ((0,), (3,))"),
    (rows([0, 1]), rows([0, 1]), "expected one that starts at 2, got starts ((0,), (0,))"),
    (rows([0, 1, 3]), rows([4, 5, 6]), "expected one that starts at 2, got starts ((0, 1, 3), "),
    (rows([1, 2]), rows([3, 4]), "expected one that starts at 0, got starts ((1,), (3,))"),
    (rows(0, 1), rows(2, 3), "positions must have shape [B, T], got [2]"),
    (rows([0.0, 1.0]), rows([2.0, 3.0]), "positions must be int32 or int64, got torch.float32"),
]


def test_layouts_are_read_from_positions():
    """Catches an assumed balancer, neighbours taken for one segment, an error on one rank only."""
    cases = [[positions_of(layout, rank).expand(3, -1) for rank in range(2)] for layout in LAYOUTS]
    cases[1] = [x.int() for x in cases[1]]
    cases += [case[:2] for case in ERRORS]
    for outcomes in on_ranks(2, read_layouts, cases):
        assert outcomes[: len(LAYOUTS)] == LAYOUTS
        for outcome, (*_, message) in zip(outcomes[len(LAYOUTS) :], ERRORS, strict=True):
            assert message in outcome
