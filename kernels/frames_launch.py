"""Launchers of the transform: factors, products and levels of a group of heads, and their
gradients.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import config, tiles
from .carry import sweep_kernel, tree_kernel
from .chunk import chunk_kernel
from .chunk_backward import chunk_backward_kernel
from .operands import Inputs, strides
from .tiles import CHUNK
from .upsweep_backward import (
    chunk_product_backward_kernel,
    product_gradient_kernel,
    tree_backward_kernel,
)


@dataclass
class Frames:
    """The transformed inputs of one group of heads: factors, products, and q, k of every level."""

    inverse: Tensor  # [B, H, N, C, C] fp32, M^-1 of each chunk
    products: Tensor  # [B, H, blocks, BLOCK_D, BLOCK_D], see tiles.stored_blocks
    q_levels: Tensor  # [B, HQ, rows, BLOCK_D]
    k_levels: Tensor  # [B, H, rows, BLOCK_D]
    local: Tensor  # [B, HQ, N, C, C] fp32

    def product_tiles(self) -> tiles.Source:
        """Of whole products, one below the other."""
        return tiles.source(self.products.flatten(2, 3), self.products.shape[-1])


@dataclass
class FrameGradients:
    """What the attention's backward leaves for the transform's, beside the gradients of q_start and
    k_end where those of q and k will be.
    """

    q_moved: Tensor  # [B, HQ, moved rows, BLOCK_D], of the levels' queries as moved by P
    k_moved: Tensor  # [B, H, moved rows, BLOCK_D]
    local: Tensor  # [B, HQ, N, C, C]

    @staticmethod
    def empty(x: Inputs) -> "FrameGradients":
        B, T, HQ, _ = x.q.shape
        rows = tiles.moved_rows(T, x.piece)
        return FrameGradients(
            x.q.new_empty(B, HQ, rows, x.width),
            x.q.new_empty(B, x.k.shape[2], rows, x.width),
            x.q.new_empty(B, HQ, tiles.cdiv(T, CHUNK), CHUNK, CHUNK),
        )


@dataclass
class Ends:
    """What other pieces see of a piece: its queries at its start, its keys at its end, its product.

    Or the gradients of these, q_start and k_end then in fp32.
    """

    q_start: Tensor  # [B, T, HQ, D]
    k_end: Tensor  # [B, T, H, D]
    product: Tensor  # [B, H, D, D] fp32

    @staticmethod
    def empty(x: Inputs) -> "Ends":
        B, _, H, D = x.k.shape
        product = torch.empty(B, H, D, D, dtype=torch.float32, device=x.k.device)
        return Ends(x.q.new_empty(x.q.shape), x.k.new_empty(x.k.shape), product)

    def part(self, batch: slice, heads: slice, queries: slice) -> "Ends":
        return Ends(
            self.q_start[batch, :, queries], self.k_end[batch, :, heads], self.product[batch, heads]
        )


def _chunk_arguments(x: Inputs, frames: Frames) -> dict[str, Any]:
    """What every kernel shares that reads the chunks' factors W, X."""
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
    """x [B, T, heads, D], there with reflections, as [B, heads, T, D]."""
    assert x is not None
    return x.transpose(1, 2)


def _chunk_tiles(x: Tensor | None, columns: int) -> tiles.Source:
    """Of x [B, T, heads, D], tiles [CHUNK, columns]."""
    return tiles.source(_by_head(x), CHUNK, columns)


def make_frames(x: Inputs, ends: Ends | None = None) -> Frames:
    """Chunk transform, tree of products, sweep of queries and keys; those of a piece into `ends`.

    A piece moves all of its tokens to its ends, so that documents skip nothing here.
    """
    x = x.without_documents() if x.piece else x
    B, T, HQ, D = x.q.shape
    H, width = x.k.shape[2], x.width
    chunks, rows = tiles.cdiv(T, CHUNK), tiles.total_rows(T)
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": x.q.device}
    frames = Frames(
        torch.empty(B, H, chunks, CHUNK, CHUNK, **fp32),
        x.q.new_empty(B, H, tiles.total_blocks(T), width, width, dtype=x.product_dtype),
        x.q.new_empty(B, HQ, rows, width),
        x.q.new_empty(B, H, rows, width),
        torch.empty(B, HQ, chunks, CHUNK, CHUNK, **fp32),
    )
    _make_products(x, frames)
    q_start, k_end = (None, None) if ends is None else (ends.q_start, ends.k_end)
    sweep_kernel[(chunks * (x.group + 1), B * H)](
        **_chunk_arguments(x, frames),
        product_tiles=frames.product_tiles(),
        q_tiles=_chunk_tiles(x.q, width),
        k_tiles=_chunk_tiles(x.k, width),
        w_tiles=_chunk_tiles(x.w, width),
        q_levels_ptr=frames.q_levels,
        k_levels_ptr=frames.k_levels,
        local_ptr=frames.local,
        start_ptr=x.document_start,
        end_ptr=x.document_end,
        q_start_ptr=q_start,
        k_end_ptr=k_end,
        **strides(("s", q_start), ("e", k_end)),
        num_levels=tiles.num_levels(T),
        total_rows=rows,
        **x.widths,
        HAS_DOC=x.document_start is not None,
        GROUP=x.group,
        num_warps=4,
        maxnreg=config.registers(x.q.dtype, config.SWEEP_REGISTERS),
    )
    if ends is not None:
        ends.product.copy_(frames.products[:, :, -2, :D, :D])
    return frames


