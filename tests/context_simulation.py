"""Every rank of a context-parallel group in a thread of this process, without a process group."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from path_backend import eager
from path_backend.arguments import Inputs
from path_backend.context_parallel import by_heads, by_tokens
from path_backend.context_parallel.plan import Plan


class Board:
    """Where the simulated ranks leave what the others read."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.notes = [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=120)

    def swap(self, rank, note):
        """The notes of all ranks; all must call."""
        self.notes[rank] = note
        self.barrier.wait()
        notes = list(self.notes)
        self.barrier.wait()
        return notes


class SimulatedTransport:
    """path_backend.context_parallel.collectives.Transport over a Board."""

    def __init__(self, board, rank):
        self.board, self.rank, self.ranks = board, rank, board.ranks
        self.sent = 0  # bytes

    def all_gather(self, x):
        self.sent += x.nbytes * (self.ranks - 1)
        notes = self.board.swap(self.rank, x.clone())
        return lambda: torch.stack(notes)

    def reduce_scatter(self, x):
        self.sent += x.nbytes // self.ranks * (self.ranks - 1)
        notes = self.board.swap(self.rank, x.clone())
        return lambda: sum(note[self.rank] for note in notes)

    def shift(self, x, distance):
        self.sent += x.nbytes
        note = self.board.swap(self.rank, x.clone())[(self.rank - distance) % self.ranks]
        assert note.shape == x.shape
        return lambda: note

    def all_to_all(self, x):
        self.sent += x.nbytes // self.ranks * (self.ranks - 1)
        notes = self.board.swap(self.rank, x.clone())
        return lambda: torch.stack([note[self.rank] for note in notes])


def gradient_of_out(inputs):
    """d(out) of all tokens, which ranks and one device are given alike."""
    shape = (*inputs.q.shape[:3], inputs.v.shape[3])
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(inputs.q.dtype)


def shard(x, layout, rank):
    """The rank's part of x [B, T, ...]."""
    if x is None:
        return None
    segments = [x[:, start : start + layout.length] for start in layout.starts[rank]]
    return torch.cat(segments, 1)


def unshard(parts, layout):
    """The whole of every rank's [B, tokens, ...]."""
    segments = [part.split(layout.length, 1) for part in parts]
    return torch.cat([segments[rank][place] for rank, place in layout.home], 1)


def simulate(inputs: Inputs, d_out, layout, method, backend=None, sent=None):
    """Forward and backward on all ranks; results of all tokens as path_backend.testing.run.

    sent: a list that gets the bytes that each rank sent.
    """
    board = Board(layout.ranks)
    algorithm = by_heads if method == "heads" else by_tokens
    transports = [SimulatedTransport(board, rank) for rank in range(layout.ranks)]
    scale = inputs.q.shape[-1] ** -0.5

    def rank_main(rank):
        try:
            plan = Plan(layout, transports[rank], method, scale, backend or eager)
            part = Inputs(*(shard(x, layout, rank) for x in inputs.map_floating(torch.detach)))
            out, lse = algorithm.forward(part, plan)
            return out, *algorithm.backward(shard(d_out, layout, rank), part, out, lse, plan)
        except BaseException:
            board.barrier.abort()
            raise

    with ThreadPoolExecutor(layout.ranks) as threads:
        results = zip(*threads.map(rank_main, range(layout.ranks)), strict=True)
    if sent is not None:
        sent.extend(transport.sent for transport in transports)
    names = ["out", *(f"d{name}" for name in inputs._fields[:6])]
    return {
        name: unshard(parts, layout)
        for name, parts in zip(names, results, strict=True)
        if parts[0] is not None
    }
