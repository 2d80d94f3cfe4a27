"""Launchers of the transform: factors, products and levels of a group of heads, and their
gradients.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from . import config, tiles
from .chunk import chunk_kernel
from .chunk_backward import chunk_backward_kernel, chunk_product_backward_kernel
from .inputs import Inputs, strides
from .sweep import key_sweep_kernel, query_sweep_kernel, tree_kernel
from .tiles import CHUNK
from .tree_backward import product_gradient_kernel, tree_backward_kernel


@dataclass
class Frames:
    """The transformed inputs of one group of heads: factors, products, and q, k of every level."""

    inverse: Tensor  # [B, H, N, C, C] fp32, M^-1 of each chunk
    products: Tensor  # [B, H, blocks, BLOCK_D, BLOCK_D], levels 0 ... num_levels - 2
    q_levels: Tensor  # [B, HQ, rows, BLOCK_D]
    k_levels: Tensor  # [B, H, rows, BLOCK_D]
    local: Tensor  # [B, HQ, N, C, C] fp32


@dataclass
class FrameGradients:
    """What the attention's backward leaves for the transform's."""

    q_start: Tensor  # [B, HQ, N, C, BLOCK_D]
    k_end: Tensor  # [B, H, N, C, BLOCK_D]
    q_moved: Tensor  # [B, HQ, moved rows, BLOCK_D], of the levels' queries as moved by P
    k_moved: Tensor  # [B, H, moved rows, BLOCK_D]
    local: Tensor  # [B, HQ, N, C, C]

    @staticmethod
    def empty(x: Inputs) -> "FrameGradients":
        B, T, HQ, _ = x.q.shape
        H, chunks = x.k.shape[2], triton.cdiv(T, CHUNK)
        return FrameGradients(
            x.q.new_empty(B, HQ, chunks, CHUNK, x.width),
            x.q.new_empty(B, H, chunks, CHUNK, x.width),
            x.q.new_empty(B, HQ, tiles.moved_rows(T), x.width),
            x.q.new_empty(B, H, tiles.moved_rows(T), x.width),
            x.q.new_empty(B, HQ, chunks, CHUNK, CHUNK),
        )


def _chunk_arguments(x: Inputs, frames: Frames) -> dict[str, Any]:
    """What every kernel shares that reads the chunks' factors W, X."""
    T, H = x.k.shape[1:3]
    return {
        "w_ptr": x.w,
        "beta_ptr": x.beta,
        "inverse_ptr": frames.inverse,
        **strides(("w", x.w), ("b", x.beta)),
        "T": T,
        "H": H,
        "num_chunks": frames.inverse.shape[2],
        "CHUNK": CHUNK,
        "PRECISION": x.precision,
        **x.widths,
    }


