"""The closed part of a cache: groups whose keys stand at the end of their block.

A block is a run of groups whose keys k_end are in one frame, its end, and P is the product of its
reflections. A query at the end of the closed part meets a block's keys after it was multiplied by
the products of all later blocks.

Tensors of a cache, by name: k [B, H, N, D]; product [B, H, slots, D, D]; suffix, of the dyadic form
alone, as product: those of all later blocks, so that a query reaches every block in one product.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


class Block(NamedTuple):
    """A run of closed groups in one frame."""

    slot: int  # where its product lies
    first: int  # group
    groups: int

    def tokens(self, group: int) -> slice:
        """The block's places along the tokens."""
        return slice(self.first * group, (self.first + self.groups) * group)


class ClosedPart(Protocol):
    """A form of the closed part. `closed` counts its groups."""

    def slots(self, groups: int) -> int:
        """Returns how many products so many groups need room for."""

    def blocks(self, closed: int) -> list[Block]:
        """Returns the blocks, from last to first."""

    def pieces(self, closed: int, new: int) -> list[Block]:
        """Returns the blocks in which `new` more groups are to be pushed, in order."""

    def push(self, t: Tensors, piece: Block, k_end: Tensor, product: Tensor | None) -> None:
        """Appends a block: k_end [B, H, tokens, D], product [B, H, D, D] (None: no reflections)."""

    def moved(self, t: Tensors, closed: int, x: Tensor) -> Iterator[tuple[Block, Tensor]]:
        """Yields each block, from last to first, with x [B, H, M, D] moved to its end."""

    def crop(self, t: Tensors, closed: int, keep: int) -> None:
        """Drops all but the first `keep` groups, which are whole blocks."""


class DyadicBlocks:
    """Blocks of 2^l groups, one for each set bit l of their number, merged as a counter carries.

    A key is moved at most log2(groups) times in its life.
    """

    def __init__(self, group: int):
        self.group = group

    def slots(self, groups: int) -> int:
        return groups.bit_length()

    def blocks(self, closed: int) -> list[Block]:
        return [
            Block(level, closed >> (level + 1) << (level + 1), 1 << level)
            for level in range(closed.bit_length())
            if closed >> level & 1
        ]

    def pieces(self, closed: int, new: int) -> list[Block]:
        pieces, end = [], closed + new
        while closed < end:
            level = (end - closed).bit_length() - 1
            if closed:
                level = min(level, (closed & -closed).bit_length() - 1)
            pieces.append(Block(level, closed, 1 << level))
            closed += 1 << level
        return pieces

    def push(self, t: Tensors, piece: Block, k_end: Tensor, product: Tensor | None) -> None:
        t["k"][:, :, piece.tokens(self.group)] = k_end.to(t["k"].dtype)
        if product is None:
            return
        suffix, moving, joined = t["suffix"], product.double(), product
        for i, block in enumerate(self.blocks(piece.first)):
            slot = suffix[:, :, block.slot]
            slot.copy_(slot.double() @ moving if i else product)
        level = piece.slot
        for block in self.blocks(piece.first):
            if block.slot != level:
                break
            keys, move = t["k"][:, :, block.tokens(self.group)], suffix[:, :, level]
            keys.copy_(keys.to(move.dtype) @ move)
            joined = t["product"][:, :, level].double() @ move.double()
            level += 1
        t["product"][:, :, level] = joined.to(suffix.dtype)

    def moved(self, t: Tensors, closed: int, x: Tensor) -> Iterator[tuple[Block, Tensor]]:
        for i, block in enumerate(self.blocks(closed)):
            yield block, x @ t["suffix"][:, :, block.slot].mT if i else x

    def crop(self, t: Tensors, closed: int, keep: int) -> None:
        move: Tensor | None = None
        if "suffix" not in t:
            return
        for block in self.blocks(closed):
            if block.first + block.groups > keep:
                continue
            product = t["product"][:, :, block.slot].double()
            if move is not None:
                t["suffix"][:, :, block.slot] = move.to(t["suffix"].dtype)
            move = product if move is None else product @ move


class PagedGroups:
    """Groups that never change once they are closed: pages that can be shared and cropped."""

    def __init__(self, group: int):
        self.group = group

    def slots(self, groups: int) -> int:
        return groups

    def blocks(self, closed: int) -> list[Block]:
        return [Block(i, i, 1) for i in reversed(range(closed))]

    def pieces(self, closed: int, new: int) -> list[Block]:
        return [Block(i, i, 1) for i in range(closed, closed + new)]

    def push(self, t: Tensors, piece: Block, k_end: Tensor, product: Tensor | None) -> None:
        t["k"][:, :, piece.tokens(self.group)] = k_end.to(t["k"].dtype)
        if product is not None:
            t["product"][:, :, piece.slot] = product.to(t["product"].dtype)

    def moved(self, t: Tensors, closed: int, x: Tensor) -> Iterator[tuple[Block, Tensor]]:
        for block in self.blocks(closed):
            yield block, x
            x = x @ t["product"][:, :, block.slot].mT

    def crop(self, t: Tensors, closed: int, keep: int) -> None:
        return


class RawKeys:
    """The closed part without reflections: one block, whatever the form."""

    def __init__(self, group: int):
        self.group = group

    def slots(self, groups: int) -> int:
        return 0

    def blocks(self, closed: int) -> list[Block]:
        return [Block(0, 0, closed)] if closed else []

    def pieces(self, closed: int, new: int) -> list[Block]:
        return [Block(0, closed, new)] if new else []

    def push(self, t: Tensors, piece: Block, k_end: Tensor, product: Tensor | None) -> None:
        t["k"][:, :, piece.tokens(self.group)] = k_end.to(t["k"].dtype)

    def moved(self, t: Tensors, closed: int, x: Tensor) -> Iterator[tuple[Block, Tensor]]:
        for block in self.blocks(closed):
            yield block, x

    def crop(self, t: Tensors, closed: int, keep: int) -> None:
        return


def croppable(form: ClosedPart, closed: int, keep: int) -> bool:
    """Whether the first `keep` groups are whole blocks (without reflections: always)."""
    if isinstance(form, RawKeys) or keep == 0:
        return True
    return any(block.first + block.groups == keep for block in form.blocks(closed))


def ends(k: Tensor, w: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Returns k_end [..., T, D] and product [..., D, D] of few tokens, in fp64.

    k, w: [..., T, D]. beta: [..., T]. The UT transform of `path_backend.eager.attention`.
    """
    k, w, beta = k.double(), w.double(), beta.double()
    T, D = w.shape[-2:]
    M = torch.eye(T, dtype=w.dtype, device=w.device) + beta.unsqueeze(-1) * (w @ w.mT).triu(1)
    xw = torch.linalg.solve_triangular(M, beta.unsqueeze(-1) * w, upper=True)
    eye = torch.eye(D, dtype=w.dtype, device=w.device)
    return k - (k @ w.mT).triu(1) @ xw, eye - w.mT @ xw
