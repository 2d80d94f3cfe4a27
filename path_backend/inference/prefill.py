"""Appending many tokens: attention inside the segment, then to what the cache holds.

Closing: `append_tokens` cuts raw tokens into groups, which the closed part takes over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from path_backend import eager, ops
from path_backend.arguments import Backend, CrossSegment, Inputs
from path_backend.eager.softmax import CLOSED
from path_backend.inference import closed as forms
from path_backend.inference.spec import pack, unpack

if TYPE_CHECKING:
    from path_backend.inference.cache import PathCache


def prefill(cache: PathCache, inputs: Inputs, scale: float) -> Tensor:
    """Returns the output [B, n, HQ, DV] of new tokens, which are appended."""
    backend = ops.choose_backend(inputs, cache.implementation)
    starts = document_starts(cache, inputs)
    inputs = inputs._replace(document_start=starts)
    if cache.tokens == 0:
        arguments = (*inputs, scale, cache.implementation)
        out, _ = torch.ops.path_backend.attention(*arguments)
    else:
        out = _attend(cache, inputs, scale, backend).to(inputs.q.dtype)
    append_tokens(cache, inputs, backend)
    return out


def document_starts(cache: PathCache, inputs: Inputs) -> Tensor | None:
    """Returns document_start [B, n] of new tokens, None if no document ever began."""
    B, n = inputs.q.shape[:2]
    if inputs.document_start is not None:
        return inputs.document_start
    if not cache.documents:
        return None
    return cache.tensors["starts"][:, cache.tokens - 1 : cache.tokens].expand(B, n)


def note_key_size(cache: PathCache, k: Tensor) -> None:
    """Keeps the largest |k| of each head, of new keys k [B, n, H, D] too."""
    size, precise = cache.tensors["key_size"], cache.spec.precise
    torch.maximum(size, k.to(precise).norm(dim=-1).amax(1), out=size)


def check_starts(cache: PathCache, starts: Tensor) -> None:
    """Raises ValueError at the first document start that cannot follow those in the cache."""
    n, tokens = starts.shape[1], cache.tokens
    before = cache.tensors["starts"][:, max(tokens - 1, 0), None]
    before = torch.cat([before if tokens else torch.zeros_like(before), starts[:, :-1]], 1)
    wrong = (starts < before) | (starts > torch.arange(tokens, tokens + n))
    if wrong.any():
        b, i = wrong.nonzero()[0].tolist()
        raise ValueError(
            "document_start must be non-decreasing with 0 <= document_start[b, i] <= i, counted "
            f"from the first token of the cache, got {int(starts[b, i])} at token {tokens + i} "
            f"after {int(before[b, i])}"
        )


def summed_gates(cache: PathCache, log_gate: Tensor) -> Tensor:
    """Returns log gates from the first token to each new one, fp64 [B, HQ, n]."""
    before = cache.tensors["open_gate"][:, :, cache.open_tokens, None]
    return before + log_gate.mT.double().clamp_min(CLOSED).cumsum(-1)


def _attend(cache: PathCache, inputs: Inputs, scale: float, backend: Backend) -> Tensor:
    """Attention of a segment to itself and to all that is cached, in compute precision."""
    spec, t, tokens, count = cache.spec, cache.tensors, cache.tokens, cache.open_tokens
    first = tokens - count
    if backend is eager:  # what it returns is not rounded then
        inputs = inputs.map_floating(lambda x: x.to(spec.precise))
    starts, own = inputs.document_start, inputs
    if starts is not None:
        own = inputs._replace(document_start=(starts - tokens).clamp_min(0))
    out, lse, (q_start, _, _) = backend.segment_forward(own, scale)
    gates = None if inputs.log_gate is None else summed_gates(cache, inputs.log_gate)

    def meet(x: Tensor, keys: Tensor, at: slice, sums: Tensor | None) -> None:
        """x [B, n, HQ, D] and keys in one frame; sums: gates up to each key [B, HQ, keys]."""
        gate_q = gate_k = first_key = None
        if gates is not None and sums is not None:
            origin = sums[:, :, -1:]
            gate_q = (gates - origin).to(spec.precise)
            gate_k = (origin - sums).to(spec.precise)
        if starts is not None:
            first_key = (starts - at.start).clamp_min(0)
        q, k = x.to(q_start.dtype), keys.transpose(1, 2).to(q_start.dtype)
        v = t["v"][:, :, at].transpose(1, 2).to(q_start.dtype)
        pair = CrossSegment(q, k, v, gate_q, gate_k, first_key)
        backend.cross_segment_forward(pair, scale, out, lse)

    x = q_start
    if count:
        sums = t["open_gate"][:, :, 1 : count + 1] if gates is not None else None
        meet(q_start, t["open_keys"][:, :, :count], slice(first, tokens), sums)
        if spec.reflections:
            moved = pack(x.to(spec.precise), spec.heads).flatten(2, 3) @ t["open_product"].mT
            x = unpack(moved.unflatten(2, (x.shape[1], -1)))
    rows = pack(x.to(spec.precise), spec.heads)
    for block, moved in cache.form.moved(t, cache.closed, rows.flatten(2, 3)):
        at = block.tokens(spec.group)
        sums = None
        if gates is not None:
            end = t["gate_end"][:, :, block.first : block.first + block.groups]
            sums = end.repeat_interleave(spec.group, -1) - t["gate_after"][:, :, at]
        meet(unpack(moved.view(rows.shape)), t["k"][:, :, at], at, sums)
    return out


def append_tokens(cache: PathCache, inputs: Inputs, backend: Backend) -> None:
    """Appends tokens whose outputs are computed, and closes the groups that became full."""
    t, tokens, n = cache.tensors, cache.tokens, inputs.q.shape[1]
    count = cache.open_tokens
    t["v"][:, :, tokens : tokens + n] = inputs.v.transpose(1, 2)
    if inputs.document_start is not None:
        cache.documents = True
        t["starts"][:, tokens : tokens + n] = inputs.document_start
    new = {"raw_k": inputs.k.transpose(1, 2)}
    if inputs.w is not None and inputs.beta is not None:
        new["raw_w"], new["raw_beta"] = inputs.w.transpose(1, 2), inputs.beta.mT
    raw = {name: torch.cat([t[name][:, :, :count], x], 2) for name, x in new.items()}
    sums = None
    if inputs.log_gate is not None:
        note_key_size(cache, inputs.k)
        gates = summed_gates(cache, inputs.log_gate)
        sums = torch.cat([t["open_gate"][:, :, : count + 1], gates], -1)
    close(cache, raw, sums, n, backend)


def close(
    cache: PathCache,
    raw: dict[str, Tensor],
    sums: Tensor | None,
    new: int,
    backend: Backend | None = None,
) -> None:
    """Takes over raw open tokens, the last `new` of which are not counted yet.

    raw: raw_k, raw_w [B, H, tokens, D], raw_beta [B, H, tokens]; sums: [B, HQ, tokens + 1], from
    before the first of them on. backend: what computes the ends of blocks of more than one group.
    """
    spec, t, group = cache.spec, cache.tensors, cache.spec.group
    total = cache.tokens + new
    groups = spec.closed_groups(total) - cache.closed
    groups = max(groups, 0)
    cut, rest = groups * group, total - (cache.closed + groups) * group
    if groups:
        for block, k_end, product in _ends(cache, raw, groups, backend):
            cache.form.push(t, block, k_end, product)
        if sums is not None:
            ends = sums[:, :, group : cut + 1 : group]
            after = ends.repeat_interleave(group, -1) - sums[:, :, 1 : cut + 1]
            first = cache.closed
            t["gate_end"][:, :, first : first + groups] = ends
            at = slice(first * group, (first + groups) * group)
            t["gate_after"][:, :, at] = after.to(spec.precise)
    for name, x in raw.items():
        t[name][:, :, :rest] = x[:, :, cut:]
    if sums is not None:
        t["open_gate"][:, :, : rest + 1] = sums[:, :, cut:]
    if spec.reflections and rest:
        keys, product = forms.ends(*(x[:, :, cut:] for x in raw.values()))
        t["open_keys"][:, :, :rest] = keys.to(spec.precise)
        t["open_product"].copy_(product)
    elif rest:
        t["open_keys"][:, :, :rest] = raw["raw_k"][:, :, cut:].to(spec.precise)
    cache.advance(new, groups)


def _ends(
    cache: PathCache, raw: dict[str, Tensor], groups: int, backend: Backend | None
) -> list[tuple[forms.Block, Tensor, Tensor | None]]:
    """Returns the blocks of the first groups of raw tokens, with k_end and product."""
    spec, first = cache.spec, cache.closed
    pieces = cache.form.pieces(first, groups)
    if not spec.reflections:
        k = raw["raw_k"]
        return [(p, k[:, :, : groups * spec.group], None) for p in pieces]
    k, w, beta = raw["raw_k"], raw["raw_w"], raw["raw_beta"]
    if all(p.groups == 1 for p in pieces):
        cut = [x[:, :, : groups * spec.group].unflatten(2, (groups, -1)) for x in (k, w, beta)]
        k_end, product = forms.ends(*cut)
        return [(p, k_end[:, :, i], product[:, :, i]) for i, p in enumerate(pieces)]
    blocks: list[tuple[forms.Block, Tensor, Tensor | None]] = []
    for p in pieces:
        at = slice((p.first - first) * spec.group, (p.first - first + p.groups) * spec.group)
        if p.groups == 1:
            blocks.append((p, *forms.ends(k[:, :, at], w[:, :, at], beta[:, :, at])))
            continue
        assert backend is not None
        dtype = spec.precise if backend is eager else spec.dtype
        keys, ws, betas = (x[:, :, at].transpose(1, 2) for x in (k, w, beta))
        keys, ws = keys.to(dtype), ws.to(dtype)
        moved = backend.segment_ends(Inputs(keys, keys, keys, ws, betas))
        blocks.append((p, moved.k_end.transpose(1, 2), moved.product))
    return blocks