def make_frames(x: Inputs) -> Frames:
    """Chunk transform, tree of products, sweep of queries and keys."""
    B, T, HQ, D = x.q.shape
    H, width = x.k.shape[2], x.width
    chunks, levels = triton.cdiv(T, CHUNK), tiles.num_levels(T)
    rows, blocks = tiles.total_rows(T), tiles.total_blocks(T)
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": x.q.device}
    frames = Frames(
        torch.empty(B, H, chunks, CHUNK, CHUNK, **fp32),
        torch.empty(B, H, blocks, width, width, dtype=x.product_dtype, device=x.q.device),
        x.q.new_empty(B, HQ, rows, width),
        x.q.new_empty(B, H, rows, width),
        torch.empty(B, HQ, chunks, CHUNK, CHUNK, **fp32),
    )
    factors = _chunk_arguments(x, frames)
    chunk_kernel[(chunks, B * H)](
        **factors,
        product_ptr=frames.products,
        num_blocks=tiles.level_blocks(T, 0) if levels > 1 else 0,
        total_blocks=blocks,
        SOLVE=config.SOLVE,
        COLS=min(width, 64),
        **config.chain_options(x.q.dtype),
    )
    base = 0
    for level in range(1, levels - 1):
        child, base = base, base + tiles.level_blocks(T, level - 1)
        count = tiles.level_blocks(T, level)
        side, warps = config.product_tiles(width, count * B * H)
        tree_kernel[(count, B * H, (width // side) ** 2)](
            product_ptr=frames.products,
            child_base=child,
            parent_base=base,
            total_blocks=blocks,
            BLOCK_D=width,
            TILE=side,
            PRECISION=x.precision,
            num_warps=warps,
        )
    sweep = {
        **factors,
        "product_ptr": frames.products,
        "num_levels": levels,
        "total_rows": rows,
        "total_blocks": blocks,
        "HAS_DOC": x.document_start is not None,
        **config.chain_options(x.q.dtype),
    }
    query_sweep_kernel[(chunks, B * HQ)](
        **sweep,
        q_ptr=x.q,
        k_ptr=x.k,
        levels_ptr=frames.q_levels,
        local_ptr=frames.local,
        start_ptr=x.document_start,
        **strides(("q", x.q), ("k", x.k)),
        GROUP=x.group,
    )
    if levels > 0:
        key_sweep_kernel[(chunks - 1, B * H)](
            **sweep,
            k_ptr=x.k,
            levels_ptr=frames.k_levels,
            end_ptr=x.document_end,
            **strides(("k", x.k)),
        )
    return frames


def _products_backward(x: Inputs, frames: Frames, grads: FrameGradients) -> tuple[Tensor, int]:
    """Gradients [B * H, count, BLOCK_D, BLOCK_D] of the chunks' products in fp32, and their count;
    level by level from the top.
    """
    B, T, HQ, D = x.q.shape
    H, width = x.k.shape[2], x.width
    block_base, row_base = tiles.total_blocks(T), tiles.moved_rows(T)
    tokens = max(CHUNK, config.PRODUCT_ROWS // x.group)
    gradient, count = frames.inverse, 0  # of the level above; none at the top
    for level in range(tiles.num_levels(T) - 2, -1, -1):
        parent, parents = gradient, count
        count = tiles.level_blocks(T, level)
        block_base -= count
        row_base -= tiles.level_rows(T, level)
        splits = triton.cdiv(CHUNK << level, tokens)
        side, warps = config.product_tiles(width, count * splits * B * H)
        shared = {
            "q_levels_ptr": frames.q_levels,
            "k_levels_ptr": frames.k_levels,
            "dq_moved_ptr": grads.q_moved,
            "dk_moved_ptr": grads.k_moved,
            "start_ptr": x.document_start,
            "end_ptr": x.document_end,
            "T": T,
            "H": H,
            "level": level,
            "row_base": row_base,
            "num_blocks": count,
            "num_splits": splits,
            "total_rows": tiles.total_rows(T),
            "moved_rows": tiles.moved_rows(T),
            "GROUP": x.group,
            "BLOCK_D": width,
            "CHUNK": CHUNK,
            "TILE": side,
            "HAS_DOC": x.document_start is not None,
            "PRECISION": x.precision,
            "num_warps": warps,
            "num_stages": 2,
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
        tree_backward_kernel[(count, B * H, (width // side) ** 2)](
            **{**shared, "TILE": side, "num_warps": warps},
            product_ptr=frames.products,
            partial_ptr=partial,
            parent_ptr=parent,
            gradient_ptr=gradient,
            block_base=block_base,
            num_parents=parents,
            total_blocks=tiles.total_blocks(T),
            PARTIAL=splits > 1,
        )
    return gradient, count


def frames_backward(
    x: Inputs,
    frames: Frames,
    grads: FrameGradients,
    dq: Tensor,
    dk: Tensor,
    dw: Tensor,
    d_beta: Tensor,
) -> None:
    """From the gradients of frames to those of q, k, w, beta."""
    B, T, HQ, D = x.q.shape
    H, width, levels = x.k.shape[2], x.width, tiles.num_levels(T)
    chunks = frames.inverse.shape[2]
    factors = _chunk_arguments(x, frames)
    dx, scratch = frames.inverse, grads.local
    if levels > 1:
        dx = torch.empty_like(frames.inverse)
        d_product, count = _products_backward(x, frames, grads)
        chunk_product_backward_kernel[(chunks, B * H)](
            **factors,
            d_product_ptr=d_product,
            dx_ptr=dx,
            dw_ptr=dw,
            **strides(("dw", dw)),
            num_blocks=count,
            num_warps=4,
        )
    if x.group > 1:
        scratch = torch.empty(
            B, HQ, chunks, 2, CHUNK, CHUNK, dtype=torch.float32, device=x.q.device
        )
    chunk_backward_kernel[(chunks, B * H)](
        **factors,
        q_ptr=x.q,
        k_ptr=x.k,
        dq_start_ptr=grads.q_start,
        dk_end_ptr=grads.k_end,
        d_local_ptr=grads.local,
        dx_ptr=dx,
        scratch_ptr=scratch,
        dq_ptr=dq,
        dk_ptr=dk,
        dw_ptr=dw,
        d_beta_ptr=d_beta,
        **strides(("q", x.q), ("k", x.k), ("dq", dq), ("dk", dk), ("dw", dw), ("db", d_beta)),
        GROUP=x.group,
        HAS_PRODUCT=levels > 1,
        WIDE=config.contract_columns(x.q.dtype, width),
        num_warps=4,
    )
