"""Queries and keys carried from frame to frame: dyadic levels, from one chunk to the sequence.

Pairs of blocks (left, right), doubling from one chunk on:

    off-diagonal logits         q_start(right) . k_end(left)
    then                        q_start(right) <- P_left q_start(right)
                                k_end(left) <- P_right^T k_end(left)
                                P <- P_left P_right

The last block may be short; a block without a sibling rises unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from path_backend.eager.softmax import Tile


class OffDiagonal(NamedTuple):
    """Holds q and k of the off-diagonal blocks of one size, or of the short one at the right edge,
    in the frame of the block that a pair of children makes.
    """

    tile: Tile
    q: Tensor  # [Z, count, rows, R, D], at the start of the right child
    k: Tensor  # [Z, count, keys, D], at the end of the left child


class Level(NamedTuple):
    """Holds all off-diagonal blocks of one size.

    product: [Z, ceil(T / half), D, D] of the children, or None if nothing moves afterwards (no
    reflections, or the last level).
    """

    half: int
    product: Tensor | None
    off_diagonals: list[OffDiagonal]

    def left(self, tile: Tile, x: Tensor) -> Tensor:
        """Returns the left children of the tile's pairs, a view of a tensor like `product`."""
        i = tile.first // self.half
        return x[:, i : i + 2 * tile.count : 2]

    def right(self, tile: Tile, x: Tensor) -> Tensor:
        """The right children (a view)."""
        return self.left(tile, x[:, 1:])


def off_diagonal_tiles(length: int, half: int) -> list[Tile]:
    """Returns the tiles between neighbouring blocks of `half` tokens, cut off at the right edge."""
    pairs, rest = divmod(length, 2 * half)
    tiles = []
    if pairs:
        tiles.append(Tile(0, pairs, 2 * half, (half, 2 * half), (0, half)))
    if rest > half:
        tiles.append(Tile(pairs * 2 * half, 1, rest, (half, rest), (0, half)))
    return tiles


def carry(
    q: Tensor, k: Tensor, product: Tensor | None, chunk: int, to_ends: bool = False
) -> Iterator[Level]:
    """Yields the levels from small to large. q and k are overwritten; what was yielded is not.

    to_ends: moves q and k on to the frame of all T tokens, q to their start and k to their end. One
    more level comes last, without off-diagonal blocks, and holds the product of all.
    """
    length, half = q.shape[1], chunk
    while half < length:
        moving = product if to_ends or 2 * half < length else None
        pairs = [
            OffDiagonal(t, t.rows_of(q), t.keys_of(k)) for t in off_diagonal_tiles(length, half)
        ]
        if moving is not None:  # in place, below
            pairs = [
                OffDiagonal(t, q_right.clone(), k_left.clone()) for t, q_right, k_left in pairs
            ]
        level = Level(half, moving, pairs)
        yield level
        if moving is not None:
            product = _carry_up(level, moving, q, k)
        half *= 2
    if to_ends:
        yield Level(half, product, [])


def _carry_up(level: Level, product: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Moves q and k to the frame of the next level; returns the products of its blocks."""
    joined = []
    for tile, q_right, k_left in level.off_diagonals:
        left, right = level.left(tile, product), level.right(tile, product)
        tile.rows_of(q).copy_((q_right.flatten(2, 3) @ left.mT).view(q_right.shape))
        tile.keys_of(k).copy_(k_left @ right)
        joined.append(left @ right)
    if product.shape[1] % 2:
        joined.append(product[:, -1:])
    return torch.cat(joined, 1)


def carry_down(
    level: Level, product: Tensor, dq: Tensor, dk: Tensor, d_next: Tensor | None
) -> Tensor:
    """The transpose of _carry_up. Moves dq and dk back in place.

    d_next: gradient of the products that _carry_up returned. Returns that of `product`.
    """
    d_product = torch.zeros_like(product)
    for tile, q_right, k_left in level.off_diagonals:
        left, right = level.left(tile, product), level.right(tile, product)
        d_left, d_right = level.left(tile, d_product), level.right(tile, d_product)
        moved = tile.rows_of(dq).flatten(2, 3)
        d_left += moved.mT @ q_right.flatten(2, 3)
        tile.rows_of(dq).copy_((moved @ left).view(q_right.shape))
        moved = tile.keys_of(dk)
        d_right += k_left.mT @ moved
        moved.copy_(moved @ right.mT)
        if d_next is not None:
            i = tile.first // (2 * level.half)
            d_joined = d_next[:, i : i + tile.count]
            d_left += d_joined @ right.mT
            d_right += left.mT @ d_joined
    if product.shape[1] % 2 and d_next is not None:
        d_product[:, -1:] += d_next[:, -1:]
    return d_product
