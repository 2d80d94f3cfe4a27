"""Launchers of the transform: factors, products and levels of a group of heads, and their
gradients.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from . import config, tiles
from .chunk import chunk_inverse_kernel
from .chunk_backward import chunk_backward_kernel, chunk_product_backward_kernel
from .inputs import Inputs, strides
from .sweep import block_product_kernel, key_sweep_kernel, query_sweep_kernel, tree_kernel
from .sweep_backward import (
    key_sweep_backward_kernel,
    product_gradient_kernel,
    query_sweep_backward_kernel,
    tree_backward_kernel,
)
from .tiles import CHUNK


@dataclass
class Frames:
    """The transformed inputs of one group of heads: factors, products, and q, k of every level."""

    inverse: Tensor  # [B, H, N, C, C] fp32, M^-1 of each chunk
    products: Tensor  # [B, H, blocks, BLOCK_D, BLOCK_D] fp32, of tiles.product_levels
    q_levels: Tensor  # [B, HQ, rows, BLOCK_D]
    k_levels: Tensor  # [B, H, rows, BLOCK_D]
    local: Tensor  # [B, HQ, N, C, C] fp32


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


def _factor_arguments(x: Inputs, frames: Frames) -> dict[str, Any]:
    """What every kernel shares that reads the chunks' factors W, X."""
    return {
        "w_ptr": x.w,
        "beta_ptr": x.beta,
        "inverse_ptr": frames.inverse,
        **strides(("w", x.w), ("b", x.beta)),
        "T": x.q.shape[1],
        "num_chunks": frames.inverse.shape[2],
        "CHUNK": CHUNK,
        "PRECISION": x.precision,
        **x.widths,
    }


def _sweep_arguments(x: Inputs, frames: Frames) -> dict[str, Any]:
    """What the four sweeps share."""
    T = x.q.shape[1]
    return {
        **_factor_arguments(x, frames),
        "product_ptr": frames.products,
        "num_levels": tiles.num_levels(T),
        "total_rows": tiles.total_rows(T),
        "total_blocks": tiles.total_blocks(T, x.whole),
        "WHOLE": x.whole,
        "HAS_DOC": x.document_start is not None,
        **config.SWEEP_OPTIONS,
    }


