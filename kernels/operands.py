"""Operands of a launch: widths, flags, strides, and groups of heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from . import config, levels, tiles
from .constants import CHUNK, LOG2_E
from .gate import running_sums
from .tiles import padded

if TYPE_CHECKING:
    from path_backend.arguments import Inputs


@dataclass
class Operands:
    """One group of heads of one call, last dimensions contiguous.

    gate [B, HQ, whole spans] and gate_offset [B, HQ, spans] are the `running_sums`.
    is_segment: the tokens are a part of a longer sequence.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor | None
    beta: Tensor | None
    gate: Tensor | None
    gate_offset: Tensor | None
    document_start: Tensor | None
    document_end: Tensor | None
    scale: float
    is_segment: bool = False

    @property
    def group(self) -> int:
        return self.q.shape[2] // self.k.shape[2]

    @property
    def case(self) -> tuple[torch.dtype, int, bool, bool, bool]:
        """Returns what tiles depend on: dtype, widest tile, reflections, gate, documents."""
        w, gate, documents = (x is not None for x in (self.w, self.gate, self.document_start))
        return self.q.dtype, self.widest, w, gate, documents

    @property
    def widths(self) -> dict[str, int]:
        return {"HEAD_DIM": self.q.shape[3], "BLOCK_D": self.width}

    @property
    def width(self) -> int:
        """Returns the columns of a tile of q, k and w. With reflections at least 64: Triton 3.6
        compiles the products of 32 columns to shared-memory accesses out of range (seen on sm_90).
        The floor can go with the support of Triton 3.6, if a newer one is seen not to.
        """
        return padded(self.q.shape[3], 16 if self.w is None else 64)

    @property
    def widest(self) -> int:
        """Returns the columns of the widest tile."""
        return max(self.width, padded(self.v.shape[3]))

    @property
    def value_widths(self) -> dict[str, int]:
        return {"HEAD_DIM_V": self.v.shape[3], "BLOCK_DV": padded(self.v.shape[3])}

    @property
    def flags(self) -> dict[str, Any]:
        return {
            "HAS_PATH": self.w is not None,
            "HAS_GATE": self.gate is not None,
            "HAS_DOC": self.document_start is not None,
            "PRECISION": "tf32x3" if self.q.dtype == torch.float32 else "tf32",
        }

    @property
    def precision(self) -> str:
        """Returns how the transform multiplies: see `products.dot`. Interpreted bf16 products are
        wrong.
        """
        if self.q.dtype == torch.float32:
            return "tf32x3" if triton.knobs.runtime.interpret else "fp32"
        return "fp16x3" if self.q.dtype == torch.float16 else "bf16x3"

    @property
    def product_dtype(self) -> torch.dtype:
        """Returns the dtype of the stored D x D products: see `products.move`."""
        return torch.float32 if self.q.dtype == torch.float32 else torch.float16

    def without_documents(self) -> Operands:
        return replace(self, document_start=None, document_end=None)

    def part(self, batch: slice, heads: slice, queries: slice) -> Operands:
        def pick(x: Tensor | None, h: slice) -> Tensor | None:
            return None if x is None else x[batch, :, h]

        return Operands(
            self.q[batch, :, queries],
            self.k[batch, :, heads],
            self.v[batch, :, heads],
            pick(self.w, heads),
            pick(self.beta, heads),
            None if self.gate is None else self.gate[batch, queries],
            None if self.gate_offset is None else self.gate_offset[batch, queries],
            None if self.document_start is None else self.document_start[batch],
            None if self.document_end is None else self.document_end[batch],
            self.scale,
            self.is_segment,
        )


def readable(x: Tensor) -> Tensor:
    """Returns x [B, T, heads, width], copied unless the kernels can read it: the last dimension
    contiguous, all else in units of 16 bytes, the offset of every head in 32 bits.
    """
    unit = 16 // x.element_size()
    aligned = (
        all(step > 0 and step % unit == 0 for step in x.stride()[:3]) and x.data_ptr() % 16 == 0
    )
    if x.stride(3) == 1 and aligned and x.stride(2) * x.shape[2] < 2**31:
        return x
    return readable_like(x).copy_(x)


def readable_like(x: Tensor) -> Tensor:
    """Returns an uninitialised tensor of the shape of x [B, T, heads, width], such that the kernels
    can read it.
    """
    unit = 16 // x.element_size()
    return x.new_empty(*x.shape[:3], levels.cdiv(x.shape[3], unit) * unit)[..., : x.shape[3]]


def with_offsets_in_32_bits(beta: Tensor) -> Tensor:
    """Returns beta [B, T, H], copied unless 32 bits hold the offset of every token; of columns of a
    wide tensor they may not.
    """
    return beta if beta.stride(1) * beta.shape[1] < 2**31 else beta.contiguous()


def in_gradient_dtype(x: Tensor) -> Tensor:
    """Returns fp16 x in fp32, others as they are. fp16 inputs are differentiated in fp32 storage
    and products of three tf32 terms, which hold fp16 values exactly: a mean loss over a million
    tokens has gradients of 1e-7, where fp16 has no digits left.
    """
    return x.float() if x.dtype == torch.float16 else x


