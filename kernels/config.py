"""Every launch parameter in one place: tiles, warps, pipeline stages, and why."""

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class Tiles:
    """A pass over attention tiles: `block_m` query rows by `block_n` key rows.

    Both are 64 or 128, so that a tile covers whole chunks and never straddles a square's edge; the
    tile that streams is never longer than the one that stays.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


SCRATCH_BYTES = 2 << 30
"""Heads are processed in groups whose scratch stays under this, so that memory does not grow with
their number. 2 GiB hold 2 x 8192 tokens x 16 heads x 128 in one group: smaller groups leave SMs
idle.
"""

PRODUCT_ROWS = 2048
"""Tokens reduced by one program of the products' gradient: a top level of 32768 tokens still gives
8 programs a head.
"""


PRODUCT_TILE = 64
"""D x D matrices are made in tiles of this side: whole ones at D = 128 leave one program per SM."""


WIDE_FLOAT32 = Tiles(64, 64, 8, 1)
"""Backward passes of fp32 heads padded to 256: of four, the one that fits shared memory (128 KiB;
64 x 32 asks for 320). Slow: it spills.
"""


def forward_tiles(dtype: torch.dtype, width: int) -> Tiles:
    """Tiles of the forward pass for heads padded to `width`: a query tile stays, keys stream.

    Small tiles and 4 warps, so that two or three programs share an SM and one computes its softmax
    while another multiplies: 0.77 ms against 1.04 with 128 x 128 and 8 warps (D = 64, 2 x 8192 x 16
    heads). Stages are what shared memory then leaves.
    """
    if dtype == torch.float32:
        return Tiles(64, 64 if width <= 64 else 32, 4, 2 if width <= 128 else 1)
    return Tiles(64, 64, 4, 3 if width <= 128 else 1)


def query_tiles(dtype: torch.dtype, width: int) -> Tiles:
    """Tiles of the dq pass: a query tile stays, keys stream. 0.80 ms, 1.11 with 128 x 128."""
    if dtype == torch.float32:
        return Tiles(64, 32, 4, 2) if width <= 128 else WIDE_FLOAT32
    return Tiles(64, 64, 4, 3 if width <= 64 else 2 if width <= 128 else 1)


def key_tiles(dtype: torch.dtype, width: int) -> Tiles:
    """Tiles of the dk, dv pass: a key tile stays, queries stream. 2.5 ms, 3.1 with 64 x 128."""
    if dtype == torch.float32:
        return Tiles(64, 64, 4, 1) if width <= 128 else WIDE_FLOAT32
    return Tiles(64, 64, 4, 3 if width <= 64 else 2 if width <= 128 else 1)


def rectangle_tiles(dtype: torch.dtype, width: int) -> tuple[Tiles, Tiles, Tiles]:
    """Tiles of the forward, the dq and the dk, dv pass between two pieces: those of the squares.

    fp32 heads padded to 256 take smaller ones, since what stays is kept split into tf32 terms: 192
    KiB of shared memory, 384 with 64 x 64. Slow: they spill.
    """
    backward = query_tiles(dtype, width), key_tiles(dtype, width)
    if dtype == torch.float32 and width > 128:
        backward = Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)
    return forward_tiles(dtype, width), *backward


SOLVE = "tf32x3" if triton.knobs.runtime.interpret else "bf16x6"
"""Products of the triangular solve, both exact to fp32: six 16-bit terms take either operand order
(0.17 ms against 0.21 at D = 128, 2 x 8192 x 16 heads); the interpreter knows only tf32x3.
"""

SWEEP_OPTIONS = {"ROWS": 64, "num_warps": 4}
"""A program of the level sweep: its rows and warps. One chunk: 20 % faster than two with 8 warps at
D = 128 (2 x 8192 x 16 heads), though each chunk loads the products anew: two programs share an SM.
"""