def _make_products(x: Inputs, frames: Frames) -> None:
    """Factors and products of the chunks, and products of the levels above."""
    B, T, H, _ = x.k.shape
    width, levels = x.width, tiles.product_levels(T, x.piece)
    chunk_kernel[(frames.inverse.shape[2], B * H)](
        **_chunk_arguments(x, frames),
        w_ptr=x.w,
        **strides(("w", x.w)),
        product_ptr=frames.products,
        num_blocks=tiles.level_blocks(T, 0, x.piece) if levels else 0,
        total_blocks=tiles.total_blocks(T),
        **x.widths,
        SOLVE=config.SOLVE,
        COLS=min(width, 64),
        num_warps=4,
        maxnreg=config.registers(x.q.dtype, config.CHUNK_REGISTERS),
    )
    child = base = 0
    for level in levels:
        count = tiles.level_blocks(T, level, x.piece)
        side, warps = config.product_tiles(width, count * B * H)
        if level > 0:
            tree_kernel[(count, B * H, (width // side) ** 2)](
                product_ptr=frames.products,
                start_ptr=x.document_start,
                T=T,
                H=H,
                level=level,
                child_base=child,
                parent_base=base,
                total_blocks=tiles.total_blocks(T),
                BLOCK_D=width,
                CHUNK=CHUNK,
                TILE=side,
                HAS_DOC=x.document_start is not None,
                PIECE=x.piece,
                PRECISION=x.precision,
                num_warps=warps,
            )
        if x.piece and level < levels[-1] and count < tiles.stored_blocks(T, level):
            # the last block has no sibling
            frames.products[:, :, base + count] = torch.eye(width, device=x.q.device)
        child, base = base, base + tiles.stored_blocks(T, level)


def _moved_arguments(x: Inputs, frames: Frames, grads: FrameGradients) -> dict[str, Any]:
    """What P moved at every level, and the gradients of what came out."""
    T = x.q.shape[1]
    return {
        "q_levels_ptr": frames.q_levels,
        "k_levels_ptr": frames.k_levels,
        "dq_moved_ptr": grads.q_moved,
        "dk_moved_ptr": grads.k_moved,
        "start_ptr": x.document_start,
        "end_ptr": x.document_end,
        "total_rows": tiles.total_rows(T),
        "moved_rows": tiles.moved_rows(T, x.piece),
        "GROUP": x.group,
        "HAS_DOC": x.document_start is not None,
        "PIECE": x.piece,
    }


def _products_backward(
    x: Inputs, frames: Frames, grads: FrameGradients, d_product: Tensor | None
) -> tuple[Tensor, Tensor, int]:
    """Gradients [B * H, count, BLOCK_D, BLOCK_D] of the products of level 1 in fp32, the largest
    entry of each in parts of 64 x 64, and their count; level by level from the top, where that of a
    piece comes in.
    """
    B, T, H, D = x.k.shape
    width, levels = x.width, tiles.moving_levels(T, x.piece)
    row_base = tiles.moved_rows(T, x.piece)
    block_base = sum(tiles.stored_blocks(T, level) for level in levels)
    tokens = max(CHUNK, config.PRODUCT_ROWS // x.group)
    moved = _moved_arguments(x, frames, grads)
    parts = (width // 64) ** 2
    gradient = size = frames.inverse  # of the level above; none at the top
    count = 0
    if d_product is not None:
        gradient, count = frames.inverse.new_zeros(B, H, width, width), 1
        gradient[..., :D, :D] = d_product
        size = gradient.abs().amax((2, 3)).clamp(min=1e-30).repeat_interleave(parts)
    for level in reversed(levels[1:]):
        parent, parent_size, parents = gradient, size, count
        count = tiles.level_blocks(T, level, x.piece)
        block_base -= tiles.stored_blocks(T, level)
        row_base -= tiles.level_rows(T, level)
        splits = tiles.cdiv(CHUNK << level, tokens)
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
            "maxnreg": config.registers(x.q.dtype, config.TREE_REGISTERS),
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
        tree_backward_kernel[(count, B * H, (width // side) ** 2)](
            **{**shared, "TILE": side, "num_warps": warps},
            product_ptr=frames.products,
            partial_ptr=partial,
            parent_ptr=parent,
            parent_size_ptr=parent_size,
            gradient_ptr=gradient,
            size_ptr=size,
            block_base=block_base,
            num_parents=parents,
            total_blocks=tiles.total_blocks(T),
            PARTIAL=splits > 1,
        )
    return gradient, size, count


def frames_backward(
    x: Inputs,
    frames: Frames,
    grads: FrameGradients,
    dq: Tensor,
    dk: Tensor,
    dw: Tensor | None,
    d_beta: Tensor | None,
    d_product: Tensor | None,
) -> None:
    """From the gradients of frames, and of the product of a piece, to those of q, k, w, beta. dq
    and dk come as those of q_start and k_end.
    """
    x = x.without_documents() if x.piece else x
    B, T, H, _ = x.k.shape
    chunks = frames.inverse.shape[2]
    dx = frames.inverse
    has_product = len(tiles.product_levels(T, x.piece)) > 0
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
            total_blocks=tiles.total_blocks(T),
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
        d_local_ptr=grads.local,
        dx_ptr=dx,
        d_low_ptr=frames.local,
        neg_a_ptr=torch.empty_like(grads.local) if x.group > 1 else grads.local,
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
