"""Context parallelism by heads: each rank attends to the whole sequence with some of the heads.

An all-to-all turns this rank's tokens of all heads into all tokens of this rank's heads, another
one turns the results back. Nothing else differs from one device. The ranks must divide the
key/value heads. (Jacobs et al., DeepSpeed Ulysses, 2023.)

Bytes that each of R ranks sends, n = B T its tokens, b the size of an element of q; terms of D of w
and of 4 H need reflections, those of 4 HQ a gate:

    x = n (HQ D b + H (2 D + DV) b + 4 H + 4 HQ)    inputs, and their gradients
    y = n HQ (DV b + 4)                             out and log-sum-exp
    forward     (R - 1) / R (x + y)
    backward    (R - 1) / R (2 x + y + n HQ DV b)

A document mask adds (R - 1) 4 n to both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from path_backend.arguments import Gradients, Inputs
from path_backend.context_parallel.plan import Plan


@torch.no_grad()
def forward(x: Inputs, plan: Plan) -> tuple[Tensor, Tensor]:
    """out [B, T, HQ, DV] in q's dtype and lse [B, HQ, T] of this rank's T tokens."""
    out, lse = plan.backend.attention_forward(_all_tokens(x, plan), plan.scale)
    return _to_tokens(out, plan), _to_tokens(lse.mT, plan).mT.contiguous()


@torch.no_grad()
def backward(d_out: Tensor, x: Inputs, out: Tensor, lse: Tensor, plan: Plan) -> Gradients:
    """Gradients of q, k, v, w, beta, log_gate, each in its input's dtype (None for None)."""
    d_out, out, lse = (_to_heads(y, plan) for y in (d_out, out, lse.mT))
    lse = lse.mT.contiguous()
    grads = plan.backend.attention_backward(d_out, _all_tokens(x, plan), out, lse, plan.scale)
    pairs = zip(grads, x.floating, strict=True)
    return tuple(None if y is None or g is None else _to_tokens(g, plan) for g, y in pairs)


def _all_tokens(x: Inputs, plan: Plan) -> Inputs:
    """All tokens of this rank's heads."""
    moved = x._replace(document_start=None).map(lambda y: _to_heads(y, plan))
    if x.document_start is None:
        return moved
    return moved._replace(document_start=_join(plan.transport.all_gather(x.document_start)(), plan))


def _to_heads(x: Tensor, plan: Plan) -> Tensor:
    """[B, own tokens, heads, ...] -> [B, all tokens, own heads, ...]."""
    by_rank = x.unflatten(2, (plan.layout.ranks, -1)).movedim(2, 0)
    return _join(plan.transport.all_to_all(by_rank)(), plan)


def _to_tokens(x: Tensor, plan: Plan) -> Tensor:
    """The inverse of _to_heads."""
    segments = x.split(plan.layout.length, 1)
    ranks = range(plan.layout.ranks)
    by_rank = [torch.cat([segments[i] for i in plan.layout.held_by(rank)], 1) for rank in ranks]
    return plan.transport.all_to_all(torch.stack(by_rank))().movedim(0, 2).flatten(2, 3)


def _join(x: Tensor, plan: Plan) -> Tensor:
    """[ranks, B, tokens of the rank, ...] -> [B, all tokens in order, ...]."""
    segments = x.unflatten(2, (-1, plan.layout.length))
    return torch.cat([segments[rank, :, place] for rank, place in plan.layout.home], 1)
