"""Decode from a cache: its exactness, time per step, prefill and drift, as CSV.

    python -m path_backend.benchmarks.decode > results.csv
    python -m path_backend.benchmarks.decode --check --speed
    python -m path_backend.benchmarks.decode --drift --device cpu --drift-tokens 4096

check: outputs of a prefill, steps and a chunk against fp64, beside the error of the training
forward; a ratio above 1.5 ends the run with exit status 1.

speed: a step of one layer in a CUDA graph of 64 steps: one closes its group and merges as many
blocks as there are, whose time is spread over the 64. Several layers take turns where one would
fit into the L2 cache. Peers: the same kernels without reflections ("plain"), SDPA of torch, and the
paper's update of all keys in place before a plain step.

drift: a cache in bf16 through many steps beside keys that are multiplied by H_t in place and
rounded to bf16 at every token. Errors are those of the last 64 outputs against the definition, in
fp64.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from path_backend.arguments import Inputs
from path_backend.attention import path_attention
from path_backend.benchmarks.provenance import preamble
from path_backend.beta import beta_from_logits
from path_backend.inference import CacheSpec, PathCache
from path_backend.inference.closed import ends
from path_backend.testing import relative_error

Rows = Iterator[Sequence[Any]]
"""The first is the header."""

DTYPE = torch.bfloat16
STEPS = 64  # of a graph: one group
CACHED_BYTES = 400 * 2**20  # several times the L2 cache
LIMIT = 1.5  # times the error of the training forward
KINDS = {"path": (True, False), "path_fox": (True, True), "plain": (False, False)}
HARD = ("random w, random beta", "nearly constant w, beta 2", "random w, beta 1")


def draw(
    args: argparse.Namespace, B: int, T: int, case: str = HARD[0], gate: bool = False
) -> Inputs:
    """Inputs in bf16; beta is clipped as the layer does."""
    generator = torch.Generator(args.device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=args.device, generator=generator)

    (HQ, H), D = args.heads, args.width
    q, k, v = (normal(B, T, heads, D).to(DTYPE) for heads in (HQ, H, H))
    w = normal(B, T, H, D)
    if case.startswith("nearly"):
        w = normal(B, 1, H, D) + 0.01 * w
    w = F.normalize(w, dim=-1).to(DTYPE)
    logits = {"2": 30.0, "1": 0.0}.get(case[-1])
    beta, _ = beta_from_logits(
        normal(B, T, H) if logits is None else w.new_full((B, T, H), logits).float(), w
    )
    log_gate = F.logsigmoid(normal(B, T, HQ) + 3) if gate else None
    return Inputs(q, k, v, w, beta, log_gate)


def make_cache(args: argparse.Namespace, B: int, kind: str, **options: Any) -> PathCache:
    """An empty cache."""
    reflections, gate = KINDS[kind]
    (HQ, H), D = args.heads, args.width
    spec = CacheSpec(
        HQ, H, D, D, DTYPE, reflections=reflections, forget_gate=gate, **options
    )  # fmt: skip
    return PathCache(spec, B, device=args.device)


def part(inputs: Inputs, start: int, stop: int, kind: str) -> Inputs:
    """Some tokens, as a cache of the kind takes them."""
    reflections, gate = KINDS[kind]
    if not reflections:
        inputs = inputs._replace(w=None, beta=None)
    if not gate:
        inputs = inputs._replace(log_gate=None)
    return inputs.map(lambda x: x[:, start:stop].contiguous())


def attend(cache: PathCache, inputs: Inputs) -> Tensor:
    """The step."""
    return inputs.call(cache.attend)


def check_table(args: argparse.Namespace) -> Rows:
    """Errors against fp64 of all calls of a cache; fails above LIMIT."""
    yield "kind,inputs,tokens,cache_error,forward_error,ratio".split(",")
    T, wrong = args.check_tokens, []
    first, last = T * 3 // 5, T * 9 // 10
    for kind in KINDS:
        for case in HARD if KINDS[kind][0] else HARD[:1]:
            inputs = part(draw(args, 2, T, case, gate=True), 0, T, kind)
            exact = inputs.map_floating(Tensor.double).call(path_attention, implementation="torch")
            forward = relative_error(inputs.call(path_attention), exact)
            cache = make_cache(args, 2, kind)
            outs = [attend(cache, part(inputs, 0, first, kind))]
            outs += [attend(cache, part(inputs, i, i + 1, kind)) for i in range(first, last)]
            outs += [attend(cache, part(inputs, last, T, kind))]
            error = relative_error(torch.cat(outs, 1), exact)
            wrong += [(kind, case)] if not error <= LIMIT * forward else []
            yield kind, case, T, f"{error:.2e}", f"{forward:.2e}", f"{error / forward:.3f}"
    if wrong:
        raise SystemExit(f"expected at most {LIMIT} times the forward's error, not so: {wrong}")


def seconds(function: Callable[[], Any], repeats: int = 5) -> float:
    """The median of a few calls, by events of the device."""
    times = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times[1:])[repeats // 2]


def captured(function: Callable[[], Any]) -> Callable[[], None]:
    """The call as a CUDA graph; it must have run before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def copy_rate() -> float:
    """Bytes per second, read and written, of a copy of 4 GiB."""
    x = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() / seconds(lambda: y.copy_(x))


