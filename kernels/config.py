"""Every launch parameter in one place: tiles, warps, pipeline stages, and why."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tiles:
    """A pass over attention tiles: `block_m` query rows by `block_n` key rows.

    Both are 64 or 128, so that a tile covers whole chunks and never straddles a square's edge; the
    tile
    that streams is never longer than the one that stays.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


SCRATCH_BYTES = 2 << 30
"""Heads are processed in groups whose scratch stays under this, so that memory does not grow with
their
number. 2 GiB hold 2 x 8192 tokens x 16 heads x 128 in one group: smaller groups leave SMs
idle."""

PRODUCT_ROWS = 2048
"""Tokens reduced by one program of the products' gradient: a top level of 32768 tokens still gives
8 programs a head."""


PRODUCT_TILE = 64
"""D x D matrices are made in tiles of this side: whole ones at D = 128 leave one program per SM."""


def forward_tiles(dtype: torch.dtype, width: int) -> Tiles:
    """Tiles of the forward pass for heads padded to `width`."""
    if dtype == torch.float32:
        return Tiles(64, 32 if width > 64 else 64, 4, 2) if width <= 128 else Tiles(64, 32, 8, 1)
    if width <= 64:
        return Tiles(64, 64, 4, 3)
    return Tiles(64, 64, 4, 3) if width <= 128 else Tiles(64, 64, 4, 1)


def query_tiles(dtype: torch.dtype, width: int) -> Tiles:
    """Tiles of the dq pass: a query tile stays, keys stream."""
    if dtype == torch.float32:
        return Tiles(64, 32, 4, 2)
    if width <= 64:
        return Tiles(64, 64, 4, 3)
    return Tiles(64, 64, 4, 2) if width <= 128 else Tiles(64, 64, 4, 1)


def key_tiles(dtype: torch.dtype, width: int) -> Tiles:
    """Tiles of the dk, dv pass: a key tile stays, queries stream."""
    if dtype == torch.float32:
        return Tiles(64, 64, 4, 1)
    if width <= 64:
        return Tiles(64, 64, 4, 3)
    return Tiles(64, 64, 4, 2) if width <= 128 else Tiles(64, 64, 4, 1)


def chunk_warps(width: int) -> int:
    """Warps of the programs that own one chunk [64, width]."""
    return 4 if width <= 64 else 8


SWEEP_OPTIONS = {"ROWS": 64, "num_warps": 4}
"""A program of the level sweep: its rows and warps. One chunk: 20 % faster than two with 8 warps at D = 128
(2 x 8192 x 16 heads), though each chunk loads the products anew: two programs share an SM."""
