"""A sequence in segments, in plain torch: what context parallelism is built from.

Attention inside each segment (`segment_*`), and for each pair of segments dense attention, without
a causal mask, of queries and keys that meet in one frame (`cross_segment_*`):

    H_{j+1} ... H_i = (H_{j+1} ... end of j's segment) (segments between) (start of i's ... H_i)
    logit_ij        = scale * k_end_j^T (products of the segments between) q_start_i + gates

path_backend/arguments.py says what each function takes and returns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from path_backend.arguments import CrossSegment, Gradients, Inputs, SegmentEnds, SegmentForward
from path_backend.eager import softmax
from path_backend.eager.attention import (
    Slice,
    fold,
    slice_backward,
    slice_forward,
    slices,
    unfold,
    unfold_each,
)
from path_backend.eager.carry import carry


@torch.no_grad()
def segment_ends(inputs: Inputs) -> SegmentEnds:
    """Returns the ends of a segment, without its attention."""
    q, k, _, w, *_ = inputs
    if w is None:
        return SegmentEnds(q, k, None)
    moved = []
    alone = inputs._replace(v=k[..., :0], log_gate=None, document_start=None)
    for part in slices(alone, 1.0):
        _, _, q_start, k_end, product = part.start()
        for level in carry(q_start, k_end, product, part.chunk, to_ends=True):
            product = level.product
        moved.append((q_start, k_end, product))
    return _join(inputs, moved)


@torch.no_grad()
def segment_forward(inputs: Inputs, scale: float) -> SegmentForward:
    """Returns attention inside a segment, and its ends."""
    B, T = inputs.q.shape[:2]
    attention, moved = [], []
    for part in slices(inputs, scale):
        out, lse, q_start, k_end, product = slice_forward(part, to_ends=True)
        attention.append((out[:, :T], lse[:, :T]))
        moved.append((q_start, k_end, product))
    out, lse = (torch.cat(x) for x in zip(*attention, strict=True))
    ends = SegmentEnds(inputs.q, inputs.k, None) if inputs.w is None else _join(inputs, moved)
    return SegmentForward(unfold(out, B), unfold(lse, B).mT.contiguous(), ends)


@torch.no_grad()
def segment_backward(
    d_out: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, scale: float, d_ends: SegmentEnds
) -> Gradients:
    """Returns gradients of the floating inputs in compute precision (None for None)."""
    B, T, H = inputs.k.shape[:3]
    d_out, out, lse, dq_start = (fold(x, H) for x in (d_out, out, lse.mT, d_ends.q_start))
    dk_end = fold(d_ends.k_end, H).squeeze(2)
    results = []
    for part in slices(inputs, scale):
        arriving = (
            part.take(dq_start).clone(),
            part.take(dk_end).clone(),
            None if d_ends.product is None else _part_of_product(part, d_ends.product),
        )
        grads = slice_backward(part, part.gradient(d_out, out, lse), arriving)
        results.append([None if g is None else g[:, :T] for g in grads])
    return unfold_each(results, B)


def _join(inputs: Inputs, moved: list) -> SegmentEnds:
    """Returns ends of all heads from (q_start [Z, T, R, D], k_end [Z, T, D], product) of slices."""
    B, T = inputs.q.shape[:2]
    q_start, k_end, product = (torch.cat(x) for x in zip(*moved, strict=True))
    return SegmentEnds(
        unfold(q_start[:, :T], B).to(inputs.q.dtype),
        unfold(k_end[:, :T].unsqueeze(2), B).to(inputs.k.dtype),
        product.view(B, -1, *product.shape[2:]),
    )


def _part_of_product(part: Slice, x: Tensor) -> Tensor:
    """[B, H, D, D] -> [Z, 1, D, D]."""
    return x.flatten(0, 1)[part.heads].unsqueeze(1).to(part.q.dtype)


@torch.no_grad()
def cross_segment_forward(pair: CrossSegment, scale: float, out: Tensor, lse: Tensor) -> None:
    """Merges attention of a pair into out and lse, in place."""
    part = _HeadGroups(pair, scale, out.dtype)
    out, lse = part.rows(out), part.rows(lse.mT)
    for at in part.tiles():
        logits, row, row_lse = part.logits(at), out[:, :, at], lse[:, :, at]
        total = torch.logaddexp(row_lse, logits.logsumexp(-1))
        origin = total.masked_fill(total == float("-inf"), 0)
        p = logits.sub_(origin.unsqueeze(-1)).exp_().flatten(2, 3)
        row.mul_((row_lse - origin).exp_().unsqueeze(-1)).add_((p @ part.v).view(row.shape))
        row_lse.copy_(total)


@torch.no_grad()
def cross_segment_backward(
    d_out: Tensor, pair: CrossSegment, lse: Tensor, delta: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns gradients of q, k, v, gate_q, gate_k in compute precision (None without gates)."""
    part = _HeadGroups(pair, scale, lse.dtype)
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


class _HeadGroups:
    """Holds a pair by key/value head: queries [B, H, Tq, R, ...], keys [B, H, Tk, ...]."""

    def __init__(self, pair: CrossSegment, scale: float, dtype: torch.dtype):
        self.heads, self.scale, self.dtype = pair.k.shape[2], scale, dtype
        self.first_key = pair.first_key
        self.q = self.rows(pair.q)
        self.k, self.v = (x.transpose(1, 2).to(dtype) for x in (pair.k, pair.v))
        self.gate_q = None if pair.gate_q is None else self.rows(pair.gate_q.mT)
        self.gate_k = None if pair.gate_k is None else self.rows(pair.gate_k.mT)

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