def filled(args: argparse.Namespace, B: int, kind: str, tokens: int) -> PathCache:
    """A cache with random tokens, `STEPS` less than `tokens`, that a prefill did not compute."""
    cache = make_cache(args, B, kind, capacity=tokens + STEPS)
    t = cache.tensors
    t["k"].normal_()
    t["v"].normal_()
    if "product" in t:
        w = F.normalize(torch.randn(64, args.width, device=args.device), dim=-1)
        product = ends(w, w, torch.full_like(w[:, 0], 1.5))[1]
        t["product"].copy_(product)
        t["suffix"].copy_(product)
    return cache


def step_seconds(caches: list[PathCache], one: Inputs, start: Tensor, steps: int) -> float:
    """Seconds of a step of one cache, in a graph of so many of all."""

    def run() -> None:
        for cache in caches:
            cache.tensors["position"].copy_(start)
        for i in range(steps):
            for cache in caches:
                cache.closes_in_graph = i + 1 == STEPS
                attend(cache, one)

    numbers = start.cpu()
    for cache in caches:
        cache.tokens, cache.closed = numbers.tolist()
    run()  # compiles
    for cache in caches:
        cache.tokens, cache.closed = numbers.tolist()
    return seconds(captured(run)) / steps / len(caches)


def bytes_moved(cache: PathCache, tokens: int) -> tuple[float, float]:
    """Bytes of keys and values, and of all else, that a step reads and writes on average."""
    spec, B = cache.spec, cache.rows
    pairs, D, closed = B * spec.heads, spec.head_dim, tokens // spec.group
    both = pairs * tokens * (D + spec.value_dim) * 2
    rest = 0
    if spec.reflections:
        products = closed.bit_count() - 1 + 2  # suffixes; P_open is read and written
        rest = pairs * (products * D * D * 4 + spec.group * D * 4)
    else:
        rest = pairs * spec.group * D * 4
    if spec.forget_gate:
        rest += B * spec.query_heads * tokens * 4
    return both, rest


SPEED_HEADER = (
    "kind,B,context,layers,us_step,us_between_closings,kv_gb,other_gb,tb_per_s,of_copy,"
    "ratio_to_plain,note"
).split(",")


def speed_table(args: argparse.Namespace) -> Rows:
    """Time per step, bytes, and the ratio to a plain step on as many keys and values."""
    yield SPEED_HEADER
    rate = copy_rate()
    yield ["copy", "", "", "", "", "", "", "", f"{rate / 1e12:.2f}", "1.000", "", ""]
    for context in args.contexts:
        for B in args.batches:
            plain = None
            for kind in ("plain", "path", "path_fox", "sdpa", "in_place"):
                try:
                    row, us = speed_row(args, kind, B, context, rate, plain)
                except (RuntimeError, torch.AcceleratorError) as error:
                    row, us = [kind, B, context, *[""] * 8, _line(error)], None
                plain = us if kind == "plain" else plain
                yield row
                torch.cuda.empty_cache()


