"""Copies, beams, cuts, saved states, the convolution's inputs; refused calls change nothing."""

import dataclasses
import io

import pytest
import torch
from cache_checks import (
    KINDS,
    append,
    appended,
    assert_equal,
    assert_unchanged,
    cache_for,
    inputs_of,
    snapshot,
    tokens,
    whole,
)

from path_backend.inference import (
    CacheMismatchError,
    CacheSpec,
    CapacityError,
    PathCache,
    RollbackError,
)
from path_backend.layers.elementwise import causal_conv

FORMS = ("dyadic", "paged")


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


def rows_of(inputs, rows):
    return inputs.map(lambda x: x[rows])


@pytest.mark.parametrize("kind", KINDS)
def test_fork(kind, form):
    """A copy that shared a buffer would see the other's tokens."""
    inputs, other = (inputs_of(60, B=2, seed=i, **KINDS[kind]) for i in range(2))
    cache = cache_for(inputs, form=form)
    appended(cache, inputs, [30])
    copy = cache.fork()
    appended(copy, other, [1] * 13)
    assert_equal(appended(cache, inputs, [1] * 30, start=30), whole(inputs)[:, 30:])


@pytest.mark.parametrize("capacity", [None, 64])
def test_reorder(form, capacity):
    """Beams: every row goes on from the row that it was told to take."""
    inputs = inputs_of(60, B=3, HQ=4, gate=True, documents=True)
    rows = torch.tensor([2, 0, 0])
    cache = cache_for(inputs, form=form, capacity=capacity)
    appended(cache, inputs, [31])
    buffers = {name: x.data_ptr() for name, x in cache.tensors.items()}
    cache.reorder(rows)
    inputs = rows_of(inputs, rows)
    assert_equal(appended(cache, inputs, [1] * 29, start=31), whole(inputs)[:, 31:])
    if capacity:
        assert buffers == {name: x.data_ptr() for name, x in cache.tensors.items()}


def test_fewer_rows_and_repeat(form):
    """Rows that ended leave a growing cache; a prompt becomes the start of several beams."""
    inputs = inputs_of(40, B=3, gate=True)
    cache = cache_for(inputs, form=form)
    appended(cache, inputs, [21])
    cache.reorder(torch.tensor([1]))
    assert cache.rows == 1
    cache = cache.repeat(2)
    inputs = rows_of(inputs, torch.tensor([1, 1]))
    assert_equal(appended(cache, inputs, [1] * 19, start=21), whole(inputs)[:, 21:])


@pytest.mark.parametrize("length", [0, 16, 48, 56, 57, 59])
def test_crop(form, length):
    """A cut at a block's end or inside the open group, then other tokens."""
    inputs = inputs_of(60, B=2, HQ=4, gate=True, documents=True)
    cache = cache_for(inputs, form=form, rollback_window=3)
    appended(cache, inputs, [60])
    if form == "dyadic" and length == 16:
        cache.crop(48)
    if form == "dyadic" and length in (16, 48):
        with pytest.raises(RollbackError, match="closed groups end at"):
            cache.crop(20)
        length = {16: 32, 48: 48}[length]
    cache.crop(length)
    assert cache.tokens == length and cache.tensors["position"][0] == length
    assert_equal(
        appended(cache, inputs, [1] * (60 - length), start=length), whole(inputs)[:, length:]
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 3, 29])
def test_state_dict(kind, form, count):
    """A state goes through a file into a cache of another capacity."""
    inputs = inputs_of(60, B=2, documents=True, **KINDS[kind])
    options = dict(form=form, conv_channels=3, conv_width=3)
    cache, channels = cache_for(inputs, **options), torch.randn(2, 60, 3).double()
    if count:
        append(cache, tokens(inputs, 0, count), features=channels[:, :count])
    file = io.BytesIO()
    torch.save(cache.state_dict(), file)
    file.seek(0)
    loaded = cache_for(inputs, capacity=61, **options)
    buffers = {name: x.data_ptr() for name, x in loaded.tensors.items()}
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert buffers == {name: x.data_ptr() for name, x in loaded.tensors.items()}
    assert torch.equal(loaded.conv_history(), cache.conv_history())
    outs = []
    for i in range(count, 60):
        part = tokens(inputs, i, i + 1)
        outs.append(append(loaded, part, features=channels[:, i : i + 1]))
    assert_equal(torch.cat(outs, 1), whole(inputs)[:, count:])


def test_state_is_cut_to_the_tokens(form):
    """A state of few tokens does not carry the buffers of a large capacity."""
    inputs = inputs_of(9, gate=True)
    cache = cache_for(inputs, form=form, capacity=4096)
    appended(cache, inputs, [9])
    state = cache.state_dict()["tensors"]
    assert state["k"].shape[2] == 9 and state["starts"].shape[1] == 9
    assert cache.memory()["k"] == 4096 * 2 * 8 * 8
    assert cache.memory()["total"] == sum(
        n for name, n in cache.memory().items() if name != "total"
    )