def prepare(inputs: Inputs, scale: float, is_segment: bool = False) -> Operands:
    """Returns the operands of a call: all heads, gates summed, documents' ends."""
    q, k, v, w, beta, log_gate, document_start = inputs
    gate = gate_offset = document_end = None
    if log_gate is not None:
        gate, gate_offset = running_sums(log_gate)
    if document_start is not None:
        document_start = document_start.contiguous()
        positions = torch.arange(q.shape[1], device=q.device, dtype=torch.int32)
        document_end = torch.searchsorted(
            document_start,
            positions.expand_as(document_start).contiguous(),
            right=True,
            out_int32=True,
        )
    return Operands(
        readable(q),
        readable(k),
        readable(v),
        None if w is None else readable(w),
        None if beta is None else with_offsets_in_32_bits(beta),
        gate,
        gate_offset,
        document_start,
        document_end,
        scale,
        is_segment,
    )


def groups(x: Operands, backward: bool) -> Iterator[tuple[slice, slice, slice]]:
    """Yields ranges of the batch, of key/value heads and of their query heads whose scratch fits
    SCRATCH_BYTES (at least one key/value head at a time), MAX_HEADS query heads at most.
    """
    for batch, heads in _key_groups(x, backward):
        yield batch, heads, slice(heads.start * x.group, heads.stop * x.group)


def _key_groups(x: Operands, backward: bool) -> Iterator[tuple[slice, slice]]:
    B, T, H = x.k.shape[:3]
    limit = config.MAX_HEADS // x.group
    if x.w is not None:
        limit = min(limit, config.SCRATCH_BYTES // _scratch_bytes(x, backward))
    limit = max(1, limit)
    for batch in _even_parts(B, max(1, limit // H)):
        for heads in _even_parts(H, limit):
            yield batch, heads


def _even_parts(count: int, most: int) -> list[slice]:
    """Returns 0 ... count - 1 in as few ranges of at most `most` as there can be, even ones, none
    longer than the first: what held its scratch holds theirs.
    """
    parts = levels.cdiv(count, most)
    ends = [levels.cdiv(count * i, parts) for i in range(parts + 1)]
    return [slice(*range_) for range_ in zip(ends, ends[1:], strict=False)]


def _scratch_bytes(x: Operands, backward: bool) -> int:
    """Returns the bytes that one key/value head of a batch and its query heads take: the tensors of
    Frames, in the backward those of FrameGradients, dX, and dP of the lowest levels.
    """
    T, width, size = x.q.shape[1], x.width, x.q.element_size()
    row, matrix = width * size, levels.cdiv(T, CHUNK) * CHUNK**2
    rows, product = levels.total_rows(T) * row, width * width * x.product_dtype.itemsize
    per_query = rows + 4 * matrix
    per_key = rows + levels.total_blocks(T) * product + 4 * matrix
    if backward:
        moved = levels.moved_rows(T, x.is_segment) * row
        gradients = sum(levels.level_blocks(T, level, x.is_segment) for level in (1, 2))
        per_query += moved + size * matrix * (2 if x.group > 1 else 1)
        per_key += moved + 4 * matrix + gradients * 4 * width * width
    return per_query * x.group + per_key


def with_positive_scale(k: Tensor, scale: float) -> tuple[Tensor, float]:
    """Returns k and scale of the same logits, with a scale > 0 in log2 units: the largest dot
    product of a row is that of its largest logit.
    """
    return (k if scale >= 0 else -k), max(abs(scale) * LOG2_E, 1e-30)


def streamed_keys(k: Tensor, v: Tensor, gate: Tensor | None, tile: config.Tiles) -> dict[str, Any]:
    """Returns what passes by a query tile: of k [B, H, rows, D], v [B, T, H, DV] and the gates of
    keys [B, HQ, whole tiles].
    """
    rows, descriptors = tile.stream, tile.descriptors
    return {
        "k_tiles": tiles.source(k, rows, descriptors=descriptors),
        "v_tiles": tiles.source(v.transpose(1, 2), rows, descriptors=descriptors),
        "gate_tiles": None
        if gate is None
        else tiles.row_source(gate, rows, descriptors=descriptors),
        "BLOCK_N": rows,
    }


def streamed_queries(q: Tensor, d_out: Tensor, tile: config.Tiles) -> dict[str, Any]:
    """Returns what passes by a key tile: of q [B, HQ, rows, D] and d_out [B, T, HQ, DV]."""
    rows, descriptors = tile.stream, tile.descriptors
    return {
        "q_tiles": tiles.source(q, rows, descriptors=descriptors),
        "d_out_tiles": tiles.source(d_out.transpose(1, 2), rows, descriptors=descriptors),
        "BLOCK_M": rows,
    }


def strides(*names_and_tensors: tuple[str, Tensor | None]) -> dict[str, int]:
    """Returns stride_<name>b, stride_<name>t, stride_<name>h of [B, T, H, ...] tensors (zeros where
    absent).
    """
    result = {}
    for name, x in names_and_tensors:
        for i, axis in enumerate("bth"):
            result[f"stride_{name}{axis}"] = 0 if x is None else x.stride(i)
    return result
