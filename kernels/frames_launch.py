"""Launchers of the transform: factors, products and levels of a group of heads, and their
gradients.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import config, levels, tiles
from .carry import carry_kernel, upsweep_kernel
from .chunk import chunk_kernel
from .chunk_backward import chunk_backward_kernel
from .constants import CHUNK
from .operands import Operands, strides
from .records import SegmentEnds
from .upsweep_backward import (
    chunk_product_backward_kernel,
    product_gradient_kernel,
    upsweep_backward_kernel,
)


@dataclass
class Frames:
    """The transformed inputs of one group of heads: factors, products, and q, k of every level."""

    inverse: Tensor  # [B, H, N, C, C] fp32, M^-1 of each chunk
    products: Tensor  # [B, H, blocks, BLOCK_D, BLOCK_D], see levels.stored_blocks
    q_levels: Tensor  # [B, HQ, rows, BLOCK_D]
    k_levels: Tensor  # [B, H, rows, BLOCK_D]
    intra: Tensor  # [B, HQ, N, C, C] fp32

    def product_tiles(self) -> tiles.Source:
        """Returns the source of whole products, one below the other."""
        return tiles.source(self.products.flatten(2, 3), self.products.shape[-1])


@dataclass
class FrameGradients:
    """Holds what the attention's backward leaves for the transform's, beside the gradients of
    q_start and k_end where those of q and k will be.
    """

    q_moved: Tensor  # [B, HQ, moved rows, BLOCK_D], of the levels' queries as moved by P
    k_moved: Tensor  # [B, H, moved rows, BLOCK_D]
    intra: Tensor  # [B, HQ, N, C, C]

    @staticmethod
    def empty(x: Operands) -> "FrameGradients":
        B, T, HQ, _ = x.q.shape
        rows = levels.moved_rows(T, x.is_segment)
        return FrameGradients(
            x.q.new_empty(B, HQ, rows, x.width),
            x.q.new_empty(B, x.k.shape[2], rows, x.width),
            x.q.new_empty(B, HQ, levels.cdiv(T, CHUNK), CHUNK, CHUNK),
        )


def empty_ends(x: Operands) -> SegmentEnds:
    """Returns uninitialised ends of a segment with reflections."""
    B, _, H, D = x.k.shape
    product = torch.empty(B, H, D, D, dtype=torch.float32, device=x.k.device)
    return SegmentEnds(x.q.new_empty(x.q.shape), x.k.new_empty(x.k.shape), product)


def part_of_ends(ends: SegmentEnds, batch: slice, heads: slice, queries: slice) -> SegmentEnds:
    """Returns the ends of one group of heads."""
    q_start, k_end, product = ends
    assert product is not None
    return SegmentEnds(q_start[batch, :, queries], k_end[batch, :, heads], product[batch, heads])


def _chunk_arguments(x: Operands, frames: Frames) -> dict[str, Any]:
    """Returns the arguments of every kernel that reads the chunks' factors W, X."""
    T, H = x.k.shape[1:3]
    return {
        "beta_ptr": x.beta,
        "inverse_ptr": frames.inverse,
        **strides(("b", x.beta)),
        "T": T,
        "H": H,
        "num_chunks": frames.inverse.shape[2],
        "CHUNK": CHUNK,
        "PRECISION": x.precision,
    }


def _by_head(x: Tensor | None) -> Tensor:
    """Returns x [B, T, heads, D], there with reflections, as [B, heads, T, D]."""
    assert x is not None
    return x.transpose(1, 2)


def _chunk_tiles(x: Tensor | None, columns: int) -> tiles.Source:
    """Returns the source of tiles [CHUNK, columns] of x [B, T, heads, D]."""
    return tiles.source(_by_head(x), CHUNK, columns)


