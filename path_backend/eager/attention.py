"""PaTH attention in plain torch: the UT transform of chunks, then attention in dyadic frames.

Notation of one slice: Z key/value heads (batch folded in), R query heads on each, T tokens padded
to whole chunks of C; q [Z, T, R, D], k, w [Z, T, D], v [Z, T, DV], beta [Z, T]. chunk.py has the
transform of a chunk, carry.py what lies between chunks, softmax.py the attention itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from path_backend.arguments import Gradients, Inputs
from path_backend.eager.carry import Level, OffDiagonal, carry, carry_down
from path_backend.eager.chunk import Chunks, chunk_transform, chunk_transform_backward
from path_backend.eager.softmax import Bias, OnlineSoftmax, SoftmaxGradient, Tile, cumulative_gate
from path_backend.kernels.constants import CHUNK

# Queries of all heads in flight: above, the heads are worked through in slices.
SLICE_ELEMENTS = 2**20


class Slice(NamedTuple):
    """Some heads of a call, padded to whole chunks, in compute precision."""

    heads: slice  # of the B * H folded ones
    q: Tensor  # [Z, T, R, D]
    k: Tensor  # [Z, T, D]
    v: Tensor  # [Z, T, DV]
    reflections: tuple[Tensor, Tensor] | None  # w [Z, T, D] and beta [Z, T]
    bias: Bias
    chunk: int
    scale: float

    def take(self, x: Tensor, pad_value: float = 0.0) -> Tensor:
        """The slice's part of a folded tensor [B * H, T, ...], padded, in compute precision."""
        padding = self.q.shape[1] - x.shape[1]
        return _pad(x[self.heads].to(self.q.dtype), padding, pad_value)

    def gradient(self, d_out: Tensor, out: Tensor, lse: Tensor) -> SoftmaxGradient:
        """Returns the softmax gradient of folded tensors.

        exp(S - inf) = 0: padded rows take no part, whatever their logits.
        """
        lse = self.take(lse, float("inf"))
        return SoftmaxGradient(self.take(d_out), self.take(out), lse, self.v, self.bias)

    def intra_chunk_tile(self) -> Tile:
        """The triangles of all chunks."""
        C = self.chunk
        return Tile(0, self.q.shape[1] // C, C, (0, C), (0, C))

    def chunked(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, w, beta as chunk_transform takes them, in fp64.

        For nearly parallel w and beta near 2, X and its products are sums of up to 64 alternating
        terms: fp32 would lose six bits, and be 80 times less exact than reflections one by one.
        """
        assert self.reflections is not None
        inputs = (self.q, self.k, *self.reflections)
        q, k, w, beta = (x.double().unflatten(1, (-1, self.chunk)) for x in inputs)
        return q.flatten(2, 3), k, w, beta

    def start(self) -> tuple[Chunks | None, Tensor, Tensor, Tensor, Tensor | None]:
        """Chunks, intra-chunk logits, and the q, k, product that the carry starts from."""
        if self.reflections is None:
            q, k = (x.unflatten(1, (-1, self.chunk)) for x in (self.q, self.k))
            return None, q.flatten(2, 3) @ k.mT * self.scale, self.q, self.k, None
        chunks = chunk_transform(*self.chunked())
        rounded = (chunks.logits * self.scale, chunks.q_start, chunks.k_end, chunks.product)
        logits, q, k, product = (x.to(self.q.dtype) for x in rounded)
        return chunks, logits, q.view(self.q.shape), k.view(self.k.shape), product

    def tiles_of(self, level: Level) -> Iterator[tuple[Tile, OffDiagonal, slice, slice, Tensor]]:
        """The level's non-empty tiles with their logits, and where they lie in their block."""
        width = self.q.shape[0] * self.q.shape[2]
        for block in level.off_diagonals:
            for tile, pairs, rows in block.tile.split(width):
                if not self.bias.empties(tile):
                    q, k = block.q[:, pairs, rows], block.k[:, pairs]
                    logits = ((q * self.scale).flatten(2, 3) @ k.mT).view(*q.shape[:4], k.shape[2])
                    yield tile, block, pairs, rows, self.bias.add_(logits, tile)


@torch.no_grad()
def attention_forward(inputs: Inputs, scale: float) -> tuple[Tensor, Tensor]:
    """Returns out [B, T, HQ, DV] in q's dtype and lse [B, HQ, T] in compute precision."""
    B, T = inputs.k.shape[:2]
    results = []
    for part in slices(inputs, scale):
        out, lse, *_ = slice_forward(part)
        results.append((out[:, :T].to(inputs.q.dtype), lse[:, :T]))
    out, lse = (torch.cat(x) for x in zip(*results, strict=True))
    return unfold(out, B), unfold(lse, B).mT.contiguous()


def slice_forward(
    part: Slice, to_ends: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """out [Z, T, R, DV], lse [Z, T, R], and q, k and the last product where the carry left them."""
    own = part.intra_chunk_tile()
    softmax = OnlineSoftmax(part.q, part.v)
    _, logits, q, k, product = part.start()
    logits = logits.unflatten(2, (part.chunk, -1))
    softmax.add(part.bias.add_(logits, own), part.v, own)
    for level in carry(q, k, product, part.chunk, to_ends):
        product = level.product
        for tile, _, _, _, logits in part.tiles_of(level):
            softmax.add(logits, part.v, tile)
    return *softmax.finish(), q, k, product


@torch.no_grad()
def attention_backward(
    d_out: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, scale: float
) -> Gradients:
    """Returns gradients of the floating inputs, each in its input's dtype (None for None)."""
    B, T, H = inputs.k.shape[:3]
    d_out, out, lse = (fold(x, H) for x in (d_out, out, lse.mT))
    results = []
    for part in slices(inputs, scale):
        grads = slice_backward(part, part.gradient(d_out, out, lse))
        pairs = zip(grads, inputs.floating, strict=True)
        results.append([None if g is None or x is None else g[:, :T].to(x.dtype) for g, x in pairs])
    return unfold_each(results, B)


def unfold_each(results: list[list[Tensor | None]], batch: int) -> Gradients:
    """Returns gradients of all heads from those of each slice."""
    return tuple(
        None if x[0] is None else unfold(torch.cat(x), batch) for x in zip(*results, strict=True)
    )


def slice_backward(
    part: Slice,
    softmax: SoftmaxGradient,
    arriving: tuple[Tensor, Tensor, Tensor | None] | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of one slice: dq [Z, T, R, D]; dk, dw [Z, T, 1, D]; dbeta [Z, T, 1]; ...

    arriving: gradients of q [Z, T, R, D], k [Z, T, D] and product [Z, 1, D, D] in the frame of the
    whole block. The first two are overwritten.
    """
    C, own = part.chunk, part.intra_chunk_tile()
    chunks, intra_logits, q_start, k_end, product = part.start()
    levels = list(carry(q_start, k_end, product, C, arriving is not None))
    if arriving is None:
        dq, dk, d_product = torch.zeros_like(part.q), torch.zeros_like(part.k), None
    else:
        dq, dk, d_product = arriving
        levels.pop()
    while levels:
        level = levels.pop()
        if level.product is not None:
            d_product = carry_down(level, level.product, dq, dk, d_product)
        for tile, block, pairs, rows, logits in part.tiles_of(level):
            ds = softmax.add(logits, tile)
            dq_tile = tile.rows_of(dq)
            dq_tile.add_((ds @ block.k[:, pairs]).view(dq_tile.shape), alpha=part.scale)
            q = block.q[:, pairs, rows].flatten(2, 3)
            tile.keys_of(dk).add_(ds.mT @ q, alpha=part.scale)

    logits = intra_logits.unflatten(2, (C, -1))
    ds = softmax.add(part.bias.add_(logits, own), own).mul_(part.scale)
    dq_own, dk_own = (x.unflatten(1, (-1, C)) for x in (dq, dk))
    if chunks is None:
        q, k = (x.unflatten(1, (-1, C)) for x in (part.q, part.k))
        dq_own += (ds @ k).view(dq_own.shape)
        dk_own += ds.mT @ q.flatten(2, 3)
        dw = d_beta = None
    else:
        if d_product is None:
            d_product = torch.zeros_like(chunks.product)
        grads = (dq_own.flatten(2, 3), dk_own, d_product, ds)
        dq, dk, dw, d_beta = chunk_transform_backward(
            *part.chunked(), chunks, *(x.double() for x in grads)
        )
        dq, dk = dq.view(part.q.shape), dk.view(part.k.shape)
        dw, d_beta = dw.view(part.k.shape).unsqueeze(2), d_beta.flatten(1, 2).unsqueeze(2)
    return dq, dk.unsqueeze(2), softmax.dv.unsqueeze(2), dw, d_beta, softmax.d_log_gate()


def slices(inputs: Inputs, scale: float) -> Iterator[Slice]:
    """Yields the call's heads in slices of about SLICE_ELEMENTS logits, in compute precision."""
    q, k, v, w, beta, log_gate, document_start = inputs
    T, H = k.shape[1:3]
    padding = -T % CHUNK
    dtype = torch.promote_types(q.dtype, torch.float32)
    earliest = start = gate = None
    if document_start is not None:
        # Read on the host only where that is free; on other devices every tile is computed.
        if document_start.device.type == "cpu":
            earliest = document_start.amin(0).tolist() + [0] * padding
        start = document_start.repeat_interleave(H, 0)
    if log_gate is not None:
        gate = cumulative_gate(_pad(fold(log_gate, H), padding), 1)
    q, k, v = fold(q, H), fold(k, H).squeeze(2), fold(v, H).squeeze(2)
    w, beta = (None if x is None else fold(x, H).squeeze(2) for x in (w, beta))

    def take(x: Tensor, at: slice) -> Tensor:
        return _pad(x[at].to(dtype), padding)

    step = max(1, SLICE_ELEMENTS // (q.shape[2] * (T + padding) * CHUNK))
    for z in range(0, q.shape[0], step):
        at = slice(z, z + step)
        yield Slice(
            heads=at,
            q=take(q, at),
            k=take(k, at),
            v=take(v, at),
            reflections=None if w is None or beta is None else (take(w, at), take(beta, at)),
            bias=Bias(
                gate=None if gate is None else gate[at],
                start=None if start is None else _pad(start[at], padding),
                earliest=earliest,
            ),
            chunk=CHUNK,
            scale=scale,
        )


def fold(x: Tensor, heads: int) -> Tensor:
    """[B, T, H * R, ...] -> [B * H, T, R, ...]."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2).flatten(0, 1)


def unfold(x: Tensor, batch: int) -> Tensor:
    """The inverse of fold, contiguous."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3).contiguous()


def _pad(x: Tensor, tokens: int, value: float = 0.0) -> Tensor:
    """[Z, T, ...] -> [Z, T + tokens, ...]."""
    return F.pad(x, (0, 0) * (x.ndim - 2) + (0, tokens), value=value) if tokens else x
