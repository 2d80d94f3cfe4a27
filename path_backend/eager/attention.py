"""PaTH attention in plain torch: the UT transform of chunks, then attention in dyadic frames.

Notation of one slice: Z key/value heads (batch folded in), R query heads on each, T tokens padded
to whole chunks of C; q [Z, T, R, D], k, w [Z, T, D], v [Z, T, DV], beta [Z, T].

One chunk (W [C, D], B = diag(beta), S = strict upper triangle of W W^T):

    X = (I + B S)^-1 B
    P = H_1 ... H_C                         = I - W^T X W
    low = lower triangle of Q W^T (diagonal too)
    q_start = H_1 ... H_i q_i               = Q - low X^T W
    up = strict upper triangle of K W^T
    k_end = (H_{j+1} ... H_C)^T k_j         = K - up X W
    logits of the chunk's own triangle      = Q K^T - low X^T up^T

Pairs of blocks (left, right), doubling from one chunk on:

    logits of the square        q_start(right) . k_end(left)
    then                        q_start(right) <- P_left q_start(right)
                                k_end(left) <- P_right^T k_end(left)
                                P <- P_left P_right

The last block may be short; a block without a sibling rises unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from path_backend.eager.softmax import Bias, OnlineSoftmax, SoftmaxGradient, Tile, cumulative_gate

CHUNK = 64
# Queries of all heads in flight: above, the heads are worked through in slices.
SLICE_ELEMENTS = 2**20


class Chunks(NamedTuple):
    """The UT transform of N chunks, rows of q packed as (token, query head)."""

    q_start: Tensor  # [Z, N, C * R, D]
    k_end: Tensor  # [Z, N, C, D]
    product: Tensor  # [Z, N, D, D]
    logits: Tensor  # [Z, N, C * R, C], valid for key <= query
    solve: Tensor  # X [Z, N, C, C]
    low: Tensor  # [Z, N, C * R, C]
    up: Tensor  # [Z, N, C, C]


def chunk_transform(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> Chunks:
    """q [Z, N, C * R, D]; k, w [Z, N, C, D]; beta [Z, N, C], of one dtype."""
    C, D = k.shape[-2:]
    M = torch.eye(C, dtype=q.dtype, device=q.device) + beta.unsqueeze(-1) * (w @ w.mT).triu(1)
    X = torch.linalg.solve_triangular(M, torch.diag_embed(beta), upper=True)
    low = (q @ w.mT).masked_fill_(_later(q, C), 0)
    up = (k @ w.mT).triu_(1)
    low_x, up_x = low @ X.mT, up @ X
    return Chunks(
        q_start=q - low_x @ w,
        k_end=k - up_x @ w,
        product=torch.eye(D, dtype=q.dtype, device=q.device) - w.mT @ (X @ w),
        logits=q @ k.mT - low_x @ up.mT,
        solve=X,
        low=low,
        up=up,
    )


def chunk_transform_backward(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    beta: Tensor,
    chunks: Chunks,
    dq_start: Tensor,
    dk_end: Tensor,
    d_product: Tensor,
    d_logits: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, w, beta. d_logits must be zero above the diagonal.

    X = M^-1 B with M = I + B S: Y = M^-T dX, dB = diag(Y) + rowsum(dM * S), dM = -Y X^T,
    dS = strict upper triangle of B dM, dW += (dS + dS^T) W.
    """
    C = k.shape[-2]
    X, low, up = chunks.solve, chunks.low, chunks.up
    low_x, up_x = low @ X.mT, up @ X

    d_low_x = -(dq_start @ w.mT) - d_logits @ up
    d_up_x = -(dk_end @ w.mT)
    d_low = (d_low_x @ X).masked_fill_(_later(q, C), 0)
    d_up = (d_up_x @ X.mT - d_logits.mT @ low_x).triu_(1)
    w_dp = w @ d_product
    dX = d_low_x.mT @ low + up.mT @ d_up_x - w_dp @ w.mT

    S = (w @ w.mT).triu(1)
    M = torch.eye(C, dtype=q.dtype, device=q.device) + beta.unsqueeze(-1) * S
    Y = torch.linalg.solve_triangular(M.mT, dX, upper=False)
    dM = -Y @ X.mT
    d_beta = Y.diagonal(dim1=-2, dim2=-1) + (dM * S).sum(-1)
    dS = (beta.unsqueeze(-1) * dM).triu_(1)

    dq = dq_start + d_logits @ k + d_low @ w
    dk = dk_end + d_logits.mT @ q + d_up @ w
    dw = d_low.mT @ q + d_up.mT @ k + (dS + dS.mT) @ w
    dw -= low_x.mT @ dq_start + up_x.mT @ dk_end
    dw -= X @ (w @ d_product.mT) + X.mT @ w_dp
    return dq, dk, dw, d_beta


