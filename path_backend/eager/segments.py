"""A sequence in blocks, in plain torch: what context parallelism is built from.

Attention inside each block (`block_*`), and for each pair of blocks dense attention, without a
causal mask, of queries and keys that meet in one frame (`rectangle_*`):

    H_{j+1} ... H_i = (H_{j+1} ... end of j's block) (blocks between) (start of i's block ... H_i)
    logit_ij        = scale * k_end_j^T (products of the blocks between) q_start_i + gates

B, T, HQ, H, D, DV as in path_attention; q, k, v, w of one dtype. Compute precision is fp32, fp64
for fp64 inputs. path_backend.kernels.backend has the same functions as kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from path_backend.eager import softmax
from path_backend.eager.attention import (
    Slice,
    fold,
    slice_backward,
    slice_forward,
    slices,
    sweep,
    unfold,
)


class Frames(NamedTuple):
    """Queries at the start of their block, keys at its end, and the block's product."""

    q_start: Tensor  # H_1 ... H_i q_i [B, T, HQ, D], q's dtype
    k_end: Tensor  # (H_{j+1} ... H_T)^T k_j [B, T, H, D], k's dtype
    product: Tensor | None  # H_1 ... H_T [B, H, D, D], compute precision; None without reflections


class Block(NamedTuple):
    """Attention inside a block, and the Frames for what lies outside."""

    out: Tensor  # [B, T, HQ, DV], compute precision
    lse: Tensor  # natural log-sum-exp [B, HQ, T], compute precision
    q_start: Tensor
    k_end: Tensor
    product: Tensor | None


@torch.no_grad()
def block_frames(q: Tensor, k: Tensor, w: Tensor | None, beta: Tensor | None) -> Frames:
    """The last three results of block_forward, without its attention."""
    if w is None:
        return Frames(q, k, None)
    moved = []
    for part in slices(q, k, k[..., :0], w, beta, None, None, 1.0):
        _, _, q_start, k_end, product = part.start()
        for level in sweep(q_start, k_end, product, part.chunk, whole=True):
            product = level.product
        moved.append((q_start, k_end, product))
    return _join(q, k, moved)


@torch.no_grad()
def block_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_gate: Tensor | None,
    document_start: Tensor | None,
    scale: float,
) -> Block:
    """Arguments as path_attention, of one block; document_start counts from its first token."""
    B, T = q.shape[:2]
    attention, moved = [], []
    for part in slices(q, k, v, w, beta, log_gate, document_start, scale):
        out, lse, q_start, k_end, product = slice_forward(part, whole=True)
        attention.append((out[:, :T], lse[:, :T]))
        moved.append((q_start, k_end, product))
    out, lse = (torch.cat(x) for x in zip(*attention, strict=True))
    frames = Frames(q, k, None) if w is None else _join(q, k, moved)
    return Block(unfold(out, B), unfold(lse, B).mT.contiguous(), *frames)


@torch.no_grad()
def block_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_gate: Tensor | None,
    document_start: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    dq_start: Tensor,
    dk_end: Tensor,
    d_product: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, w, beta, log_gate in compute precision (None for None).

    out, lse: over the keys of all blocks. dq_start, dk_end, d_product: gradients of the Frames.
    The result has those and the pairs inside the block; a gate's pairs outside are not in it.
    """
    B, T, H = k.shape[:3]
    d_out, out, lse, dq_start = (fold(x, H) for x in (d_out, out, lse.mT, dq_start))
    dk_end = fold(dk_end, H).squeeze(2)
    results = []
    for part in slices(q, k, v, w, beta, log_gate, document_start, scale):
        arriving = (
            part.take(dq_start).clone(),
            part.take(dk_end).clone(),
            None if d_product is None else _part_of_product(part, d_product),
        )
        grads = slice_backward(part, part.gradient(d_out, out, lse), arriving)
        results.append([None if g is None else g[:, :T] for g in grads])
    return tuple(
        None if x[0] is None else unfold(torch.cat(x), B) for x in zip(*results, strict=True)
    )


def _join(q: Tensor, k: Tensor, moved: list) -> Frames:
    """Frames of all heads from (q_start [Z, T, R, D], k_end [Z, T, D], product) of each slice."""
    B, T = q.shape[:2]
    q_start, k_end, product = (torch.cat(x) for x in zip(*moved, strict=True))
    return Frames(
        unfold(q_start[:, :T], B).to(q.dtype),
        unfold(k_end[:, :T].unsqueeze(2), B).to(k.dtype),
        product.view(B, -1, *product.shape[2:]),
    )


def _part_of_product(part: Slice, x: Tensor) -> Tensor:
    """[B, H, D, D] -> [Z, 1, D, D]."""
    return x.flatten(0, 1)[part.heads].unsqueeze(1).to(part.q.dtype)


@torch.no_grad()
def rectangle_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_q: Tensor | None,
    gate_k: Tensor | None,
    first_key: Tensor | None,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Merges dense attention of q on k, v into out and lse, in place.

        logit_ij = scale * q_i . k_j + gate_q_i + gate_k_j

    Args:
        q: [B, Tq, HQ, D]. k: [B, Tk, H, D]. v: [B, Tk, H, DV].
        gate_q, gate_k: [B, HQ, Tq] and [B, HQ, Tk] in natural-log units, compute precision; both
            or neither.
        first_key: int32 [B, Tq]: keys j < first_key[b, i] are masked. It may exceed Tk.
        out, lse: [B, Tq, HQ, DV] and [B, HQ, Tq], compute precision: what the rows saw so far,
            zero and -inf if nothing.
    """
    part = _Rectangle(q, k, v, gate_q, gate_k, first_key, scale, out.dtype)
    out, lse = part.rows(out), part.rows(lse.mT)
    for at in part.tiles():
        logits, row, row_lse = part.logits(at), out[:, :, at], lse[:, :, at]
        total = torch.logaddexp(row_lse, logits.logsumexp(-1))
        origin = total.masked_fill(total == float("-inf"), 0)
        p = logits.sub_(origin.unsqueeze(-1)).exp_().flatten(2, 3)
        row.mul_((row_lse - origin).exp_().unsqueeze(-1)).add_((p @ part.v).view(row.shape))
        row_lse.copy_(total)