def make_frames(x: Operands, ends: SegmentEnds | None = None) -> Frames:
    """Transforms the chunks, makes the products, carries queries and keys; a segment's into `ends`.

    A segment moves all of its tokens to its ends, so that documents skip nothing here.
    """
    x = x.without_documents() if x.is_segment else x
    B, T, HQ, D = x.q.shape
    H, width = x.k.shape[2], x.width
    chunks, rows = levels.cdiv(T, CHUNK), levels.total_rows(T)
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": x.q.device}
    frames = Frames(
        torch.empty(B, H, chunks, CHUNK, CHUNK, **fp32),
        x.q.new_empty(B, H, levels.total_blocks(T), width, width, dtype=x.product_dtype),
        x.q.new_empty(B, HQ, rows, width),
        x.q.new_empty(B, H, rows, width),
        torch.empty(B, HQ, chunks, CHUNK, CHUNK, **fp32),
    )
    _make_products(x, frames)
    q_start, k_end = (None, None) if ends is None else (ends.q_start, ends.k_end)
    carry_kernel[(chunks * (x.group + 1), B * H)](
        **_chunk_arguments(x, frames),
        product_tiles=frames.product_tiles(),
        q_tiles=_chunk_tiles(x.q, width),
        k_tiles=_chunk_tiles(x.k, width),
        w_tiles=_chunk_tiles(x.w, width),
        q_levels_ptr=frames.q_levels,
        k_levels_ptr=frames.k_levels,
        intra_ptr=frames.intra,
        start_ptr=x.document_start,
        end_ptr=x.document_end,
        q_start_ptr=q_start,
        k_end_ptr=k_end,
        **strides(("s", q_start), ("e", k_end)),
        num_levels=levels.num_levels(T),
        total_rows=rows,
        **x.widths,
        HAS_DOC=x.document_start is not None,
        GROUP=x.group,
        num_warps=4,
        maxnreg=config.registers(x.q.dtype, config.CARRY_REGISTERS),
    )
    if ends is not None:
        assert ends.product is not None
        ends.product.copy_(frames.products[:, :, -2, :D, :D])
    return frames


