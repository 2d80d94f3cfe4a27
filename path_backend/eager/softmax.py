"""Softmax attention over rectangles of the causal triangle, one bounded tile at a time.

A head group is one key/value head with its R query heads. Tensors of a slice of Z groups:
q [Z, T, R, D], k [Z, T, D], v [Z, T, DV]. Rows of a tile are (token, query head) pairs, so that
grouped queries meet their shared key in one matrix product and k, v are never expanded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from path_backend.kernels.constants import CLOSED_GATE, LN_2

# Logits in flight. 2^21 fp32 values are 8 MiB: the four tiles of the backward stay near the cache.
TILE_ELEMENTS = 2**21


# Log of what a gate keeps at least, as in the kernels: fp32 has no such weight, and sums that held
# the log of a smaller one would have fewer digits left for other tokens.
CLOSED = CLOSED_GATE * LN_2


def cumulative_gate(log_gate: Tensor, dim: int) -> Tensor:
    """Sums of the log gates up to each token, in fp64: one fp32 sum over 64 Ki tokens loses the
    small differences that the softmax sees.
    """
    return log_gate.double().clamp_min(CLOSED).cumsum(dim)


@dataclass(frozen=True)
class Tile:
    """`count` equal rectangles, one in each of `count` consecutive blocks of `span` tokens.

    first: token where the first block starts. rows, keys: (start, stop) inside a block.
    """

    first: int
    count: int
    span: int
    rows: tuple[int, int]
    keys: tuple[int, int]

    @property
    def causal(self) -> bool:
        """True where the rectangle crosses the diagonal."""
        return self.rows[0] < self.keys[1]

    def rows_of(self, x: Tensor) -> Tensor:
        """[Z, T, ...] -> view [Z, count, rows, ...]."""
        return self._blocks(x)[:, :, slice(*self.rows)]

    def keys_of(self, x: Tensor) -> Tensor:
        """[Z, T, ...] -> view [Z, count, keys, ...]."""
        return self._blocks(x)[:, :, slice(*self.keys)]

    def _blocks(self, x: Tensor) -> Tensor:
        stop = self.first + self.count * self.span
        return x[:, self.first : stop].unflatten(1, (self.count, self.span))

    def split(self, width: int) -> Iterator[tuple[Tile, slice, slice]]:
        """Parts of at most TILE_ELEMENTS logits, with the slices of blocks and of rows they cover.

        width: logits of one (row token, key) pair, that is Z * R.
        """
        n_rows, n_keys = self.rows[1] - self.rows[0], self.keys[1] - self.keys[0]
        blocks = max(1, TILE_ELEMENTS // (width * n_rows * n_keys))
        rows = max(1, min(n_rows, TILE_ELEMENTS // (width * n_keys)))
        for b in range(0, self.count, blocks):
            pairs = slice(b, min(b + blocks, self.count))
            first, count = self.first + b * self.span, pairs.stop - b
            for r in range(0, n_rows, rows):
                part = slice(r, min(r + rows, n_rows))
                lines = (self.rows[0] + r, self.rows[0] + part.stop)
                yield Tile(first, count, self.span, lines, self.keys), pairs, part


@dataclass(frozen=True)
class Bias:
    """Holds what is added to a slice's logits: forget gate, causal mask, document mask.

    gate: `cumulative_gate` [Z, T, R]. start: first token of each token's document [Z, T].
    earliest: the smallest start of each token over the batch, on the host, to skip empty tiles.
    """

    gate: Tensor | None
    start: Tensor | None
    earliest: list[int] | None

    def empties(self, tile: Tile) -> bool:
        """True if the document mask leaves nothing of the tile."""
        if self.earliest is None or tile.causal:
            return False
        blocks = range(tile.first, tile.first + tile.count * tile.span, tile.span)
        return all(self.earliest[b + tile.rows[0]] >= b + tile.keys[1] for b in blocks)

    def add_(self, logits: Tensor, tile: Tile) -> Tensor:
        """In place on logits [Z, count, rows, R, keys]."""
        if self.gate is not None:
            row, key = tile.rows_of(self.gate), tile.keys_of(self.gate)
            if tile.causal:  # keys may follow a row: parts would hold gates after it
                logits += (row.unsqueeze(-1) - key.mT.unsqueeze(2)).to(logits.dtype)
            else:
                origin = key[:, :, -1:]
                logits += (row - origin).to(logits.dtype).unsqueeze(-1)
                logits += (origin - key).to(logits.dtype).mT.unsqueeze(2)
        stop = tile.first + tile.count * tile.span
        position = torch.arange(stop, device=logits.device)[None]
        key_position = tile.keys_of(position)[:, :, None, None, :]
        if tile.causal:
            row_position = tile.rows_of(position)[..., None, None]
            logits.masked_fill_(key_position > row_position, float("-inf"))
        if self.start is not None:
            start = tile.rows_of(self.start)[..., None, None]
            logits.masked_fill_(key_position < start, float("-inf"))
        return logits


class OnlineSoftmax:
    """Running maximum m, sum [Z, T, R] and unnormalised output acc [Z, T, R, DV].

    The first tile that reaches a row must hold a key it may see (its own token), so that m is
    finite from then on and a fully masked tile adds exactly zero.
    """

    def __init__(self, q: Tensor, v: Tensor):
        self.m = q.new_full(q.shape[:3], float("-inf"))
        self.sum = torch.zeros_like(self.m)
        self.acc = q.new_zeros(*q.shape[:3], v.shape[-1])

    def add(self, logits: Tensor, v: Tensor, tile: Tile) -> None:
        """logits [Z, count, rows, R, keys] with bias; overwritten. v [Z, T, DV]."""
        m, total, acc = (tile.rows_of(x) for x in (self.m, self.sum, self.acc))
        m_new = torch.maximum(m, logits.amax(-1))
        shrink = torch.exp(m - m_new)
        p = logits.sub_(m_new.unsqueeze(-1)).exp_()
        total.mul_(shrink).add_(p.sum(-1))
        pv = p.flatten(2, 3) @ tile.keys_of(v)
        acc.mul_(shrink.unsqueeze(-1)).add_(pv.view(acc.shape))
        m.copy_(m_new)

    def finish(self) -> tuple[Tensor, Tensor]:
        """out [Z, T, R, DV] and the natural log-sum-exp [Z, T, R]."""
        return self.acc.div_(self.sum.unsqueeze(-1)), self.m + self.sum.log()


class SoftmaxGradient:
    """dS = P * (dP - delta), P = exp(S - lse), dP = dO V^T, delta = rowsum(dO * O), tile by tile.

    Accumulates dv [Z, T, DV] and the gradient of the cumulative gate, rowsum(dS) - colsum(dS).
    The row sums vanish in exact arithmetic. They are kept: with them the gradient of a gate carries
    the rounding of the pairs that cross it, without them that of all pairs behind it.
    """

    def __init__(self, d_out: Tensor, out: Tensor, lse: Tensor, v: Tensor, bias: Bias):
        self.d_out, self.lse, self.v, self.bias = d_out, lse, v, bias
        self.delta = (d_out * out).sum(-1)
        self.dv = torch.zeros_like(v)
        self.d_gate = None if bias.gate is None else torch.zeros_like(bias.gate)

    def add(self, logits: Tensor, tile: Tile) -> Tensor:
        """logits [Z, count, rows, R, keys] with bias; overwritten. Returns dS with rows packed."""
        d_out = tile.rows_of(self.d_out).flatten(2, 3)
        p = logits.sub_(tile.rows_of(self.lse).unsqueeze(-1)).exp_()
        tile.keys_of(self.dv).add_(p.flatten(2, 3).mT @ d_out)
        ds = (d_out @ tile.keys_of(self.v).mT).view(p.shape)
        ds.sub_(tile.rows_of(self.delta).unsqueeze(-1)).mul_(p)
        if self.d_gate is not None:
            tile.rows_of(self.d_gate).add_(ds.sum(-1))
            tile.keys_of(self.d_gate).sub_(ds.sum(2).mT)
        return ds.flatten(2, 3)

    def d_log_gate(self) -> Tensor | None:
        """[Z, T, R]: log_gate_t enters every later cumulative sum."""
        return None if self.d_gate is None else self.d_gate.flip(1).cumsum(1).flip(1)