def speed_row(
    args: argparse.Namespace, kind: str, B: int, context: int, rate: float, plain: float | None
) -> tuple[list[Any], float]:
    """A row of the table, and its time."""
    size = B * args.heads[1] * context * args.width * 4
    layers = max(1, -(-CACHED_BYTES // size))
    one = draw(args, B, 1, gate=True)
    between: Any = ""
    both, rest = float(size), 0.0
    if kind in KINDS:
        one = part(one, 0, 1, kind)
        caches = [filled(args, B, kind, context) for _ in range(layers)]
        tokens = context - STEPS
        start = torch.tensor([tokens, tokens // STEPS], device=args.device)
        both, rest = bytes_moved(caches[0], tokens)
        between = step_seconds(caches, one, start, STEPS // 2)
        time = step_seconds(caches, one, start, STEPS)
    else:
        time = peer_seconds(args, kind, B, context, layers, one)
        if kind == "in_place":  # keys are written too, before they are read again
            rest = size
            time += plain or float("nan")
    total = both + rest
    us = "" if between == "" else f"{between * 1e6:.1f}"
    ratio = "" if plain is None else f"{time / plain:.3f}"
    ratio = "1.000" if kind == "plain" else ratio
    speed = total / time
    cells = [f"{both / 1e9:.3f}", f"{rest / 1e9:.3f}", f"{speed / 1e12:.2f}", f"{speed / rate:.3f}"]
    return [kind, B, context, layers, f"{time * 1e6:.1f}", us, *cells, ratio, ""], time


def peer_seconds(
    args: argparse.Namespace, kind: str, B: int, context: int, layers: int, one: Inputs
) -> float:
    """Seconds of SDPA, or of the paper's update of all keys (without the attention after it)."""
    shape = (B, args.heads[1], context, args.width)
    pairs = [torch.randn(2, *shape, dtype=DTYPE, device=args.device) for _ in range(layers)]
    q = one.q.transpose(1, 2)
    if kind == "sdpa":

        def run() -> None:
            for k, v in pairs:
                F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    else:
        assert one.w is not None and one.beta is not None
        w, beta = one.w.transpose(1, 2).float(), one.beta.mT.unsqueeze(-1)
        update = torch.compile(in_place_update, dynamic=True)

        def run() -> None:
            for k, _ in pairs:
                update(k, w, beta)

    run()
    return seconds(captured(run)) / layers


def in_place_update(k: Tensor, w: Tensor, beta: Tensor) -> None:
    """k <- H k for all keys [B, H, T, D], rounded to their dtype; w [B, H, 1, D]."""
    x = k.float()
    k.copy_(x - beta * (x * w).sum(-1, keepdim=True) * w)


def prefill_table(args: argparse.Namespace) -> Rows:
    """Time of a prefill, in one call and in four, beside the training forward."""
    yield "kind,B,T,calls,ms,ratio_to_forward".split(",")
    T = args.prefill_tokens
    for kind in KINDS:
        inputs = part(draw(args, 1, T, gate=True), 0, T, kind)
        cache = make_cache(args, 1, kind, capacity=T)
        forward = seconds(lambda x=inputs: x.call(path_attention))  # type: ignore[misc]
        yield kind, 1, T, "forward", f"{forward * 1e3:.3f}", "1.000"
        for calls in (1, 4):
            parts = [part(inputs, i * T // calls, (i + 1) * T // calls, kind) for i in range(calls)]

            def run(cache: PathCache = cache, parts: list[Inputs] = parts) -> None:
                cache.reset()
                for x in parts:
                    attend(cache, x)

            time = seconds(run)
            yield kind, 1, T, calls, f"{time * 1e3:.3f}", f"{time / forward:.3f}"


def drift_table(args: argparse.Namespace) -> Rows:
    """Errors of the outputs at 1,024, 4,096, 16,384, ... tokens."""
    yield "inputs,tokens,cache_error,in_place_error,forward_error".split(",")
    total = args.drift_tokens
    marks = [total >> shift for shift in (6, 4, 2, 0) if total >> shift >= 64]
    for case in HARD[:2]:
        inputs = draw(args, 1, total, case)
        cache = make_cache(args, 1, "path", capacity=total)
        keys = torch.zeros_like(inputs.k.transpose(1, 2))
        outs: list[Tensor] = []
        others: list[Tensor] = []
        for i in range(total):
            one = part(inputs, i, i + 1, "path")
            outs = [*outs[-63:], attend(cache, one)]
            others = [
                *others[-63:],
                _step_in_place(keys, one, inputs.v, i, i + 64 >= total or _near(i, marks)),
            ]
            if i + 1 in marks:
                exact = last_outputs(inputs.map(lambda x, n=i + 1: x[:, :n]), 64)  # type: ignore[misc]
                errors = [relative_error(torch.cat(x, 1), exact) for x in (outs, others)]
                forward = part(inputs, 0, i + 1, "path").call(path_attention)[:, -64:]
                errors.append(relative_error(forward, exact))
                yield case, i + 1, *(f"{x:.2e}" for x in errors)


def _near(i: int, marks: Sequence[int]) -> bool:
    return any(0 < mark - i <= 64 for mark in marks)


def _step_in_place(keys: Tensor, one: Inputs, v: Tensor, i: int, output: bool) -> Tensor:
    """The paper's step: all keys are moved in bf16. The output, where it is asked for, is rounded
    once.
    """
    assert one.w is not None and one.beta is not None
    if i:
        in_place_update(keys[:, :, :i], one.w.transpose(1, 2).float(), one.beta.mT.unsqueeze(-1))
    keys[:, :, i] = one.k[:, 0]
    if not output:
        return one.q
    H = keys.shape[1]
    q = one.q.double().unflatten(2, (H, -1)).squeeze(1)
    p = (q @ keys[:, :, : i + 1].double().mT * q.shape[-1] ** -0.5).softmax(-1)
    out = p @ v[:, : i + 1].transpose(1, 2).double()
    return out.flatten(1, 2).unsqueeze(1).to(one.q.dtype)


def last_outputs(inputs: Inputs, count: int) -> Tensor:
    """The definition's outputs of the last tokens, fp64 [B, count, HQ, D]: queries walk from the
    last token to the first and meet every key on their way.
    """
    assert inputs.w is not None and inputs.beta is not None
    T, H, scale = inputs.q.shape[1], inputs.k.shape[2], inputs.q.shape[-1] ** -0.5
    k, v, w = (x.double().transpose(1, 2) for x in (inputs.k, inputs.v, inputs.w))
    beta = inputs.beta.double().mT
    q = inputs.q[:, T - count :].double().unflatten(2, (H, -1)).permute(0, 2, 3, 1, 4)
    x = torch.zeros_like(q)  # [B, H, R, count, D]
    logits = q.new_full((*q.shape[:-1], T), float("-inf"))
    for j in reversed(range(T)):
        place = max(0, j - (T - count))
        if j >= T - count:
            x[..., place, :] = q[..., place, :]
        logits[..., place:, j] = (x[..., place:, :] @ k[:, :, j, None, :, None]).squeeze(-1)
        w_j = w[:, :, j, None, None, :]
        x = x - beta[:, :, j, None, None, None] * (x * w_j).sum(-1, keepdim=True) * w_j
    out = (logits * scale).softmax(-1) @ v.unsqueeze(2)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


TABLES: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "check": check_table,
    "speed": speed_table,
    "prefill": prefill_table,
    "drift": drift_table,
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m path_backend.benchmarks.decode",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    for name, table in TABLES.items():
        add(f"--{name}", action="store_true", help=(table.__doc__ or "").strip())
    add("--batches", nargs="+", type=int, default=[1, 8, 64], metavar="B")
    add("--contexts", nargs="+", type=int, default=[8192, 32768, 131072], metavar="T")
    add("--heads", nargs=2, type=int, default=[32, 8], metavar=("HQ", "H"))
    add("--width", type=int, default=128, metavar="D")
    add("--check-tokens", type=int, default=1500, metavar="T")
    add("--prefill-tokens", type=int, default=32768, metavar="T")
    add("--drift-tokens", type=int, default=65536, metavar="T")
    add("--device", default="cuda")
    args = parser.parse_args(argv)
    args.tables = [name for name in TABLES if getattr(args, name)] or list(TABLES)
    needs = {"speed", "prefill"} & set(args.tables)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("expected a CUDA device, found none: --device cpu for --check and --drift")
    if args.device != "cuda" and needs:
        parser.error(f"expected --device cuda for {sorted(needs)}, got {args.device}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    for line in preamble(__spec__.name):
        print(f"# {line}")
    writer = csv.writer(sys.stdout, lineterminator="\n")
    for name in args.tables:
        print(flush=True)
        for row in TABLES[name](args):
            writer.writerow(row)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
