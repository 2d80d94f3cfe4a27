"""The cache of one attention layer: closed groups, and an open one that follows the last token.

The paper multiplies every cached key by H_t at every token. Here the keys of the last few tokens
alone are, in fp32 (open group). Once there are `group` of them they are closed: their keys stay in
the frame of the group's end, and a query reaches them through products of reflections, P_open
first. path_backend.inference.closed describes the closed part.

Tensors by name; B rows, N tokens of room, G of a group, O of the open one:

    k, v          [B, H, N, D], [B, H, N, DV]   closed keys at the end of their block; all values
    product       [B, H, slots, D, D]           of the closed blocks, fp32 (fp64 for fp64)
    suffix        as product                    of all blocks behind, dyadic form
    gate_end      [B, HQ, N / G] fp64           log gates from the first token to a group's end
    gate_after    [B, HQ, N]                    those after a token to its group's end
    starts        [B, N] int32                  document_start of every token
    raw_k, raw_w  [B, H, O, D]; raw_beta [B, H, O]     of the open tokens, as they came
    open_keys     [B, H, O, D]                  keys of the open tokens at the last token
    open_product  [B, H, D, D]                  P_open
    open_gate     [B, HQ, O + 1] fp64           log gates from the first token, [0] before the open
    key_size      [B, H]                        largest |k| so far, where gates prune
    features      [B, O + width - 1, C]         inputs of the convolution, token t at t mod the size
    position      [2] int64                     tokens and closed groups, on the device
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from path_backend.arguments import Inputs, prepare
from path_backend.checks import check_values
from path_backend.inference import closed as forms
from path_backend.inference.decode import decode
from path_backend.inference.prefill import check_starts, prefill
from path_backend.inference.spec import (
    CacheMismatchError,
    CacheSpec,
    CapacityError,
    RollbackError,
)
from path_backend.precision import without_autocast

STATE_VERSION = 1
DECODE_TOKENS = 16
"""Longer calls are segments of a prefill; up to so many tokens move the open keys one by one."""

_TOKENS = ("k", "v", "gate_after", "starts")
_GROUPS = ("gate_end",)
_SLOTS = ("product", "suffix")


class PathCache:
    """Keys, values and products of the tokens that a layer has seen, and attention to them.

    Args:
        spec: the numbers of the layer.
        rows: B.
        device: of all tensors.
        implementation: as in `path_attention`; "triton" and "auto" on CUDA decode by kernels.

    A call that raises CacheError, ValueError or TypeError leaves the cache as it was.

    A CUDA graph holds a step of one token, if the capacity is static. Capture it after steps that
    closed a group have compiled everything (those of a fork do), with q, k, ... in buffers that
    stay; then, for each token: `check_room(1)`, fill the buffers, replay, `replayed()`. With
    `closes_in_graph` set False before a capture, the graph is shorter and serves the steps for
    which `fills_group` is false, and another one, captured with True, all others.
    """

    closes_in_graph = True

    def __init__(
        self,
        spec: CacheSpec,
        rows: int,
        *,
        device: torch.device | str = "cpu",
        implementation: str = "auto",
    ):
        if rows < 1:
            raise ValueError(f"rows must be at least 1, got {rows}")
        self.spec, self.implementation = spec, implementation
        self.form = _form(spec)
        self.tokens = 0
        self.closed = 0
        self.documents = False  # whether a document begins behind the first token anywhere
        groups = -(-(spec.capacity or spec.open_room) // spec.group)
        self.tensors = _allocate(spec, self.form, rows, groups, torch.device(device))

    @property
    def rows(self) -> int:
        """B, the sequences."""
        return self.tensors["k"].shape[0]

    @property
    def open_tokens(self) -> int:
        """The tokens in the open group, which can be taken back."""
        return self.tokens - self.closed * self.spec.group

    @property
    def fills_group(self) -> bool:
        """Whether the next token closes a group."""
        return self.open_tokens + 1 == self.spec.open_room

    @property
    def position(self) -> Tensor:
        """The tokens seen so far, int64 [1] on the device: where a captured step reads them."""
        return self.tensors["position"][:1]

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.tensors["k"].device

    @torch.no_grad()
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: Tensor | None = None,
        beta: Tensor | None = None,
        log_gate: Tensor | None = None,
        *,
        document_start: Tensor | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        """Appends n tokens and returns their attention to all tokens so far, [B, n, HQ, DV].

        Args:
            q, k, v, w, beta, log_gate: as `path_attention`, of the n tokens.
            document_start: int32 [B, n], counted from the first token of the cache, like the left
                padding of a row: the number of its pads, from its first real token on. None: the
                document of the last token goes on.
            features: [B, n, C], what the convolution reads of these tokens.

        Raises CapacityError, CacheMismatchError, or what `path_attention` raises.
        """
        inputs = Inputs(q, k, v, w, beta, log_gate, document_start)
        inputs, scale = prepare(
            inputs,
            self.spec.scale,
            self.spec.gate_scale if log_gate is not None else 1.0,
            self.implementation,
        )
        self.spec.check(inputs, self.rows)
        self._check_features(inputs, features)
        if q.device != self.device:
            raise CacheMismatchError(f"the cache is on {self.device}, the tokens are on {q.device}")
        check_values(inputs._replace(document_start=None))
        if document_start is not None and document_start.device.type == "cpu":
            check_starts(self, document_start)
        length = q.shape[1]
        self.check_room(length)
        self._grow(self.tokens + length)
        with without_autocast(q), torch.cuda.device_of(q):
            many = length > DECODE_TOKENS or (self.tokens == 0 and length > 1)
            out = (prefill if many else decode)(self, inputs, scale)
            self._remember(features)
        return out

    def conv_history(self) -> Tensor:
        """Returns the features [B, width - 1, C] of the last tokens; zeros before the first."""
        count, ring = self.spec.history, self.tensors["features"]
        at = self.position + torch.arange(-count, 0, device=self.device)
        rows = ring.index_select(1, at.remainder(ring.shape[1]))
        return rows.masked_fill((at < 0).unsqueeze(-1), 0)

    def conv_start(self, length: int, document_start: Tensor | None = None) -> Tensor | None:
        """Returns document_start [B, length] of the next tokens, counted from the first of them, as
        `causal_conv` takes it beside `conv_history`; None if no document ever began.
        """
        if document_start is None:
            if not self.documents:
                return None
            last = (self.position - 1).clamp_min(0)
            document_start = self.tensors["starts"].index_select(1, last).expand(-1, length)
        return document_start - self.position.to(torch.int32)

    def check_room(self, tokens: int) -> None:
        """Raises CapacityError if a static cache has no room for so many more tokens."""
        capacity = self.spec.capacity
        if capacity is not None and self.tokens + tokens > capacity:
            raise CapacityError(
                f"the cache has room for {capacity} tokens and holds {self.tokens}, "
                f"got {tokens} more"
            )

    def replayed(self, tokens: int = 1) -> None:
        """Counts tokens that a replay of a captured step appended: the host cannot see them."""
        self.tokens += tokens
        self.closed = self.spec.closed_groups(self.tokens)

    def rollback(self, tokens: int) -> None:
        """Takes back the last tokens, of all rows. Raises RollbackError beyond the open group."""
        if not 0 <= tokens <= self.open_tokens:
            raise RollbackError(
                f"between 0 and {self.open_tokens} tokens, those of the open group, can be taken "
                f"back, got {tokens}; rollback_window = {self.spec.rollback_window} keeps more"
            )
        if tokens:
            self.tokens -= tokens
            self._settle()

    def crop(self, length: int) -> None:
        """Keeps the first `length` tokens: any that end in the open group or with a closed block.

        The paged form has a block for each group, the dyadic form one for each set bit of their
        number. Raises RollbackError for other lengths.
        """
        group = self.spec.group
        if not 0 <= length <= self.tokens:
            raise RollbackError(f"length must be between 0 and {self.tokens}, got {length}")
        if length >= self.closed * group:
            return self.rollback(self.tokens - length)
        keep = length // group
        if length % group or not forms.croppable(self.form, self.closed, keep):
            ends = [b.first * group for b in self.form.blocks(self.closed)]
            raise RollbackError(
                f"closed groups end at {sorted(ends)[:8]}..., and only there can they be cut; "
                f"got length = {length}"
            )
        needed = self.tokens - length + min(self.spec.history, length)
        if self.spec.history and length and needed > self.tensors["features"].shape[1]:
            raise RollbackError(
                f"the convolution's inputs before token {length} are gone, got length = {length}"
            )
        self.form.crop(self.tensors, self.closed, keep)
        self.tokens, self.closed = length, keep
        if self.spec.forget_gate:
            end, gate = self.tensors["gate_end"], self.tensors["open_gate"]
            gate[:, :, 0] = end[:, :, keep - 1] if keep else 0
        self._settle()

    def reset(self) -> None:
        """Forgets all tokens; the buffers stay where they are."""
        self.crop(0)

    def reorder(self, rows: Tensor) -> None:
        """Takes row rows[i] for row i, int64 [new B], as a beam search does; rows may repeat.

        A static cache keeps its buffers, so that the number of rows must stay.
        """
        if rows.ndim != 1 or rows.dtype != torch.int64 or not len(rows):
            raise CacheMismatchError(f"rows must be int64 [B], got {rows.dtype} {list(rows.shape)}")
        if rows.device.type == "cpu" and not 0 <= int(rows.min()) <= int(rows.max()) < self.rows:
            raise CacheMismatchError(f"rows must be in [0, {self.rows}), got {rows.tolist()}")
        if self.spec.capacity is not None and len(rows) != self.rows:
            raise CapacityError(f"a static cache has {self.rows} rows, got {len(rows)}")
        for name, x in self.tensors.items():
            if name == "position":
                continue
            chosen = x.index_select(0, rows.to(x.device))
            if self.spec.capacity is None:
                self.tensors[name] = chosen
            else:
                x.copy_(chosen)

    def repeat(self, times: int) -> PathCache:
        """Returns a copy with every row `times` times in a row."""
        if times < 1:
            raise ValueError(f"times must be at least 1, got {times}")
        copy = self._like()
        copy.tensors = {
            name: x.clone() if name == "position" else x.repeat_interleave(times, 0)
            for name, x in self.tensors.items()
        }
        return copy

    def fork(self) -> PathCache:
        """Returns a copy that goes its own way."""
        return self.repeat(1)

    def state_dict(self) -> dict[str, Any]:
        """Returns tensors, cut to the tokens that are there, and numbers; for torch.save."""
        cut = {name: x[_used(self, name)].clone() for name, x in self.tensors.items()}
        numbers = {
            "version": STATE_VERSION,
            "tokens": self.tokens,
            "closed": self.closed,
            "documents": self.documents,
            "spec": dataclasses.asdict(self.spec),
        }
        return {**numbers, "tensors": cut}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a state of the same model and form; the capacity may differ.

        Raises CacheMismatchError naming what differs, CapacityError if it has too many tokens.
        """
        wanted = {"version", "tokens", "closed", "documents", "spec", "tensors"}
        if set(state) != wanted:
            raise CacheMismatchError(
                f"a state of a cache has {sorted(wanted)}, got {sorted(map(str, state))}"
            )
        if state["version"] != STATE_VERSION:
            raise CacheMismatchError(
                f"the state must have version {STATE_VERSION}, got {state['version']}"
            )
        if differences := self.spec.differences(CacheSpec(**state["spec"])):
            raise CacheMismatchError(f"the cache has {'; '.join(differences)}")
        capacity = self.spec.capacity
        if capacity is not None and state["tokens"] > capacity:
            raise CapacityError(
                f"the cache has room for {capacity} tokens, the state has {state['tokens']}"
            )
        loaded = self._like()
        loaded.tokens, loaded.closed = state["tokens"], state["closed"]
        loaded.documents = state["documents"]
        groups = self.tensors["k"].shape[2] // self.spec.group
        groups = max(groups, -(-state["tokens"] // self.spec.group))
        loaded.tensors = _allocate(self.spec, self.form, self.rows, groups, self.device)
        given = state["tensors"]
        if set(given) != set(loaded.tensors):
            raise CacheMismatchError(
                f"the state must hold {sorted(loaded.tensors)}, got {sorted(given)}"
            )
        for name, x in loaded.tensors.items():
            place = x[_used(loaded, name)]
            if place.shape != given[name].shape or place.dtype != given[name].dtype:
                raise CacheMismatchError(
                    f"{name} of the state must be {place.dtype} {list(place.shape)}, "
                    f"got {given[name].dtype} {list(given[name].shape)}"
                )
            place.copy_(given[name])
        if capacity is None:
            self.tensors = loaded.tensors
        else:  # a captured step reads these very buffers
            for name, x in self.tensors.items():
                x.copy_(loaded.tensors[name])
        self.tokens, self.closed, self.documents = loaded.tokens, loaded.closed, loaded.documents

    def memory(self) -> dict[str, int]:
        """Returns the bytes of every tensor as it is allocated, and their "total"."""
        sizes = {name: x.numel() * x.element_size() for name, x in self.tensors.items()}
        return {**sizes, "total": sum(sizes.values())}

    def advance(self, tokens: int, closed: int = 0) -> None:
        """Counts tokens and groups that were appended, here and on the device."""
        self.tokens += tokens
        self.closed += closed
        self.tensors["position"][0] += tokens
        if closed:
            self.tensors["position"][1] += closed

    def _like(self) -> PathCache:
        other = object.__new__(PathCache)
        other.__dict__.update(self.__dict__)
        return other

    def _settle(self) -> None:
        """Recomputes what follows from the raw open tokens, after some were taken away."""
        t, count = self.tensors, self.open_tokens
        t["position"].copy_(torch.tensor([self.tokens, self.closed]))
        if self.spec.reflections and count:
            raw = (t[name][:, :, :count] for name in ("raw_k", "raw_w", "raw_beta"))
            keys, product = forms.ends(*raw)
            t["open_keys"][:, :, :count] = keys.to(self.spec.precise)
            t["open_product"].copy_(product)

    def _check_features(self, inputs: Inputs, features: Tensor | None) -> None:
        channels = self.spec.conv_channels
        if features is None and not channels:
            return
        want = (*inputs.q.shape[:2], channels)
        if features is None or features.shape != want:
            got = "none" if features is None else list(features.shape)
            raise CacheMismatchError(f"features must have shape [B, n, C] = {want}, got {got}")

    def _remember(self, features: Tensor | None) -> None:
        if features is None or not self.spec.history:
            return
        ring = self.tensors["features"]
        size, length = ring.shape[1], features.shape[1]
        last = min(size, length)
        at = self.position + torch.arange(-last, 0, device=self.device)
        ring.index_copy_(1, at.remainder(size), features[:, length - last :].to(ring.dtype))

    def _grow(self, tokens: int) -> None:
        """Room for so many tokens: doubled when it is used up."""
        groups = self.tensors["k"].shape[2] // self.spec.group
        needed = -(-tokens // self.spec.group)
        if needed <= groups:
            return
        larger = _allocate(self.spec, self.form, self.rows, max(needed, 2 * groups), self.device)
        for name, x in larger.items():
            old = self.tensors[name]
            if x.shape == old.shape:
                larger[name] = old
            elif name == "starts":
                x[:, : old.shape[1]] = old
            else:
                x[:, :, : old.shape[2]] = old
        self.tensors = larger


def _form(spec: CacheSpec) -> forms.ClosedPart:
    if not spec.reflections:
        return forms.RawKeys(spec.group)
    return (
        forms.DyadicBlocks(spec.group) if spec.form == "dyadic" else forms.PagedGroups(spec.group)
    )


def _allocate(
    spec: CacheSpec, form: forms.ClosedPart, rows: int, groups: int, device: torch.device
) -> dict[str, Tensor]:
    """All tensors, zero."""
    D, H, HQ, room = spec.head_dim, spec.heads, spec.query_heads, groups * spec.group
    open_room, precise, exact = spec.open_room, spec.precise, torch.float64
    table: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "k": ((H, room, D), spec.closed_key_dtype),
        "v": ((H, room, spec.value_dim), spec.dtype),
        "starts": ((room,), torch.int32),
        "raw_k": ((H, open_room, D), spec.dtype),
        "open_keys": ((H, open_room, D), precise),
    }
    if spec.reflections:
        slots = form.slots(groups)
        table["product"] = ((H, slots, D, D), precise)
        if spec.form == "dyadic":
            table["suffix"] = ((H, slots, D, D), precise)
        table["raw_w"] = ((H, open_room, D), spec.dtype)
        table["raw_beta"] = ((H, open_room), precise)
        table["open_product"] = ((H, D, D), precise)
    if spec.forget_gate:
        table["gate_end"] = ((HQ, groups), exact)
        table["gate_after"] = ((HQ, room), precise)
        table["open_gate"] = ((HQ, open_room + 1), exact)
        table["key_size"] = ((H,), precise)
    if spec.conv_channels:
        table["features"] = ((open_room + spec.history, spec.conv_channels), spec.dtype)
    tensors = {
        name: torch.zeros(rows, *shape, dtype=dtype, device=device)
        for name, (shape, dtype) in table.items()
    }
    tensors["position"] = torch.zeros(2, dtype=torch.int64, device=device)
    return tensors


def _used(cache: PathCache, name: str) -> tuple[slice, ...]:
    """The part of a tensor that the tokens so far fill."""
    everything = slice(None)
    if name == "starts":
        return everything, slice(cache.tokens)
    if name in _TOKENS:
        return everything, everything, slice(cache.tokens)
    if name in _GROUPS:
        return everything, everything, slice(cache.closed)
    if name in _SLOTS:
        return everything, everything, slice(cache.form.slots(cache.closed))
    return (everything,)
