"""The kernels of a decode step against the training forward; in the interpreter without a GPU."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cache_checks import (
    KINDS,
    append,
    appended,
    assert_unchanged,
    cache_for,
    inputs_of,
    snapshot,
    tokens,
    whole,
)

from path_backend import path_attention
from path_backend.inference import CacheSpec, RollbackError

pytest.importorskip("triton")

from path_backend.kernels import decode_launch  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("uninitialized_memory_is_nan"),
    pytest.mark.filterwarnings("ignore:.*eterministic.*:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:(invalid value|divide by zero|All-NaN slice):RuntimeWarning"
    ),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# On the card the prefill's products have terms of 16 bits; the decode itself is fp32.
LIMIT = 1e-5 if DEVICE == "cpu" else 1e-3


def by_kernels(T, *, group=4, **case):
    """Inputs in fp32, and a cache that kernels decode from."""
    options = {n: case.pop(n) for n in ("capacity", "rollback_window") if n in case}
    inputs = inputs_of(T, dtype=torch.float32, device=DEVICE, **case)
    return inputs, cache_for(inputs, group=group, implementation="triton", **options)


def continued(cache, inputs, first):
    """Outputs of the tokens from `first` on, by kernels, after a prefill in plain torch."""
    cache.implementation = "torch"
    appended(cache, inputs, [first])
    cache.implementation = "triton"
    return appended(cache, inputs, [1] * (inputs.q.shape[1] - first), start=first)


def check(out, inputs, start=0):
    exact = whole(inputs)[:, start : start + out.shape[1]]
    error = (out.double() - exact).abs().amax((0, 2, 3))
    assert error.max() <= LIMIT, f"token {start + int(error.argmax())}: error {error.max():.2e}"


@pytest.mark.parametrize("kind", KINDS)
def test_token_by_token(kind):
    """Closings and merges by kernels: 6 groups, and a document that begins in each part."""
    inputs, cache = by_kernels(27, documents=True, **KINDS[kind])
    check(appended(cache, inputs, [1] * 27), inputs)
    assert cache.tensors["position"].tolist() == [27, 6] == [cache.tokens, cache.closed]


@pytest.mark.parametrize("kind", ["path_fox", "fox"])
def test_prefill_by_kernels(kind):
    """A prefill, a chunk and steps all by kernels, as on a card; blocks of one and two groups."""
    inputs, cache = by_kernels(205, group=64, documents=True, **{**KINDS[kind], "D": 16})
    check(appended(cache, inputs, [130, 70, 1, 1, 1, 1, 1]), inputs)


@pytest.mark.parametrize("beta, w", [("two", "constant"), ("one", "random")])
def test_adversarial_beta(beta, w):
    """Singular products and parallel reflections, where three levels merge at once."""
    inputs, cache = by_kernels(35, beta=beta, w=w, HQ=1, H=1)
    out = continued(cache, inputs, 29)
    assert cache.closed == 8
    check(out, inputs, 29)


@pytest.mark.parametrize("kind", ["path_fox", "fox"])
def test_splits_of_many_rows(kind, monkeypatch):
    """A split begins in one block and ends in the next; tiles are groups; rows are padded."""
    monkeypatch.setattr(decode_launch, "splits_for", lambda *_: 3)
    case = {**KINDS[kind], "HQ": 6, "H": 2, "D": 24, "DV": 40, "B": 2}
    inputs, cache = by_kernels(131, group=16, documents=True, **case)
    check(continued(cache, inputs, 126), inputs, 126)


def test_drafts_with_rollbacks():
    """Several tokens in one step, closings by torch behind a window, and rejected tokens."""
    inputs, cache = by_kernels(26, HQ=4, H=2, gate=True, rollback_window=3)
    wrong, _ = by_kernels(3, HQ=4, H=2, gate=True, seed=1)
    outs = []
    for start, stop in ((0, 1), (1, 4), (4, 11), (11, 12), (12, 18), (18, 26)):
        outs.append(append(cache, tokens(inputs, start, stop)))
        append(cache, wrong)
        cache.rollback(3)
    check(torch.cat(outs, 1), inputs)
    with pytest.raises(RollbackError):
        cache.rollback(8)


def test_torch_and_kernels_share_a_cache():
    """Each form leaves what the other needs, whoever closed the last group."""
    inputs, cache = by_kernels(31, HQ=2, H=1, gate=True, documents=True)
    outs = []
    for i, size in enumerate([1, 3, 2, 2, 3, 1, 4, 2, 6, 7]):
        cache.implementation = "triton" if i % 2 else "torch"
        start = cache.tokens
        outs.append(appended(cache, inputs, [1] * size, start=start))
    check(torch.cat(outs, 1), inputs)


def test_closing_that_is_launched_at_every_step(monkeypatch):
    """A captured step cannot know whether the group is full: the kernels find it out."""
    step = decode_launch.step

    def always(*arguments, closing, **options):
        return step(*arguments, closing=True, **options)

    monkeypatch.setattr(decode_launch, "step", always)
    inputs, cache = by_kernels(18, HQ=1, H=1, capacity=20)
    check(appended(cache, inputs, [1] * 18), inputs)


def test_no_room_on_the_device():
    """A replay too many, which no host counts, returns NaN and writes nothing."""
    inputs, cache = by_kernels(17, capacity=16, gate=True)
    appended(cache, inputs, [15, 1])
    cache.tokens, cache.closed = 0, 0
    before = snapshot(cache)
    assert append(cache, tokens(inputs, 16, 17)).isnan().all()
    cache.tokens -= 1
    assert_unchanged(cache, before)


@pytest.mark.parametrize("kind", ["path_fox", "fox"])
def test_pruning(kind):
    """Groups that gates hide are not read: NaN in their values stays unseen. One group nearer, and
    the NaN is seen; without pruning any is. What is left out is less than the margin allows.
    """
    margin, T = 3.0, 45
    inputs, cache = by_kernels(T, HQ=2, H=1, gate=True, w=None if kind == "fox" else "random")
    cache.spec = dataclasses.replace(cache.spec, prune=margin)
    inputs = inputs._replace(log_gate=torch.full_like(inputs.log_gate, -0.9))
    continued(cache, tokens(inputs, 0, T - 1), T - 2)
    last = tokens(inputs, T - 1, T)
    scale, k = 8**-0.5, inputs.k[0, :, 0]
    q = last.q[0, 0]
    most = q.norm(dim=-1) * k.norm(dim=-1).max() * scale
    slack = (q @ k[-1] * scale - most - math.log(T) - margin).min().item()
    ends = torch.arange(1, cache.closed + 1) * cache.spec.group
    hidden = int((-0.9 * (T - ends) <= slack).sum())
    assert 0 < hidden < cache.closed
    places = hidden * cache.spec.group
    unseen = cache.fork()
    unseen.tensors["v"][:, :, :places] = torch.nan
    out, exact = append(unseen, last).double(), whole(inputs)[:, -1:]
    assert (out - exact).abs().max() <= 2 * math.exp(-margin) * inputs.v.abs().max()
    for spec, count in ((cache.spec, places + 1), (dataclasses.replace(cache.spec, prune=None), 1)):
        seen = cache.fork()
        seen.spec = spec
        seen.tensors["v"][:, :, count - 1] = torch.nan
        assert append(seen, last).isnan().any()


def test_half_precision():
    """fp16 tokens: an error at most 1.5 times that of the training forward."""
    inputs = inputs_of(60, HQ=2, H=1, D=32, dtype=torch.float16, device=DEVICE)
    forward = inputs.call(path_attention, implementation="torch")[:, 50:].double()
    cache = cache_for(inputs, implementation="triton")
    out, exact = continued(cache, inputs, 50).double(), whole(inputs)[:, 50:]
    assert (out - exact).norm() <= 1.5 * (forward - exact).norm()


def test_what_the_kernels_do_not_decode(monkeypatch):
    """ "triton" says why; "auto" falls back to plain torch."""
    for change, message in (
        (dict(form="paged"), "they know dyadic"),
        (dict(dtype=torch.float64), "float64 is not"),
        (dict(head_dim=256), "a head is 256 wide"),
        (dict(query_heads=66), "33 query heads share"),
    ):
        fields = dict(query_heads=2, heads=2, head_dim=8, value_dim=8, dtype=torch.float32)
        spec = CacheSpec(**{**fields, **change})
        assert message in decode_launch.unsupported_reason(spec, torch.device(DEVICE))
    spec = CacheSpec(2, 2, 8, 8, torch.float32)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    reason = decode_launch.unsupported_reason(spec, torch.device("cpu"))
    assert "need CUDA, or TRITON_INTERPRET=1" in reason
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec = dataclasses.replace(spec, dtype=torch.bfloat16)
    assert "bfloat16 wrongly" in decode_launch.unsupported_reason(spec, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert "8.0 or newer" in decode_launch.unsupported_reason(spec, torch.device("cuda"))
    monkeypatch.undo()
    inputs = inputs_of(3, dtype=torch.float32, device=DEVICE)
    cache = cache_for(inputs, form="paged", implementation="triton")
    before = snapshot(cache)
    with pytest.raises(NotImplementedError, match="they know dyadic"):
        append(cache, tokens(inputs, 0, 1))
    assert_unchanged(cache, before)


def test_full_group_that_no_step_closed(monkeypatch):
    """A graph captured without closing, replayed when it must close: NaN, and nothing is lost."""
    step = decode_launch.step

    def never(*arguments, closing, **options):
        return step(*arguments, closing=False, **options)

    inputs, cache = by_kernels(6, capacity=16, gate=True)
    appended(cache, inputs, [3])
    assert cache.fills_group
    with monkeypatch.context() as patch:
        patch.setattr(decode_launch, "step", never)
        append(cache, tokens(inputs, 3, 4))
        cache.closed -= 1
        cache.tokens -= 1  # so that the host lets a step pass
        before = snapshot(cache)
        assert append(cache, tokens(inputs, 4, 5)).isnan().all()
    cache.tokens, cache.closed = before[0][:2]
    assert_unchanged(cache, before)
    assert cache.tensors["position"].tolist() == [4, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_holds_a_step(kind):
    """Replays go on across closings and merges, and without the host."""
    inputs = inputs_of(
        400, HQ=8, H=2, D=64, dtype=torch.bfloat16, device=DEVICE, gate=kind == "path_fox"
    )
    if kind in ("fox", "nope"):
        inputs = inputs._replace(w=None, beta=None)
    cache = cache_for(inputs, group=64, capacity=448)
    first = 100
    appended(cache, inputs, [first])
    part = tokens(inputs, first, first + 1).map(torch.clone)
    warm = cache.fork()
    for _ in range(64):
        append(warm, part)
    graphs = {}
    for cache.closes_in_graph in (False, True):
        graph = graphs[cache.closes_in_graph] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = append(cache, part)
        graphs[graph] = out
    outs = []
    for i in range(first, 400):
        for place, x in zip(part, tokens(inputs, i, i + 1), strict=True):
            if place is not None:
                place.copy_(x)
        cache.check_room(1)
        graph = graphs[cache.fills_group or i % 2 == 0]
        graph.replay()
        cache.replayed()
        outs.append(graphs[graph].clone())
    exact = whole(inputs)[:, first:]
    forward = inputs.call(path_attention).double()[:, first:]
    error = (torch.cat(outs, 1).double() - exact).norm()
    assert error <= 1.5 * (forward - exact).norm()
    assert cache.tensors["position"].tolist() == [cache.tokens, cache.closed]


@pytest.mark.parametrize("capability", ["89", "90"])
@pytest.mark.parametrize("case", [dict(dtype="bfloat16"), dict(dtype="float32")], ids=str)
def test_a_card_takes_the_kernels(case, capability, tmp_path):
    """Catches what the interpreter lets pass, and a launch that small cards refuse."""
    case = dict(gate=True, documents=True, n=decode_launch.MAX_ROWS // 4, **case)  # HQ / H = 4
    sizes = numbers_for_card(capability, tmp_path=tmp_path, **case)
    assert len(sizes) == (7 if case["dtype"] == "bfloat16" else 6)
    assert not {name: size for name, size in sizes.items() if size > 99}


def test_steps_share_their_kernels(tmp_path):
    """Catches a kernel compiled anew for other numbers of tokens or rows, or another capacity."""
    case = dict(dtype="bfloat16", gate=True)
    versions = numbers_for_card("90", "--versions", tmp_path=tmp_path, **case)
    assert versions.keys() and set(versions.values()) == {1}


def numbers_for_card(capability, *options, tmp_path, **case):
    """{kernel: number} as compile_decode.py prints them."""
    script = Path(__file__).with_name("compile_decode.py")
    root = script.parents[2]
    done = subprocess.run(
        [sys.executable, str(script), capability, json.dumps(case), *options],
        env={**os.environ, "PYTHONPATH": str(root), "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: float(number) for name, number in map(str.split, done.stdout.splitlines())}


def test_splits_fill_the_card():
    """A second wave of a few programs would take as long as a full one."""
    assert [decode_launch.splits_for(pairs, 8192, 132) for pairs in (8, 64, 512)] == [31, 4, 1]
    assert decode_launch.splits_for(8, 1024, 132) == 4
    assert decode_launch.splits_for(3, 16, 132) == 1