@pytest.mark.parametrize("sizes", [[1] * 30, [17, 1, 9, 3], [2, 28]])
def test_convolution_in_parts(sizes):
    """The convolution of a token reads those before it, also across calls and after a rollback."""
    inputs, width = inputs_of(30, B=2), 4
    x, weight = torch.randn(2, 30, 5).double(), torch.randn(5, width).double()
    cache = cache_for(inputs, conv_channels=5, conv_width=width, rollback_window=2)
    outs, done = [], 0
    for size in sizes:
        at = slice(done, done + size)
        outs.append(causal_conv(x[:, at], weight, history=cache.conv_history()))
        append(cache, tokens(inputs, done, done + size), features=x[:, at])
        append(cache, tokens(inputs, 0, 2), features=torch.full((2, 2, 5), 7.0).double())
        cache.rollback(2)
        done += size
    assert_equal(torch.cat(outs, 1).unsqueeze(2), causal_conv(x, weight).unsqueeze(2))


def test_convolution_of_padded_rows():
    """A row's first tokens do not read the pads before them, whichever call they come in."""
    inputs, width = inputs_of(30, B=3), 4
    x, weight = torch.randn(3, 30, 5).double(), torch.randn(5, width).double()
    start = torch.tensor([0, 7, 9]).unsqueeze(-1)
    start = torch.where(torch.arange(30) >= start, start, 0).int()
    cache, outs = cache_for(inputs, conv_channels=5, conv_width=width), []
    assert cache.conv_start(2) is None
    for first, stop in ((0, 8), (8, 10), (10, 11), (11, 12), (12, 30)):
        given = start[:, first:stop] if first < 10 else None
        relative = cache.conv_start(stop - first, given)
        history = cache.conv_history()
        outs.append(causal_conv(x[:, first:stop], weight, relative, history))
        part = tokens(inputs, first, stop)._replace(document_start=given)
        append(cache, part, features=x[:, first:stop])
    assert_equal(torch.cat(outs, 1).unsqueeze(2), causal_conv(x, weight, start).unsqueeze(2))


def test_crop_needs_the_convolution_inputs():
    """A cut far back would let the convolution read tokens that were cut away."""
    inputs = inputs_of(64)
    cache = cache_for(inputs, form="paged", conv_channels=1, conv_width=3)
    append(cache, inputs, features=torch.randn(1, 64, 1).double())
    before = snapshot(cache)
    with pytest.raises(RollbackError, match="inputs before token 32 are gone"):
        cache.crop(32)
    assert_unchanged(cache, before)
    cache.crop(60)


def _wider(x):
    return x._replace(v=torch.cat([x.v, x.v], -1))


def _start_ahead(x):
    return x._replace(document_start=torch.full((2, 3), 99).int())


def _start_back(x):
    return x._replace(document_start=torch.full((2, 3), 8).int())


def _seven_times(x):
    return x.map(lambda y: y.repeat_interleave(7, 1))