@torch.no_grad()
def rectangle_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_q: Tensor | None,
    gate_k: Tensor | None,
    first_key: Tensor | None,
    lse: Tensor,
    delta: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, gate_q, gate_k in compute precision (None without gates).

    d_out: [B, Tq, HQ, DV]. lse, delta: [B, HQ, Tq], over the keys of all blocks;
    delta = rowsum(d_out * out). Others as rectangle_forward.
    """
    part = _Rectangle(q, k, v, gate_q, gate_k, first_key, scale, lse.dtype)
    d_out, lse, delta = part.rows(d_out), part.rows(lse.mT), part.rows(delta.mT)
    dq = torch.zeros_like(part.q, dtype=lse.dtype)
    dk, dv = torch.zeros_like(part.k), torch.zeros_like(part.v)
    d_gate_q = None if part.gate_q is None else torch.zeros_like(part.gate_q)
    d_gate_k = None if part.gate_k is None else torch.zeros_like(part.gate_k)
    for at in part.tiles():
        rows = d_out[:, :, at].to(lse.dtype).flatten(2, 3)
        p = part.logits(at).sub_(lse[:, :, at].unsqueeze(-1)).exp_()
        dv += p.flatten(2, 3).mT @ rows
        ds = (rows @ part.v.mT).view(p.shape)
        ds = ds.sub_(delta[:, :, at].unsqueeze(-1)).mul_(p)
        if d_gate_q is not None and d_gate_k is not None:
            d_gate_q[:, :, at] = ds.sum(-1)
            d_gate_k += ds.sum(2).mT
        ds = ds.flatten(2, 3)
        dq[:, :, at] = (ds @ part.k * scale).view(dq[:, :, at].shape)
        dk.add_(ds.mT @ part.scaled(at))
    return (
        part.unfold(dq),
        dk.transpose(1, 2).contiguous(),
        dv.transpose(1, 2).contiguous(),
        None if d_gate_q is None else part.unfold(d_gate_q).mT.contiguous(),
        None if d_gate_k is None else part.unfold(d_gate_k).mT.contiguous(),
    )


class _Rectangle:
    """A rectangle's operands by head group: queries [B, H, Tq, R, ...], keys [B, H, Tk, ...]."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate_q: Tensor | None,
        gate_k: Tensor | None,
        first_key: Tensor | None,
        scale: float,
        dtype: torch.dtype,
    ):
        self.heads, self.scale, self.first_key, self.dtype = k.shape[2], scale, first_key, dtype
        self.q = self.rows(q)
        self.k, self.v = (x.transpose(1, 2).to(dtype) for x in (k, v))
        self.gate_q = None if gate_q is None else self.rows(gate_q.mT)
        self.gate_k = None if gate_k is None else self.rows(gate_k.mT)

    def rows(self, x: Tensor) -> Tensor:
        """[B, T, HQ, ...] -> view [B, H, T, R, ...]."""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def unfold(self, x: Tensor) -> Tensor:
        """The inverse of rows, contiguous."""
        return x.transpose(1, 2).flatten(2, 3).contiguous()

    def tiles(self) -> Iterator[slice]:
        """Rows of at most TILE_ELEMENTS logits, less those that documents hide (seen on CPU)."""
        B, H, n_rows, R, _ = self.q.shape
        keys = self.k.shape[2]
        step = max(1, softmax.TILE_ELEMENTS // (B * H * R * keys))
        for start in range(0, n_rows, step):
            at = slice(start, min(start + step, n_rows))
            if not self._hidden(at, keys):
                yield at

    def _hidden(self, at: slice, keys: int) -> bool:
        first = self.first_key
        if first is None or first.device.type != "cpu":
            return False
        return bool((first[:, at] >= keys).all())

    def scaled(self, at: slice) -> Tensor:
        """Packed rows scale * q [B, H, rows * R, D]."""
        return (self.q[:, :, at].to(self.dtype) * self.scale).flatten(2, 3)

    def logits(self, at: slice) -> Tensor:
        """[B, H, rows, R, Tk], gates added, masked."""
        B, H, rows, R, _ = self.q[:, :, at].shape
        logits = (self.scaled(at) @ self.k.mT).view(B, H, rows, R, -1)
        if self.gate_q is not None and self.gate_k is not None:
            logits += self.gate_q[:, :, at].unsqueeze(-1)
            logits += self.gate_k.mT.unsqueeze(2)
        if self.first_key is not None:
            key = torch.arange(logits.shape[-1], device=logits.device)
            hidden = key < self.first_key[:, at].unsqueeze(-1)
            logits.masked_fill_(hidden[:, None, :, None], float("-inf"))
        return logits
