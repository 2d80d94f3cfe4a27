"""Appending few tokens: the open keys are moved token by token, then one softmax over all keys."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from path_backend.arguments import Inputs
from path_backend.inference.prefill import (
    close,
    document_starts,
    note_key_size,
    summed_gates,
)
from path_backend.inference.spec import CacheError, pack, unpack

if TYPE_CHECKING:
    from path_backend.inference.cache import PathCache


def decode(cache: PathCache, inputs: Inputs, scale: float) -> Tensor:
    """Returns the output [B, n, HQ, DV] of new tokens, which are appended."""
    n, spec = inputs.q.shape[1], cache.spec
    kernels = _kernels(cache)
    most = spec.open_room
    if kernels is not None:
        most = max(1, kernels.MAX_ROWS // (spec.query_heads // spec.heads))
    outs, done = [], 0
    while done < n:
        stop = min(n, done + min(most, spec.open_room - cache.open_tokens))
        run = inputs.map(lambda x, at=slice(done, stop): x[:, at])  # type: ignore[misc]
        if kernels is not None:
            outs.append(_launch(cache, run, scale, kernels))
        else:
            run = run._replace(document_start=document_starts(cache, run))
            outs.append(_decode_run(cache, run, scale))
        if cache.open_tokens == spec.open_room:
            close_group(cache)
        done = stop
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def _kernels(cache: PathCache) -> ModuleType | None:
    """The launcher of the kernels, None where plain torch decodes."""
    implementation, device = cache.implementation, cache.device
    if implementation == "torch" or (implementation == "auto" and device.type != "cuda"):
        return None
    from path_backend.kernels import decode_launch

    reason = decode_launch.unsupported_reason(cache.spec, device)
    if reason is None:
        return decode_launch
    if implementation == "triton":
        raise NotImplementedError(f"implementation='triton' does not decode here: {reason}")
    return None


def _launch(cache: PathCache, inputs: Inputs, scale: float, kernels: ModuleType) -> Tensor:
    """One step by kernels. While a CUDA graph is captured nothing runs, and nothing is counted."""
    spec, n = cache.spec, inputs.q.shape[1]
    capturing = cache.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capturing and (spec.capacity is None or spec.rollback_window or n > 1):
        raise CacheError(
            "a captured step needs a static capacity, no rollback_window and one token, got "
            f"capacity = {spec.capacity}, rollback_window = {spec.rollback_window}, {n} tokens"
        )
    cache.documents |= inputs.document_start is not None
    closes = not spec.rollback_window and cache.open_tokens + n == spec.group
    out = kernels.step(
        cache.tensors,
        *inputs,
        scale,
        tokens=spec.group,
        open_room=spec.open_room,
        documents=cache.documents,
        prune=spec.prune_margin,
        closing=cache.closes_in_graph if capturing else closes,
    )
    if not capturing:
        cache.tokens += n
        cache.closed += closes
    return out


def close_group(cache: PathCache) -> None:
    """Closes the oldest group of a full open part."""
    t, count = cache.tensors, cache.open_tokens
    names = ("raw_k", "raw_w", "raw_beta") if cache.spec.reflections else ("raw_k",)
    raw = {name: t[name][:, :, :count].clone() for name in names}
    sums = t["open_gate"][:, :, : count + 1].clone() if cache.spec.forget_gate else None
    close(cache, raw, sums, 0)


def _decode_run(cache: PathCache, inputs: Inputs, scale: float) -> Tensor:
    """`decode` of tokens that fit into the open group."""
    spec, t, count, tokens = cache.spec, cache.tensors, cache.open_tokens, cache.tokens
    n, first = inputs.q.shape[1], tokens - count
    store_open(cache, inputs)
    q = pack(inputs.q.to(spec.precise), spec.heads)
    moved = q.clone()
    logits = q.new_full((*q.shape[:-1], tokens + n), float("-inf"))
    for i in range(n):
        if spec.reflections:
            _reflect(cache, count + i)
            moved[:, :, i] = q[:, :, i] @ t["open_product"].mT
        t["open_keys"][:, :, count + i] = t["raw_k"][:, :, count + i].to(spec.precise)
        keys = t["open_keys"][:, :, : count + i + 1]
        logits[:, :, i, :, first : tokens + i + 1] = q[:, :, i] @ keys.mT
    for block, x in cache.form.moved(t, cache.closed, moved.flatten(2, 3)):
        at = block.tokens(spec.group)
        keys = t["k"][:, :, at].to(spec.precise)
        logits[..., at] = (x @ keys.mT).unflatten(2, (n, -1))
    logits *= scale
    if inputs.log_gate is not None:
        gates = t["open_gate"][:, :, count + 1 : count + n + 1]
        logits += pack_rows(_gate_bias(cache, gates, first, tokens + n), spec.heads)
    if inputs.document_start is not None:
        place = torch.arange(tokens + n, device=logits.device)
        hidden = place < inputs.document_start.unsqueeze(-1)
        logits.masked_fill_(hidden[:, None, :, None], float("-inf"))
    p = logits.softmax(-1).flatten(2, 3)
    out = p @ t["v"][:, :, : tokens + n].to(spec.precise)
    cache.advance(n)
    return unpack(out.unflatten(2, (n, -1))).to(inputs.q.dtype)


def store_open(cache: PathCache, inputs: Inputs) -> None:
    """Stores what new tokens of the open group bring; they are not counted yet."""
    t, count, tokens, n = cache.tensors, cache.open_tokens, cache.tokens, inputs.q.shape[1]
    at = slice(count, count + n)
    t["v"][:, :, tokens : tokens + n] = inputs.v.transpose(1, 2)
    t["raw_k"][:, :, at] = inputs.k.transpose(1, 2)
    if inputs.w is not None and inputs.beta is not None:
        t["raw_w"][:, :, at] = inputs.w.transpose(1, 2)
        t["raw_beta"][:, :, at] = inputs.beta.mT
    if inputs.log_gate is not None:
        gates = summed_gates(cache, inputs.log_gate)
        t["open_gate"][:, :, count + 1 : count + n + 1] = gates
        note_key_size(cache, inputs.k)
    if inputs.document_start is not None:
        cache.documents = True
        t["starts"][:, tokens : tokens + n] = inputs.document_start


def _reflect(cache: PathCache, slot: int) -> None:
    """Multiplies P_open and the keys before `slot` by the reflection of the token there."""
    t, spec = cache.tensors, cache.spec
    w, product = t["raw_w"][:, :, slot].to(spec.precise), t["open_product"]
    beta = t["raw_beta"][:, :, slot, None, None]
    if slot == 0:
        product.copy_(torch.eye(spec.head_dim, dtype=product.dtype, device=product.device))
    for rows in (t["open_keys"][:, :, :slot], product):
        rows -= beta * (rows @ w.unsqueeze(-1)) * w.unsqueeze(-2)


def _gate_bias(cache: PathCache, gates: Tensor, first: int, stop: int) -> Tensor:
    """Returns log gates between new tokens and all keys, [B, HQ, n, stop].

    gates: sums up to the new tokens, fp64 [B, HQ, n]. Keys from `first` on are open.
    """
    t, spec = cache.tensors, cache.spec
    bias = gates.new_empty(*gates.shape, stop, dtype=spec.precise)
    to_end = gates.unsqueeze(-1) - t["gate_end"][:, :, None, : cache.closed]
    bias[..., :first] = to_end.to(spec.precise).repeat_interleave(spec.group, -1)
    bias[..., :first] += t["gate_after"][:, :, None, :first]
    open_gates = t["open_gate"][:, :, None, 1 : stop - first + 1]
    bias[..., first:] = (gates.unsqueeze(-1) - open_gates).to(spec.precise)
    return bias


def pack_rows(x: Tensor, heads: int) -> Tensor:
    """[B, H * R, n, keys] -> [B, H, n, R, keys] (a view)."""
    return x.unflatten(1, (heads, -1)).transpose(2, 3)