def _later(q: Tensor, C: int) -> Tensor:
    """[C * R, C]: True where the key comes after the packed query row."""
    token = torch.arange(C, device=q.device)
    return token > token.repeat_interleave(q.shape[-2] // C).unsqueeze(-1)


class Square(NamedTuple):
    """The squares of one size, or the short one at the right edge, in the frame of their block."""

    tile: Tile
    q: Tensor  # [Z, count, rows, R, D], at the start of the right child
    k: Tensor  # [Z, count, keys, D], at the end of the left child


class Level(NamedTuple):
    """All squares of one size. product [Z, ceil(T / half), D, D] of the children, or None if
    nothing moves afterwards (no reflections, or the last level)."""

    half: int
    product: Tensor | None
    squares: list[Square]

    def left(self, tile: Tile, x: Tensor) -> Tensor:
        """Of a tensor like `product`: the left children of the tile's pairs (a view)."""
        i = tile.first // self.half
        return x[:, i : i + 2 * tile.count : 2]

    def right(self, tile: Tile, x: Tensor) -> Tensor:
        """The right children (a view)."""
        return self.left(tile, x[:, 1:])


def squares(length: int, half: int) -> list[Tile]:
    """The squares between neighbouring blocks of `half` tokens, cut off at the right edge."""
    pairs, rest = divmod(length, 2 * half)
    tiles = []
    if pairs:
        tiles.append(Tile(0, pairs, 2 * half, (half, 2 * half), (0, half)))
    if rest > half:
        tiles.append(Tile(pairs * 2 * half, 1, rest, (half, rest), (0, half)))
    return tiles


def sweep(
    q: Tensor, k: Tensor, product: Tensor | None, chunk: int, whole: bool = False
) -> Iterator[Level]:
    """Yields the levels from small to large. q and k are overwritten; what was yielded is not.

    whole: moves q and k on to the frame of all T tokens, q to their start and k to their end. One
    more level comes last, without squares, and holds the product of all.
    """
    length, half = q.shape[1], chunk
    while half < length:
        moving = product if whole or 2 * half < length else None
        pairs = [Square(t, t.rows_of(q), t.keys_of(k)) for t in squares(length, half)]
        if moving is not None:  # in place, below
            pairs = [Square(t, q_right.clone(), k_left.clone()) for t, q_right, k_left in pairs]
        level = Level(half, moving, pairs)
        yield level
        if moving is not None:
            product = _move_up(level, moving, q, k)
        half *= 2
    if whole:
        yield Level(half, product, [])


def _move_up(level: Level, product: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Moves q and k to the frame of the next level; returns the products of its blocks."""
    joined = []
    for tile, q_right, k_left in level.squares:
        left, right = level.left(tile, product), level.right(tile, product)
        tile.rows_of(q).copy_((q_right.flatten(2, 3) @ left.mT).view(q_right.shape))
        tile.keys_of(k).copy_(k_left @ right)
        joined.append(left @ right)
    if product.shape[1] % 2:
        joined.append(product[:, -1:])
    return torch.cat(joined, 1)


def _move_down(
    level: Level, product: Tensor, dq: Tensor, dk: Tensor, d_next: Tensor | None
) -> Tensor:
    """The transpose of _move_up. Moves dq and dk back in place.

    d_next: gradient of the products that _move_up returned. Returns that of `product`.
    """
    d_product = torch.zeros_like(product)
    for tile, q_right, k_left in level.squares:
        left, right = level.left(tile, product), level.right(tile, product)
        d_left, d_right = level.left(tile, d_product), level.right(tile, d_product)
        moved = tile.rows_of(dq).flatten(2, 3)
        d_left += moved.mT @ q_right.flatten(2, 3)
        tile.rows_of(dq).copy_((moved @ left).view(q_right.shape))
        moved = tile.keys_of(dk)
        d_right += k_left.mT @ moved
        moved.copy_(moved @ right.mT)
        if d_next is not None:
            i = tile.first // (2 * level.half)
            d_joined = d_next[:, i : i + tile.count]
            d_left += d_joined @ right.mT
            d_right += left.mT @ d_joined
    if product.shape[1] % 2 and d_next is not None:
        d_product[:, -1:] += d_next[:, -1:]
    return d_product


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
        """Of folded tensors. exp(S - inf) = 0: padded rows take no part, whatever their logits."""
        lse = self.take(lse, float("inf"))
        return SoftmaxGradient(self.take(d_out), self.take(out), lse, self.v, self.bias)

    def own_tile(self) -> Tile:
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
        """Chunks, logits of the own triangles, and the q, k, product that the sweep starts from."""
        if self.reflections is None:
            q, k = (x.unflatten(1, (-1, self.chunk)) for x in (self.q, self.k))
            return None, q.flatten(2, 3) @ k.mT * self.scale, self.q, self.k, None
        chunks = chunk_transform(*self.chunked())
        rounded = (chunks.logits * self.scale, chunks.q_start, chunks.k_end, chunks.product)
        logits, q, k, product = (x.to(self.q.dtype) for x in rounded)
        return chunks, logits, q.view(self.q.shape), k.view(self.k.shape), product

    def tiles_of(self, level: Level) -> Iterator[tuple[Tile, Square, slice, slice, Tensor]]:
        """The level's non-empty tiles with their logits, and where they lie in their square."""
        width = self.q.shape[0] * self.q.shape[2]
        for square in level.squares:
            for tile, pairs, rows in square.tile.split(width):
                if not self.bias.empties(tile):
                    q, k = square.q[:, pairs, rows], square.k[:, pairs]
                    logits = ((q * self.scale).flatten(2, 3) @ k.mT).view(*q.shape[:4], k.shape[2])
                    yield tile, square, pairs, rows, self.bias.add_(logits, tile)


@torch.no_grad()
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_gate: Tensor | None,
    document_start: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Arguments as path_attention. Returns out [B, T, HQ, DV] in q's dtype and lse [B, HQ, T]."""
    B, T, H = k.shape[:3]
    results = []
    for part in slices(q, k, v, w, beta, log_gate, document_start, scale):
        out, lse, *_ = slice_forward(part)
        results.append((out[:, :T].to(q.dtype), lse[:, :T]))
    out, lse = (torch.cat(x) for x in zip(*results, strict=True))
    return unfold(out, B), unfold(lse, B).mT.contiguous()


def slice_forward(
    part: Slice, whole: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """out [Z, T, R, DV], lse [Z, T, R], and q, k and the last product where the sweep left them."""
    own = part.own_tile()
    softmax = OnlineSoftmax(part.q, part.v)
    _, logits, q, k, product = part.start()
    logits = logits.unflatten(2, (part.chunk, -1))
    softmax.add(part.bias.add_(logits, own), part.v, own)
    for level in sweep(q, k, product, part.chunk, whole):
        product = level.product
        for tile, _, _, _, logits in part.tiles_of(level):
            softmax.add(logits, part.v, tile)
    return *softmax.finish(), q, k, product


@torch.no_grad()
def attention_backward(
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
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, w, beta, log_gate, each in its input's dtype (None for None)."""
    B, T, H = k.shape[:3]
    inputs = (q, k, v, w, beta, log_gate)
    d_out, out, lse = (fold(x, H) for x in (d_out, out, lse.mT))
    results = []
    for part in slices(*inputs, document_start, scale):
        pairs = zip(slice_backward(part, part.gradient(d_out, out, lse)), inputs, strict=True)
        results.append([None if g is None or x is None else g[:, :T].to(x.dtype) for g, x in pairs])
    return tuple(
        None if x[0] is None else unfold(torch.cat(x), B) for x in zip(*results, strict=True)
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
    C, own = part.chunk, part.own_tile()
    chunks, own_logits, q_start, k_end, product = part.start()
    levels = list(sweep(q_start, k_end, product, C, arriving is not None))
    if arriving is None:
        dq, dk, d_product = torch.zeros_like(part.q), torch.zeros_like(part.k), None
    else:
        dq, dk, d_product = arriving
        levels.pop()
    while levels:
        level = levels.pop()
        if level.product is not None:
            d_product = _move_down(level, level.product, dq, dk, d_product)
        for tile, square, pairs, rows, logits in part.tiles_of(level):
            ds = softmax.add(logits, tile)
            dq_tile = tile.rows_of(dq)
            dq_tile.add_((ds @ square.k[:, pairs]).view(dq_tile.shape), alpha=part.scale)
            q = square.q[:, pairs, rows].flatten(2, 3)
            tile.keys_of(dk).add_(ds.mT @ q, alpha=part.scale)

    logits = own_logits.unflatten(2, (C, -1))
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


def slices(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_gate: Tensor | None,
    document_start: Tensor | None,
    scale: float,
) -> Iterator[Slice]:
    """The call's heads in slices of about SLICE_ELEMENTS logits of chunks, in compute precision."""
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
