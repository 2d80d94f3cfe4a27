"""Every launch parameter in one place: tiles, warps, pipeline stages, and why.

A time compares two choices on the day of the choice, on one H200 in bf16, with 2 x 8192 tokens of
16 heads of 128 unless said. What the kernels take today is in BENCHMARKS.md.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton


@dataclass(frozen=True)
class Tiles:
    """Parameters of a pass over attention tiles: `rows` stay, `stream` of the other side pass. With
    reflections a chunk stays. The two passes of the backward share `rows`. `registers` of a thread
    at most. `descriptors`: what passes comes by them, on cards that can (TMA), not by pointers.
    """

    stream: int
    num_warps: int
    num_stages: int
    rows: int = 64
    registers: int | None = None
    descriptors: bool = True

    @property
    def options(self) -> dict[str, int | None]:
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.registers,
        }


SCRATCH_BYTES = 13 << 27
"""Heads are processed in groups whose scratch stays under this, so that memory does not grow with
their number. 1.6 GiB hold 2 x 8192 tokens x 32/8 heads x 128 in one group: smaller groups leave SMs
idle.
"""

MAX_HEADS = 65535
"""Query heads of all sequences in one launch: a grid's second dimension holds no more."""

PRODUCT_ROWS = 2048
"""Tokens reduced by one program of the products' gradient: a top level of 32768 tokens still gives
8 programs a head.
"""


def product_tiles(width: int, products: int) -> tuple[int, int]:
    """Returns the side of the tiles in which `products` D x D matrices are made, and warps of one
    program.

    Whole ones read their factors once; 64 x 64 where there are too few to fill the SMs.
    """
    return (width, 8 if width > 64 else 4) if products >= WHOLE_PRODUCTS else (min(width, 64), 4)


WHOLE_PRODUCTS = 512


@dataclass(frozen=True)
class Architecture:
    """Properties of a family of cards that launches depend on."""

    shared_memory: int
    """KiB of shared memory of one program."""

    descriptors: bool
    """True if the card copies tiles by descriptors (TMA)."""

    early_loads: bool = False
    """True if the backward's loops issue the next tile's loads early: see `early_loads`. Here and
    below: what was timed on Hopper alone, and needs its 227 KiB.
    """

    split_documents: bool = False
    """True if dq has a loop of its own, without a mask, for keys that every row sees."""

    slab: int | None = None
    """Columns that the chunk backward contracts at a time: see `contract_slabs`."""


LARGE, SMALL = 227, 99
"""KiB of shared memory of one program: what the launches are tuned for (Hopper, data center
Blackwell), and the least they need (sm_86, 89, 120).
"""

SM_80 = Architecture(163, descriptors=False)
SM_89 = Architecture(SMALL, descriptors=False)
SM_90 = Architecture(LARGE, descriptors=True, early_loads=True, split_documents=True, slab=32)
SM_100 = Architecture(LARGE, descriptors=True)
SM_120 = Architecture(SMALL, descriptors=True)

ARCHITECTURES = {(8, 0): SM_80, (8, 7): SM_80, (9, 0): SM_90, (10, 0): SM_100, (10, 3): SM_100}
"""By compute capability. Others have as little shared memory as any: SM_89, from 9.0 on SM_120."""


def architecture() -> Architecture:
    """Returns that of the current card."""
    card = capability()
    return ARCHITECTURES.get(card, SM_89 if card < (9, 0) else SM_120)


def capability() -> tuple[int, int]:
    """Returns that of the current card. The interpreter runs what Hopper runs."""
    if triton.knobs.runtime.interpret:
        return 9, 0
    return _capability(torch.cuda.current_device())


@cache
def _capability(device: int) -> tuple[int, int]:
    """Cached, because one call asks 24 times."""
    return torch.cuda.get_device_capability(device)


def needed_memory(dtype: torch.dtype, width: int, path: bool) -> int:
    """Returns the KiB that forward and backward of heads padded to `width` take at least: fp16 has
    gradients in fp32, and with reflections 64 rows stay, a chunk.
    """
    if dtype == torch.bfloat16:
        return SMALL
    return 161 if path and width > 64 else 192 if width > 128 else SMALL


WIDE = Tiles(32, 8, 1, rows=32)
"""Backward passes whose 64 x 64 tiles do not fit. Slow: those of fp32 heads of 256 spill."""


def wide(dtype: torch.dtype, width: int) -> bool:
    """Returns whether `WIDE` passes are needed without reflections, for heads padded to `width`.
    fp32 that stays is kept split into tf32 terms: at 256 columns 384 KiB, 192 as WIDE.
    """
    return width * dtype.itemsize > (512 if architecture().shared_memory >= LARGE else 256)


def _stages(width: int) -> int:
    """Returns the stages that shared memory leaves beside the 16-bit tiles that stay."""
    return 3 if width <= 64 else 2 if width <= 128 else 1