def make_frames(x: Inputs, ends: Ends | None = None) -> Frames:
    """Chunk transform, tree of products, sweep of queries and keys; those of a piece into `ends`.

    A piece moves all of its tokens to its ends, so that documents skip nothing here.
    """
    x = x.without_documents() if x.whole else x
    B, T, HQ, D = x.q.shape
    H, width = x.k.shape[2], x.width
    chunks = triton.cdiv(T, CHUNK)
    rows, blocks = tiles.total_rows(T), tiles.total_blocks(T, x.whole)
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": x.q.device}
    frames = Frames(
        torch.empty(B, H, chunks, CHUNK, CHUNK, **fp32),
        torch.empty(B, H, blocks, width, width, **fp32),
        x.q.new_empty(B, HQ, rows, width),
        x.q.new_empty(B, H, rows, width),
        torch.empty(B, HQ, chunks, CHUNK, CHUNK, **fp32),
    )
    factors = _factor_arguments(x, frames)
    side = min(width, config.PRODUCT_TILE)
    chunk_inverse_kernel[(chunks, B * H)](**factors, H=H, SOLVE=config.SOLVE, num_warps=4)
    base = child = 0
    for level in tiles.product_levels(T, x.whole):
        count = tiles.level_blocks(T, level, x.whole)
        stored = tiles.stored_blocks(T, level, x.whole)
        if level == 1:
            block_product_kernel[(count, B * H, width // side)](
                **factors,
                product_ptr=frames.products,
                H=H,
                total_blocks=blocks,
                COLS=side,
                WHOLE=x.whole,
            )
        else:
            tree_kernel[(count, B * H, (width // side) ** 2)](
                product_ptr=frames.products,
                child_base=child,
                parent_base=base,
                total_blocks=blocks,
                BLOCK_D=width,
                TILE=side,
                PRECISION=x.precision,
            )
        if stored > count:
            frames.products[:, :, base + count] = torch.eye(width, device=x.q.device)
        child, base = base, base + stored
    q_start, k_end = (None, None) if ends is None else (ends.q_start, ends.k_end)
    sweep = _sweep_arguments(x, frames)
    query_sweep_kernel[(triton.cdiv(T, sweep["ROWS"]), B * HQ)](
        **sweep,
        q_ptr=x.q,
        k_ptr=x.k,
        levels_ptr=frames.q_levels,
        local_ptr=frames.local,
        start_ptr=x.document_start,
        q_start_ptr=q_start,
        **strides(("q", x.q), ("k", x.k), ("e", q_start)),
        HQ=HQ,
        GROUP=x.group,
    )
    key_sweep_kernel[(triton.cdiv(T, sweep["ROWS"]), B * H)](
        **sweep,
        k_ptr=x.k,
        levels_ptr=frames.k_levels,
        end_ptr=x.document_end,
        k_end_ptr=k_end,
        **strides(("k", x.k), ("e", k_end)),
        H=H,
    )
    if ends is not None:
        ends.product.copy_(frames.products[:, :, -1, :D, :D])
    return frames


def frames_backward(
    x: Inputs,
    frames: Frames,
    dq_levels: Tensor,
    dk_levels: Tensor,
    d_local: Tensor,
    dq: Tensor,
    dk: Tensor,
    dw: Tensor | None,
    d_beta: Tensor | None,
    d_ends: Ends | None = None,
) -> None:
    """From the gradients of every level, and of the ends of a piece, to those of q, k, w, beta."""
    x = x.without_documents() if x.whole else x
    B, T, HQ, D = x.q.shape
    H, width = x.k.shape[2], x.width
    chunks, levels = triton.cdiv(T, CHUNK), tiles.num_levels(T)
    rows, blocks = tiles.total_rows(T), tiles.total_blocks(T, x.whole)
    side = min(width, config.PRODUCT_TILE)
    dq_start = dq_levels.new_empty(B, HQ, chunks, CHUNK, width)
    dk_end = dk_levels.new_empty(B, H, chunks, CHUNK, width)
    from_start, from_end = (None, None) if d_ends is None else (d_ends.q_start, d_ends.k_end)
    sweep = _sweep_arguments(x, frames)
    query_sweep_backward_kernel[(triton.cdiv(T, sweep["ROWS"]), B * HQ)](
        **sweep,
        levels_ptr=dq_levels,
        dq_start_ptr=dq_start,
        start_ptr=x.document_start,
        incoming_ptr=from_start,
        **strides(("e", from_start)),
        HQ=HQ,
        GROUP=x.group,
    )
    key_sweep_backward_kernel[(triton.cdiv(T, sweep["ROWS"]), B * H)](
        **sweep,
        levels_ptr=dk_levels,
        dk_end_ptr=dk_end,
        end_ptr=x.document_end,
        incoming_ptr=from_end,
        **strides(("e", from_end)),
        H=H,
    )
    # of the level above: none at the top (and never read), or that of the piece
    gradient, stored, top = dq_levels, 0, levels - 1
    if d_ends is not None:
        gradient = dq_levels.new_zeros(B, H, width, width)
        gradient[..., :D, :D] = d_ends.product
        stored, top = 1, levels
    block_base = blocks - stored
    row_base = sum(tiles.level_rows(T, level) for level in range(top))
    for level in range(top - 1, 0, -1):
        parent, parents = gradient, stored
        count = tiles.level_blocks(T, level, x.whole)
        stored = tiles.stored_blocks(T, level, x.whole)
        block_base -= stored
        row_base -= tiles.level_rows(T, level)
        shared = {
            "q_levels_ptr": frames.q_levels,
            "k_levels_ptr": frames.k_levels,
            "dq_levels_ptr": dq_levels,
            "dk_levels_ptr": dk_levels,
            "start_ptr": x.document_start,
            "end_ptr": x.document_end,
            "T": T,
            "H": H,
            "level": level,
            "row_base": row_base,
            "num_blocks": stored,
            "total_rows": rows,
            "GROUP": x.group,
            "BLOCK_D": width,
            "CHUNK": CHUNK,
            "TILE": side,
            "HAS_DOC": x.document_start is not None,
            "PRECISION": x.precision,
        }
        tokens = max(CHUNK, config.PRODUCT_ROWS // x.group)
        splits = triton.cdiv(CHUNK << level, tokens)
        partial = frames.products
        if splits > 1:
            partial = torch.empty(
                B * H, stored, splits, width, width, dtype=torch.float32, device=x.q.device
            )
            product_gradient_kernel[(count * splits, B * H, (width // side) ** 2)](
                **shared, partial_ptr=partial, num_splits=splits, ROWS=tokens
            )
        gradient = dq_levels.new_empty(B * H, stored, width, width)
        tree_backward_kernel[(count, B * H, (width // side) ** 2)](
            **shared,
            product_ptr=frames.products,
            partial_ptr=partial,
            parent_ptr=parent,
            gradient_ptr=gradient,
            block_base=block_base,
            num_splits=splits,
            num_parents=parents,
            total_blocks=blocks,
            SPLIT=splits > 1,
        )
    factors = _factor_arguments(x, frames)
    dx, scratch = frames.inverse, d_local
    if x.group > 1:
        scratch = torch.empty(
            B, HQ, chunks, 2, CHUNK, CHUNK, dtype=torch.float32, device=x.q.device
        )
    has_product = x.whole or levels > 1
    if has_product:
        dx = torch.empty_like(frames.inverse)
        for right, here, moved, group in (
            (0, frames.q_levels, dq_levels, x.group),
            (1, frames.k_levels, dk_levels, 1),
        ):
            chunk_product_backward_kernel[((chunks + 1 - right) // 2, B * H)](
                **factors,
                here_ptr=here,
                moved_ptr=moved,
                d_product_ptr=gradient,
                dx_ptr=dx,
                dw_ptr=dw,
                scratch_ptr=scratch,
                **strides(("dw", dw)),
                H=H,
                total_rows=rows,
                num_blocks=stored,
                RIGHT=right,
                GROUP=group,
                num_warps=4,
            )
    chunk_backward_kernel[(chunks, B * H)](
        **factors,
        q_ptr=x.q,
        k_ptr=x.k,
        dq_start_ptr=dq_start,
        dk_end_ptr=dk_end,
        d_local_ptr=d_local,
        dx_ptr=dx,
        scratch_ptr=scratch,
        dq_ptr=dq,
        dk_ptr=dk,
        dw_ptr=dw,
        d_beta_ptr=d_beta,
        **strides(("q", x.q), ("k", x.k), ("dq", dq), ("dk", dk), ("dw", dw), ("db", d_beta)),
        H=H,
        GROUP=x.group,
        HAS_PRODUCT=has_product,
        num_warps=4,
    )
