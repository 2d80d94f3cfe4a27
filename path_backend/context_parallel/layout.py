"""Which tokens each rank of a context-parallel group holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from path_backend.context_parallel.collectives import GroupTransport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Layout:
    """A sequence cut into segments of equal length, the same number of them on every rank.

    starts: per rank, the first token of each of its segments in the order in which they lie in the
        rank's tensors.
    length: tokens of a segment.

    Raises ValueError if the segments do not cover the sequence, each token once.
    """

    starts: tuple[tuple[int, ...], ...]
    length: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"the length of a segment must be at least 1, got {self.length}")
        counts = [len(segments) for segments in self.starts]
        if not counts or min(counts) < 1 or min(counts) != max(counts):
            raise ValueError(f"every rank must hold the same number of segments, got {counts}")
        found = sorted(self.flat)
        for want, start in zip(range(0, len(found) * self.length, self.length), found, strict=True):
            if start != want:
                raise ValueError(
                    f"{len(found)} segments of {self.length} tokens must cover the sequence: "
                    f"expected one that starts at {want}, got starts {self.starts}"
                )

    @classmethod
    def contiguous(cls, ranks: int, length: int) -> Layout:
        """One segment per rank, in order."""
        return cls(tuple((rank * length,) for rank in range(ranks)), length)

    @classmethod
    def head_tail(cls, ranks: int, length: int) -> Layout:
        """Two segments per rank, r and 2 * ranks - 1 - r: every rank has the same share of a causal
        triangle. This is the default of torch's context parallelism.
        """
        pairs = [(rank, 2 * ranks - 1 - rank) for rank in range(ranks)]
        return cls(tuple((head * length, tail * length) for head, tail in pairs), length)

    @classmethod
    def from_flat(cls, starts: tuple[int, ...], length: int, ranks: int) -> Layout:
        """Returns the layout of starts in one sequence: those of rank 0, of rank 1, ..."""
        if len(starts) % ranks:
            raise ValueError(f"{len(starts)} segments cannot be shared among {ranks} ranks equally")
        count = len(starts) // ranks
        per_rank = (starts[rank * count : (rank + 1) * count] for rank in range(ranks))
        return cls(tuple(per_rank), length)

    @property
    def flat(self) -> list[int]:
        """The inverse of from_flat, as ops take it: starts of rank 0, of rank 1, ..."""
        return [start for segments in self.starts for start in segments]

    @property
    def ranks(self) -> int:
        return len(self.starts)

    @property
    def segments(self) -> int:
        """The number of segments of all ranks."""
        return self.ranks * len(self.starts[0])

    @property
    def tokens(self) -> int:
        """The number of tokens of one rank."""
        return len(self.starts[0]) * self.length

    def held_by(self, rank: int) -> list[int]:
        """The rank's segments, numbered along the sequence, in local order."""
        return [start // self.length for start in self.starts[rank]]

    @cached_property
    def home(self) -> list[tuple[int, int]]:
        """The rank of each segment along the sequence, and its place there."""
        homes: dict[int, tuple[int, int]] = {}
        for rank in range(self.ranks):
            homes |= {segment: (rank, place) for place, segment in enumerate(self.held_by(rank))}
        return [homes[segment] for segment in range(self.segments)]


def layout_from_positions(positions: Tensor, group: ProcessGroup) -> Layout:
    """The layout that the ranks of a group find in the positions of their tokens.

    All ranks of the group must call; the host waits for the answer.

    positions: int32 or int64 [B, T], of this rank's tokens in the whole sequence, the same in every
        row. It may be on any device that the group works on.

    Raises ValueError, on every rank, if T differs between ranks, rows differ, or the ranks together
    do not hold each token of a sequence once, in segments of one length.
    """
    if positions.ndim != 2 or 0 in positions.shape:
        raise ValueError(f"positions must have shape [B, T], got {list(positions.shape)}")
    if positions.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"positions must be int32 or int64, got {positions.dtype}")
    transport = GroupTransport(group.group_name)
    same = bool((positions == positions[:1]).all())
    rows = f"{'equal' if same else 'different'} rows"
    transport.compare(f"positions {list(positions.shape)} with {rows}", positions.device)
    if not same:
        raise ValueError("the rows of positions must be equal, got different ones on every rank")
    held = transport.all_gather(positions[0].long())().tolist()

    runs = [_runs(tokens) for tokens in held]
    length = math.gcd(*(count for segments in runs for _, count in segments))
    starts = (
        tuple(first + i for first, count in segments for i in range(0, count, length))
        for segments in runs
    )
    return Layout(tuple(starts), length)


def _runs(tokens: list[int]) -> list[tuple[int, int]]:
    """(first, count) of each run of consecutive tokens."""
    cuts = [i for i in range(1, len(tokens)) if tokens[i] != tokens[i - 1] + 1]
    borders = zip([0, *cuts], [*cuts, len(tokens)], strict=True)
    return [(tokens[begin], end - begin) for begin, end in borders]