def _make_products(x: Operands, frames: Frames) -> None:
    """Computes factors and products of the chunks, and products of the levels above."""
    B, T, H, _ = x.k.shape
    width, made = x.width, levels.product_levels(T, x.is_segment)
    chunk_kernel[(frames.inverse.shape[2], B * H)](
        **_chunk_arguments(x, frames),
        w_ptr=x.w,
        **strides(("w", x.w)),
        product_ptr=frames.products,
        num_blocks=levels.level_blocks(T, 0, x.is_segment) if made else 0,
        total_blocks=levels.total_blocks(T),
        **x.widths,
        SOLVE=config.SOLVE,
        COLS=min(width, 64),
        num_warps=4,
        maxnreg=config.registers(x.q.dtype, config.CHUNK_REGISTERS),
    )
    child = base = 0
    for level in made:
        count = levels.level_blocks(T, level, x.is_segment)
        side, warps = config.product_tiles(width, count * B * H)
        if level > 0:
            upsweep_kernel[(count, B * H, (width // side) ** 2)](
                product_ptr=frames.products,
                start_ptr=x.document_start,
                T=T,
                H=H,
                level=level,
                child_base=child,
                parent_base=base,
                total_blocks=levels.total_blocks(T),
                BLOCK_D=width,
                CHUNK=CHUNK,
                TILE=side,
                HAS_DOC=x.document_start is not None,
                SEGMENT=x.is_segment,
                PRECISION=x.precision,
                num_warps=warps,
            )
        if x.is_segment and level < made[-1] and count < levels.stored_blocks(T, level):
            # the last block has no sibling
            frames.products[:, :, base + count] = torch.eye(width, device=x.q.device)
        child, base = base, base + levels.stored_blocks(T, level)


def _moved_arguments(x: Operands, frames: Frames, grads: FrameGradients) -> dict[str, Any]:
    """Returns as arguments what P moved at every level, and the gradients of what came out."""
    T = x.q.shape[1]
    return {
        "q_levels_ptr": frames.q_levels,
        "k_levels_ptr": frames.k_levels,
        "dq_moved_ptr": grads.q_moved,
        "dk_moved_ptr": grads.k_moved,
        "start_ptr": x.document_start,
        "end_ptr": x.document_end,
        "total_rows": levels.total_rows(T),
        "moved_rows": levels.moved_rows(T, x.is_segment),
        "GROUP": x.group,
        "HAS_DOC": x.document_start is not None,
        "SEGMENT": x.is_segment,
    }


def _products_backward(
    x: Operands, frames: Frames, grads: FrameGradients, d_product: Tensor | None
) -> tuple[Tensor, Tensor, int]:
    """Returns gradients [B * H, count, BLOCK_D, BLOCK_D] of the products of level 1 in fp32, the
    largest entry of each in parts of 64 x 64, and their count; level by level from the top, where
    that of a segment comes in.
    """
    B, T, H, D = x.k.shape
    width, moving = x.width, levels.moving_levels(T, x.is_segment)
    row_base = levels.moved_rows(T, x.is_segment)
    block_base = sum(levels.stored_blocks(T, level) for level in moving)
    tokens = max(CHUNK, config.PRODUCT_ROWS // x.group)
    moved = _moved_arguments(x, frames, grads)
    parts = (width // 64) ** 2
    gradient = size = frames.inverse  # of the level above; none at the top
    count = 0
    if d_product is not None:
        gradient, count = frames.inverse.new_zeros(B, H, width, width), 1
        gradient[..., :D, :D] = d_product
        size = gradient.abs().amax((2, 3)).clamp(min=1e-30).repeat_interleave(parts)
    for level in reversed(moving[1:]):
        parent, parent_size, parents = gradient, size, count
        count = levels.level_blocks(T, level, x.is_segment)
        block_base -= levels.stored_blocks(T, level)
        row_base -= levels.level_rows(T, level)
        splits = levels.cdiv(CHUNK << level, tokens)
        side, warps = config.product_tiles(width, count * splits * B * H)
        shared = {
            **moved,
            "T": T,
            "H": H,
            "level": level,
            "row_base": row_base,
            "num_blocks": count,
            "num_splits": splits,
            "BLOCK_D": width,
            "CHUNK": CHUNK,
            "TILE": side,
            "PRECISION": x.precision,
            "num_warps": warps,
            "num_stages": 3,
            "maxnreg": config.registers(x.q.dtype, config.UPSWEEP_REGISTERS),
        }
        partial = frames.products
        if splits > 1:
            partial = torch.empty(
                B * H, count, splits, width, width, dtype=torch.float32, device=x.q.device
            )
            product_gradient_kernel[(count * splits, B * H, (width // side) ** 2)](
                **shared, partial_ptr=partial, SPLIT=tokens
            )
            side, warps = config.product_tiles(width, count * B * H)
        gradient = torch.empty(B * H, count, width, width, dtype=torch.float32, device=x.q.device)
        size = gradient.new_empty(B * H, count, parts)
        upsweep_backward_kernel[(count, B * H, (width // side) ** 2)](
            **{**shared, "TILE": side, "num_warps": warps},
            product_ptr=frames.products,
            partial_ptr=partial,
            parent_ptr=parent,
            parent_size_ptr=parent_size,
            gradient_ptr=gradient,
            size_ptr=size,
            block_base=block_base,
            num_parents=parents,
            total_blocks=levels.total_blocks(T),
            PARTIAL=splits > 1,
        )
    return gradient, size, count


def frames_backward(
    x: Operands,
    frames: Frames,
    grads: FrameGradients,
    dq: Tensor,
    dk: Tensor,
    dw: Tensor | None,
    d_beta: Tensor | None,
    d_product: Tensor | None,
) -> None:
    """Goes from the gradients of frames, and of the product of a segment, to those of q, k, w,
    beta. dq and dk come as those of q_start and k_end.
    """
    x = x.without_documents() if x.is_segment else x
    B, T, H, _ = x.k.shape
    chunks = frames.inverse.shape[2]
    dx = frames.inverse
    has_product = len(levels.product_levels(T, x.is_segment)) > 0
    if has_product:
        dx = torch.empty_like(frames.inverse)
        parent, size, count = _products_backward(x, frames, grads, d_product)
        chunk_product_backward_kernel[(chunks, B * H)](
            **_chunk_arguments(x, frames),
            **_moved_arguments(x, frames, grads),
            w_tiles=_chunk_tiles(x.w, x.width),
            product_ptr=frames.products,
            parent_ptr=parent,
            size_ptr=size,
            dx_ptr=dx,
            dw_ptr=dw,
            **strides(("dw", dw)),
            num_parents=count,
            total_blocks=levels.total_blocks(T),
            **x.widths,
            num_warps=4,
            num_stages=1,
        )
    slab, stages = config.contract_slabs(x.q.dtype, x.width)
    fetched = {"q": x.q, "k": x.k, "w": x.w, "dq": dq, "dk": dk}
    by_head = {name: _by_head(y) for name, y in fetched.items()}
    chunk_backward_kernel[(chunks, B * H)](
        **_chunk_arguments(x, frames),
        **{f"{name}_tiles": tiles.source(y, CHUNK, slab) for name, y in by_head.items()},
        **{f"{name}_ptrs": tiles.pointer_source(y) for name, y in by_head.items()},
        dw_ptrs=tiles.pointer_source(_by_head(dw)),
        d_intra_ptr=grads.intra,
        dx_ptr=dx,
        d_low_ptr=frames.intra,
        neg_a_ptr=torch.empty_like(grads.intra) if x.group > 1 else grads.intra,
        d_beta_ptr=d_beta,
        **strides(("db", d_beta)),
        GROUP=x.group,
        HEAD_DIM=x.q.shape[3],
        HAS_PRODUCT=has_product,
        SLAB=slab,
        STAGES=stages,
        num_warps=4,
        maxnreg=config.CHUNK_BACKWARD_REGISTERS,
    )
