"""Decode from a cache equals the training forward: token by token, in chunks, after rollbacks."""

import pytest
import torch
from cache_checks import (
    KINDS,
    append,
    appended,
    assert_equal,
    cache_for,
    inputs_of,
    tokens,
    whole,
)

from path_backend import path_attention
from path_backend.inference import RollbackError

FORMS = ("dyadic", "paged")
T = 75  # closings and merges of 18 groups of 4, and an open rest


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_token_by_token(kind, form, dtype):
    """A token that joins the wrong group, or a block met in another frame, shows at its place."""
    inputs = inputs_of(T, B=2, dtype=dtype, **KINDS[kind])
    cache = cache_for(inputs, form=form)
    out = appended(cache, inputs, [1] * T)
    assert out.dtype == dtype
    assert_equal(out, whole(inputs), dtype)
    assert (cache.tokens, cache.closed, cache.open_tokens) == (T, T // 4, T % 4)
    assert cache.tensors["position"].tolist() == [T, T // 4]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("w", ["random", "constant"])
@pytest.mark.parametrize("beta", ["two", "one", "edge", "zero"])
def test_adversarial_beta(w, beta, form):
    """Singular products (beta 1) and reflections that almost cancel (parallel w, beta 2)."""
    for dtype in (torch.float64, torch.float32):
        inputs = inputs_of(T, w=w, beta=beta, dtype=dtype)
        cache = cache_for(inputs, form=form, group=8)
        assert_equal(appended(cache, inputs, [1] * T), whole(inputs), dtype)


SPLITS = [[T], [40, 35], [3, 61, 1, 10], [1, 17, 17, 17, 23], [20, 1, 1, 1, 16, 36], [5] * 15]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_prefill_in_chunks(kind, form, sizes):
    """Chunks of any sizes: their edges lie inside groups, at their ends, and over many of them."""
    inputs = inputs_of(T + 9, B=2, documents=True, **KINDS[kind])
    cache = cache_for(inputs, form=form)
    out = appended(cache, inputs, [*sizes, *[1] * 9])
    assert_equal(out, whole(inputs))


@pytest.mark.parametrize("window", [0, 3, 7])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(4))
def test_drafts_with_rollbacks(seed, form, window):
    """Rejected tokens of a draft leave nothing behind: in keys, products, gates or documents."""
    generator = torch.Generator().manual_seed(seed)

    def number(least, most):
        return int(torch.randint(least, most + 1, (), generator=generator))

    inputs = inputs_of(T, B=2, HQ=4, gate=True, documents=True, seed=seed)
    wrong = inputs_of(T, B=2, HQ=4, gate=True, seed=seed + 100)
    cache = cache_for(inputs, form=form, rollback_window=window)
    exact, done = whole(inputs), 0
    while done < T:
        size = min(number(1, 22), T - done)
        assert_equal(append(cache, tokens(inputs, done, done + size)), exact[:, done : done + size])
        done += size
        draft = tokens(wrong, 0, number(1, 9))._replace(document_start=None)
        append(cache, draft)
        rejected = draft.q.shape[1]
        if rejected <= max(window, cache.open_tokens):
            cache.rollback(rejected)
        else:  # the draft went into a closed group: what was before is appended anew
            with pytest.raises(RollbackError, match=f"got {rejected}"):
                cache.rollback(rejected)
            cache = cache_for(inputs, form=form, rollback_window=window)
            appended(cache, inputs, [done])
        assert cache.tokens == done


@pytest.mark.parametrize("form", FORMS)
def test_left_padding(form):
    """Rows of different lengths end together: what stands before a row's first token is unseen."""
    lengths, new = [30, 17, 1], 21
    rows = [inputs_of(length + new, HQ=4, gate=True, seed=i) for i, length in enumerate(lengths)]
    pads = torch.tensor([max(lengths) - length for length in lengths])
    joined = [
        torch.cat([torch.cat([x[:, :1].repeat_interleave(int(pad), 1), x], 1)
                   for x, pad in zip(column, pads, strict=True)])
        for column in zip(*(row.floating for row in rows), strict=True)
    ]  # fmt: skip
    inputs = type(rows[0])(*joined)
    place = torch.arange(max(lengths))
    start = torch.where(place >= pads.unsqueeze(-1), pads.unsqueeze(-1), 0).int()
    cache = cache_for(inputs, form=form)
    part = tokens(inputs, 0, max(lengths))._replace(document_start=start)
    first = append(cache, part)
    # No document_start from here on: that of a row's last token goes on.
    rest = appended(cache, inputs, [1] * 9 + [12], start=max(lengths))
    for i, (row, pad) in enumerate(zip(rows, pads, strict=True)):
        out = torch.cat([first, rest], 1)[i : i + 1, int(pad) :]
        assert_equal(out, whole(row))


def test_long_decode():
    """4,096 tokens with merges of up to 512 groups, in both forms; fp32 keeps its exactness."""
    for beta, w in (("two", "constant"), ("one", "random")):
        inputs = inputs_of(4096, HQ=1, H=1, D=16, beta=beta, w=w, gate=True, dtype=torch.float32)
        exact = whole(inputs)
        cache = cache_for(inputs, group=8)
        assert_equal(appended(cache, inputs, [1] * 4096), exact, torch.float32)


def test_key_dtype_of_bf16():
    """A cache of bf16 tokens errs at most 1.5 times as much as the training forward."""
    for beta, w in (("two", "constant"), ("random", "random"), ("one", "random")):
        inputs = inputs_of(700, HQ=2, H=1, D=64, beta=beta, w=w, dtype=torch.bfloat16)
        exact = whole(inputs)
        forward = inputs.call(path_attention, implementation="torch").double()
        cache = cache_for(inputs, group=8)
        out = appended(cache, inputs, [1] * 700).double()
        ratio = (out - exact).norm() / (forward - exact).norm()
        assert ratio <= 1.5, f"{w} w, beta {beta}: {ratio:.2f} times the forward's error"
