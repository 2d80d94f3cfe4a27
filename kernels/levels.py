"""The arithmetic of the dyadic levels: how many rows, blocks and products they have, and where.

A *level* l pairs neighbouring blocks of `half = CHUNK << l` tokens. Only right blocks have moved
queries and only left blocks have moved keys, so level l stores half of the tokens: the token at
position t lies in row `(t // (2 half)) * half + t % half` of its level, and the levels lie one
after another.
"""

from functools import cache

import triton
import triton.language as tl

from .constants import CHUNK


def cdiv(count: int, size: int) -> int:
    """Returns count / size, rounded up. Triton's own takes a tenth of a launch on the host."""
    return -(-count // size)


@cache
def num_levels(seq_len: int) -> int:
    """Returns how many levels have a right block: level l needs more than CHUNK << l tokens."""
    levels = 0
    while seq_len > CHUNK << levels:
        levels += 1
    return levels


def level_rows(seq_len: int, level: int) -> int:
    """Returns the rows of one level: a left block for every pair whose right block has a token."""
    half = CHUNK << level
    return (seq_len + half - 1) // (2 * half) * half


@cache
def total_rows(seq_len: int) -> int:
    """Returns the rows of all levels of one head; at least one: descriptors are never empty."""
    return max(1, sum(level_rows(seq_len, level) for level in range(num_levels(seq_len))))


def moving_levels(seq_len: int, segment: bool) -> range:
    """Returns the levels whose tiles move on: not the top, but to move a segment to its ends."""
    return range(num_levels(seq_len) - (not segment))


@cache
def moved_rows(seq_len: int, segment: bool) -> int:
    """Returns the rows of the `moving_levels` of one head."""
    return sum(level_rows(seq_len, level) for level in moving_levels(seq_len, segment))


def product_levels(seq_len: int, segment: bool) -> range:
    """Returns the levels whose products are made: those that move tiles; of a segment, up to the
    product of all.

    A segment of one chunk has a level too, in which a sibling is missing.
    """
    return range(max(num_levels(seq_len), 1) + 1) if segment else moving_levels(seq_len, segment)


def level_blocks(seq_len: int, level: int, segment: bool) -> int:
    """Returns how many blocks of a level have a product P: the complete ones, all of a segment."""
    size = CHUNK << level
    return cdiv(seq_len, size) if segment else seq_len // size


def stored_blocks(seq_len: int, level: int) -> int:
    """Returns how many products a level stores, in pairs of siblings, level after level."""
    return 2 * cdiv(seq_len, 2 * CHUNK << level)


@cache
def total_blocks(seq_len: int) -> int:
    """Returns the stored products of one head; the last pair holds that of the whole segment."""
    return sum(stored_blocks(seq_len, level) for level in product_levels(seq_len, True))


@triton.jit
def rows_of_level(seq_len, level, CHUNK: tl.constexpr):
    """`level_rows` on the device. Shifts: a division by what only turns out to be a power of two
    takes as long as several loads of a cache.
    """
    last = tl.cdiv(seq_len, CHUNK) - 1
    return ((last + (1 << level)) >> (level + 1) << level) * CHUNK


@triton.jit
def blocks_of_level(seq_len, level, CHUNK: tl.constexpr):
    """`stored_blocks` on the device."""
    last = tl.cdiv(seq_len, CHUNK) - 1
    return ((last >> (level + 1)) + 1) * 2