def forward_tiles(dtype: torch.dtype, width: int, path: bool, gate: bool, documents: bool) -> Tiles:
    """Returns the tiles of the forward pass for heads padded to `width`: a query tile stays, keys
    stream.

    Small tiles and 4 warps, so that two or three programs share an SM and one computes its softmax
    while another multiplies: 0.77 ms against 1.04 with 128 x 128 and 8 warps (heads of 64). Stages
    are what shared memory then leaves; without reflections the diagonal's keys take some of it.
    With reflections, without documents, heads of 64 fit 128 registers and two stages, four programs
    an SM: with a gate 1.50 ms, 1.61 with three stages (32/8 heads). Keys of 128 with a gate come by
    pointers: 1.35 ms, 1.46 by descriptors.
    """
    if dtype == torch.float32:
        return Tiles(64 if width <= 64 else 32, 4, 2 if width <= 128 else 1)
    if not path:
        return Tiles(64, 4, _stages(width))
    if width <= 64 and not documents:
        return Tiles(64, 4, 2, registers=128)
    return Tiles(64, 4, 3 if width <= 128 else 1, descriptors=not gate or width <= 64)


def query_tiles(dtype: torch.dtype, width: int, path: bool, gate: bool, documents: bool) -> Tiles:
    """Returns the tiles of the dq pass: a query tile stays, keys stream. Larger ones lose as in the
    others.

    With reflections and a gate, without documents, heads of 64 fit 168 registers, three programs an
    SM: 1.80 ms, 2.05 with 208 (32/8 heads). With a gate pointers win: 1.82 ms, 2.00 by descriptors.
    """
    if not path and wide(dtype, width):
        return WIDE
    if dtype == torch.float32:
        return Tiles(32, 4, 2)
    limit = 168 if path and width <= 64 and not documents else None
    return Tiles(64, 4, _stages(width), registers=limit, descriptors=not gate)


def key_tiles(dtype: torch.dtype, width: int, path: bool, gate: bool, documents: bool) -> Tiles:
    """Returns the tiles of the dk, dv pass: a key tile stays, queries stream. 2.5 ms; 3.1 with 8
    warps and queries by 128.

    With reflections alone heads of 64 fit 168 registers but for a few spills, three programs an SM:
    2.24 ms, 2.50 with 250 (32/8 heads); with a gate 2.83 and 2.77.
    """
    if not path and wide(dtype, width):
        return WIDE
    if dtype == torch.float32:
        return Tiles(64 if width <= 64 or architecture().shared_memory >= LARGE else 32, 4, 1)
    if path and width <= 64 and not gate and not documents:
        return Tiles(64, 4, 2, registers=168)
    return Tiles(64, 4, _stages(width))


def early_loads(tile: Tiles) -> int | None:
    """Returns the stages of the backward's loops, if the next tile's loads go before the second
    half of a tile's work. With two stages they would come last, and the next tile wait for them:
    dk, dv 2.32 ms then, 2.06 before; dq 1.66 and 1.48. With three they come in time anyway.
    """
    return tile.num_stages if tile.num_stages == 2 and architecture().early_loads else None


def contract_slabs(dtype: torch.dtype, width: int) -> tuple[int, int]:
    """Returns the columns that the chunk backward takes at a time for its C x C products, and
    pipeline stages.

    On Hopper descriptors copy them past the registers: in slabs of 32 all are on their way before
    the first are multiplied, with one stage more than slabs (0.46 ms, 0.54 with all columns by
    pointers). Elsewhere all columns in 16 bits, since it waits for loads more than for anything.
    """
    slab = architecture().slab
    if slab is not None:
        return slab, width // slab + 1
    return (min(width, 64) if dtype == torch.float32 else width), 1


SOLVE = "tf32x3" if triton.knobs.runtime.interpret else "bf16x6"
"""Products of the triangular solve, both exact to fp32: six 16-bit terms take either operand order
(0.17 ms against 0.21); the interpreter knows only tf32x3.
"""

CHUNK_REGISTERS = 128
CARRY_REGISTERS = 168
UPSWEEP_REGISTERS = 128
"""A thread's registers at most, for 16-bit inputs: four programs of the chunk transform share an SM
then, three of the carry (0.42 ms; 0.62 with 128, which spill), two of the upsweep's backward (0.35
ms; 0.40 without). They are chains of dependent products and wait more than they compute. fp32
products would spill.
"""

CHUNK_BACKWARD_REGISTERS = 255
"""All that a thread can have. Left to itself ptxas 12.8 takes 32 for heads of 64 on sm_80, and
spills 51 KB: the limit can go once a ptxas does not.
"""


def registers(dtype: torch.dtype, limit: int | None) -> int | None:
    """Returns the limit of a thread's registers; none for fp32."""
    return None if dtype == torch.float32 else limit