REFUSED = {
    "another batch": (lambda x: rows_of(x, slice(1)), CacheMismatchError, r"= \(2, 4, 2, 8, 8\)"),
    "another width": (_wider, CacheMismatchError, r"have \(2, 4, 2, 8, 16\)"),
    "another dtype": (
        lambda x: x.map_floating(lambda y: y.float()),
        CacheMismatchError,
        "cache is for torch.float64",
    ),
    "no gate": (lambda x: x._replace(log_gate=None), CacheMismatchError, "with log_gate"),
    "no reflections": (lambda x: x._replace(w=None, beta=None), CacheMismatchError, "with w"),
    "w alone": (lambda x: x._replace(beta=None), ValueError, "must come together"),
    "a start ahead": (_start_ahead, ValueError, "got 99 at token 21 after 0"),
    "a start of the past": (_start_back, ValueError, "got 8 at token 21 after 9"),
    "a gate above one": (
        lambda x: x._replace(log_gate=x.log_gate + 30),
        ValueError,
        "log_gate must be finite and <= 0",
    ),
    "too many": (_seven_times, CapacityError, "room for 40 tokens and holds 21, got 21 more"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_tokens(case, form):
    """A refused call neither counts its tokens nor writes a part of them."""
    change, error, message = REFUSED[case]
    inputs = inputs_of(60, B=2, HQ=4, gate=True)
    cache = cache_for(inputs, form=form, capacity=40)
    appended(cache, inputs, [20])
    start = torch.full((2, 1), 9 if "past" in case else 0).int()
    append(cache, tokens(inputs, 20, 21)._replace(document_start=start))
    before = snapshot(cache)
    with pytest.raises(error, match=message):
        append(cache, change(tokens(inputs, 21, 24)))
    assert_unchanged(cache, before)
    if start.max() == 0:
        assert_equal(appended(cache, inputs, [1] * 19, start=21), whole(inputs)[:, 21:40])


def test_refused_changes(form):
    """Rollbacks, cuts and orders that cannot be are refused before anything is moved."""
    inputs = inputs_of(60, B=2, HQ=4, gate=True)
    cache = cache_for(inputs, form=form, capacity=64, conv_channels=2, conv_width=3)
    features = torch.randn(2, 60, 2).double()
    append(cache, tokens(inputs, 0, 22), features=features[:, :22])
    before = snapshot(cache)
    for call, error, message in (
        (lambda: cache.rollback(3), RollbackError, "between 0 and 2 tokens"),
        (lambda: cache.rollback(-1), RollbackError, "got -1"),
        (lambda: cache.crop(23), RollbackError, "between 0 and 22"),
        (lambda: cache.crop(19), RollbackError, "got length = 19"),
        (lambda: cache.reorder(torch.tensor([0, 2])), CacheMismatchError, r"in \[0, 2\)"),
        (lambda: cache.reorder(torch.tensor([0.0])), CacheMismatchError, "must be int64"),
        (lambda: cache.reorder(torch.tensor([0])), CapacityError, "static cache has 2 rows"),
        (lambda: cache.repeat(0), ValueError, "times must be at least 1"),
        (lambda: append(cache, tokens(inputs, 22, 23)), CacheMismatchError, "features must have"),
    ):
        with pytest.raises(error, match=message):
            call()
        assert_unchanged(cache, before)


def test_refused_states(form):
    """A state of another model, form, version or size is named and not loaded in part."""
    inputs = inputs_of(40, B=2, HQ=4, gate=True)
    cache = cache_for(inputs, form=form, capacity=32)
    appended(cache, inputs, [21])
    before, state = snapshot(cache), cache.state_dict()
    longer = cache_for(inputs, form=form)
    appended(longer, inputs, [40])
    spec = state["spec"]
    cut = {**state["tensors"], "v": state["tensors"]["v"][:, :, :-1]}
    for change, error, message in (
        ({"version": 9}, CacheMismatchError, "version 1, got 9"),
        ({"spec": {**spec, "heads": 4}}, CacheMismatchError, "heads = 2, the state has 4"),
        ({"spec": {**spec, "dtype": torch.float32}}, CacheMismatchError, "has torch.float32"),
        ({"tensors": cut}, CacheMismatchError, r"v of the state must be torch.float64 \[2, 2, 21"),
        ({"tensors": {}}, CacheMismatchError, "must hold"),
        (longer.state_dict(), CapacityError, "room for 32 tokens, the state has 40"),
    ):
        with pytest.raises(error, match=message):
            cache.load_state_dict({**state, **change})
        assert_unchanged(cache, before)
    with pytest.raises(CacheMismatchError, match="got"):
        cache.load_state_dict({"k": torch.zeros(1)})
    cache.load_state_dict(state)
    assert_unchanged(cache, before)


def test_refused_specs():
    """A spec names the number that cannot be."""
    good = CacheSpec(4, 2, 8, 8, torch.float32)
    for change, message in (
        (dict(form="ring"), "form must be one of"),
        (dict(dtype=torch.int32), "dtype must be one of"),
        (dict(heads=3), "heads must divide query_heads"),
        (dict(group=0), "group must be at least 1, got 0"),
        (dict(capacity=0), "capacity must be at least 1"),
        (dict(prune=-1.0), "prune must not be negative"),
        (dict(rollback_window=-1), "rollback_window must not be negative"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(good, **change)
    with pytest.raises(ValueError, match="rows must be at least 1"):
        PathCache(good, 0)


def test_reset_keeps_the_buffers(form):
    """A static cache is used again for the next prompt, at the same places."""
    inputs, other = (inputs_of(40, B=2, gate=True, documents=True, seed=i) for i in range(2))
    cache = cache_for(inputs, form=form, capacity=40)
    appended(cache, inputs, [33])
    buffers = {name: x.data_ptr() for name, x in cache.tensors.items()}
    cache.reset()
    assert_equal(appended(cache, other, [7] + [1] * 33), whole(other))
    assert buffers == {name: x.data_ptr() for name, x in cache.tensors.items()}


def test_options_of_the_operator():
    """scale and gate_scale act as in path_attention."""
    inputs = inputs_of(40, gate=True)
    options = dict(scale=0.2, gate_scale=0.35)
    cache = cache_for(inputs, **options)
    assert_equal(appended(cache, inputs, [20, *[1] * 20]), whole(inputs, **options))
