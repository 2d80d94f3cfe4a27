"""Context parallelism on the GPUs of one host beside one GPU: time, memory, communication.

    torchrun --nproc_per_node 8 -m path_backend.benchmarks.context_parallel > results.csv

Rows come from rank 0 as they are measured. A time is that of the slowest rank, the median of
`--rep` runs; "both" is forward + backward with all gradients. Communication is exposed while a
rank's collectives run and none of its other kernels does; that, and the time in collectives, is the
mean of the ranks in one profiled run. Peak memory is what forward + backward add to the inputs, on
the rank that needs most. Bytes are those that a rank sends in both directions, counted and by the
formula (`bytes_sent`). A row of 1 rank is `path_attention` on one GPU, the others idle; it is the
only one of a run on one rank, and `--single` takes it from the output of an earlier run.
`norms` are those of out and of every gradient over all tokens, with q for d(out), and `difference`
is the largest relative one to the row of 1 rank: numbers that say whether a row computed the same.

A rank that fails, out of memory for one, ends the run: methods that need least come first, and
`--attention`, `--lengths` and `--method` ask for the rest.
Without a GPU ranks meet by gloo and run the torch form: bytes are then what a row is good for.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from path_backend.arguments import Inputs
from path_backend.attention import context_parallel_attention, path_attention
from path_backend.benchmarks.operator import Shape, draw, head_pair
from path_backend.benchmarks.provenance import disable_multicast, preamble
from path_backend.context_parallel.collectives import GroupTransport
from path_backend.context_parallel.layout import Layout
from path_backend.testing import as_leaves

HEADER = (
    "attention,method,ranks,B,T,HQ,H,D,forward_ms,both_ms,speedup,efficiency,exposed_ms,"
    "collectives_ms,peak_gib,sent_mb,formula_mb,difference,norms"
)
METHODS = ("ring", "heads", "allgather")
"""In the order of the memory that they need."""
ATTENTIONS = {"path": ("log_gate",), "path_fox": (), "fox": ("w", "beta")}
"""Inputs that each attention leaves out."""

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
NAN = float("nan")

Step = Callable[[], Sequence[Tensor]]


class Case(NamedTuple):
    attention: str
    shape: Shape


class Row(NamedTuple):
    """Holds the measurements of a case; nan where a machine without a GPU cannot tell."""

    method: str
    ranks: int
    forward_ms: float
    both_ms: float
    exposed_ms: float
    collectives_ms: float
    peak_gib: float
    sent_mb: float
    formula_mb: float
    norms: tuple[float, ...]


class Single(NamedTuple):
    """Holds the result with which rows of more ranks are compared."""

    both_ms: float
    norms: tuple[float, ...]


def main() -> None:
    args = parse(sys.argv[1:])
    disable_multicast()
    dist.init_process_group("nccl" if GPU else "gloo")
    if GPU:
        ranks, gpus = dist.get_world_size(), torch.cuda.device_count()
        if ranks > gpus:
            raise ValueError(f"every rank needs a GPU, got {ranks} ranks and {gpus} GPUs")
        torch.cuda.set_device(dist.get_rank())
    report(args)
    dist.barrier()
    dist.destroy_process_group()


def report(args: argparse.Namespace) -> None:
    """Measures every case; rank 0 prints. All ranks of the default group must call."""
    first = dist.get_rank() == 0
    HQ, H = args.heads
    cases = [Case(x, Shape(1, T, HQ, H, args.width)) for T in args.lengths for x in args.attention]
    known = read_single(args.single, cases) if args.single else {}
    notes = check(args, dist.get_world_size())
    if args.single:
        notes.append(f"single: {args.single}, {origin(args.single)}")
    if first:
        lines = [*preamble(__spec__.name), *notes]
        print(*(f"# {line}" for line in lines), HEADER, sep="\n", flush=True)
    for case in cases:
        if case.shape.T != args.lengths[0]:
            args.warmup = min(args.warmup, 1)  # the kernels are compiled
        single = known.get(case)
        for row in measure(case, args):
            single = Single(row.both_ms, row.norms) if row.ranks == 1 else single
            if first:
                print_row(case, row, single)


def check(args: argparse.Namespace, ranks: int) -> list[str]:
    """Refuses lengths and heads that the ranks cannot share; leaves out a method, and says so."""
    segments = 2 * ranks if ranks > 1 else 1
    for T in args.lengths:
        if T < 1 or T % segments:
            raise ValueError(f"--lengths must be multiples of {segments} on {ranks} ranks, got {T}")
    _, H = args.heads
    if ranks == 1 or H % ranks == 0 or "heads" not in args.method:
        return []
    reason = f"--method heads needs key/value heads that {ranks} ranks divide, got {H}"
    args.method = [method for method in args.method if method != "heads"]
    if not args.method:
        raise ValueError(reason)
    return [f"left out: {reason}"]


def measure(case: Case, args: argparse.Namespace) -> Iterator[Row]:
    """The rows of a case."""
    absent: dict[str, Any] = dict.fromkeys(ATTENTIONS[case.attention])
    inputs = draw(case.shape, DEVICE)._replace(**absent)
    ranks = dist.get_world_size()
    if args.measure_single and not args.single:
        steps = steps_of(inputs, path_attention) if dist.get_rank() == 0 else None
        yield clock("", 1, steps, args)
        del steps
        empty_cache()
    if ranks == 1:
        return
    layout = Layout.head_tail(ranks, case.shape.T // (2 * ranks))
    local = inputs.map_floating(lambda x: take(x, layout))
    del inputs
    for method in args.method:
        options = {"layout": layout, "group": dist.group.WORLD, "exchange": method}
        steps = steps_of(local, context_parallel_attention, **options)
        formula = sum(bytes_sent(local, ranks, segments=2, method=method))
        yield clock(method, ranks, steps, args)._replace(formula_mb=formula / 1e6)
        del steps
        empty_cache()


def take(x: Tensor, layout: Layout) -> Tensor:
    """This rank's tokens of [B, T, ...]."""
    starts = layout.starts[dist.get_rank()]
    return torch.cat([x[:, start : start + layout.length] for start in starts], dim=1)


def bytes_sent(x: Inputs, ranks: int, segments: int, method: str) -> tuple[int, int]:
    """Bytes that a rank sends forward and backward, by the formula of PARALLELISM.md.

    x: a rank's inputs, not in fp64; segments: how many of the sequence a rank holds.
    """
    (B, T, HQ, D), (H, DV), b = x.q.shape, x.v.shape[2:], x.q.element_size()
    n, reflections, gate = B * T, x.w is not None, x.log_gate is not None
    if method == "heads":
        moved = (HQ * D + H * (D + DV)) * b + reflections * H * (D * b + 4) + gate * 4 * HQ
        results = HQ * (4 + DV * b)
        mask = 0 if x.document_start is None else (ranks - 1) * 4 * n
        share = (ranks - 1) * n
        forward, backward = moved + results, 2 * moved + results + HQ * DV * b
        return share * forward // ranks + mask, share * backward // ranks + mask
    a = n * (H * (D + DV) * b + gate * 4 * HQ)
    g = 4 * n * (H * (D + DV) + gate * HQ)
    m = B * segments * (reflections * 4 * H * D**2 + gate * 8 * HQ)
    return (ranks - 1) * (a + m), (ranks - 1) * (a + g + 2 * m)


def steps_of(inputs: Inputs, function: Callable[..., Tensor], **options: Any) -> tuple[Step, Step]:
    """Forward alone without autograd, and forward + backward. Norms of out and gradients, over all
    ranks, do not depend on how many these are."""
    inputs = as_leaves(inputs)
    leaves = list(inputs.differentiable().values())

    def forward() -> Sequence[Tensor]:
        with torch.no_grad():
            return [inputs.call(function, **options)]

    d_out = inputs.q.detach()  # values are as wide
    return forward, lambda: torch.autograd.grad(inputs.call(function, **options), leaves, d_out)


def clock(
    method: str, ranks: int, steps: tuple[Step, Step] | None, args: argparse.Namespace
) -> Row:
    """The row of two steps. Every rank calls; one without steps waits."""
    forward, both = steps or (tuple, tuple)
    forward_ms, out = timed(forward, args.rep, args.warmup)
    squares = squares_of(out)
    del out
    before, sent = allocated(), GroupTransport.sent
    both_ms, grads = timed(both, args.rep, args.warmup)
    sent = (GroupTransport.sent - sent) // (args.rep + args.warmup)
    peak = (allocated(peak=True) - before) / 2**30
    squares += squares_of(grads)
    del grads
    communication = communication_of(both) if ranks > 1 else (0.0, 0.0)
    peak, sent_mb = over_ranks([peak, sent / 1e6], dist.ReduceOp.MAX)
    sums = over_ranks([*communication], dist.ReduceOp.SUM)
    alone, collectives = (x / dist.get_world_size() for x in sums)
    squares = over_ranks(squares, dist.ReduceOp.SUM) if ranks > 1 else squares
    norms = tuple(x**0.5 for x in squares)
    numbers = (forward_ms, both_ms, alone, collectives, peak, sent_mb)
    return Row(method, ranks, *numbers, formula_mb=0.0, norms=norms)


def timed(step: Step, repetitions: int, warmup: int) -> tuple[float, Sequence[Tensor]]:
    """Median over the runs of the slowest rank's time, in ms, and what the last run returned.
    Its peak memory stays."""
    times = []
    for i in range(warmup + repetitions):
        result: Sequence[Tensor] = ()  # the last run's must not add to the memory of this one
        dist.barrier()
        synchronize()
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        result = step()
        synchronize()
        (slowest,) = over_ranks([1e3 * (time.perf_counter() - begin)], dist.ReduceOp.MAX)
        if i >= warmup:
            times.append(slowest)
    return statistics.median(times), result


def squares_of(tensors: Sequence[Tensor]) -> list[float]:
    """The squared norm of each."""
    return [float(torch.linalg.vector_norm(x, dtype=torch.float32)) ** 2 for x in tensors]


def largest_difference(numbers: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative one; nan if any is."""
    x, y = (torch.tensor(values, dtype=torch.float64) for values in (numbers, expected))
    return float(((x - y).abs() / y.abs()).max())


def over_ranks(numbers: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
    """The sum or maximum of each number over all ranks."""
    total = torch.tensor(numbers, dtype=torch.float64, device=DEVICE)
    dist.all_reduce(total, op=op)
    return total.tolist()


def communication_of(step: Step) -> tuple[float, float]:
    """ms in which collectives run alone, and ms in which they run at all."""
    if not GPU:
        return NAN, NAN
    for profiled in (dist.barrier, step):  # the first starts the profiler, each rank in its time
        dist.barrier()
        synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            profiled()
            synchronize()
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            spans["nccl" in event.name].append((event.time_range.start, event.time_range.end))
    return exposed(spans[True], spans[False]) / 1e3, covered(spans[True]) / 1e3


def exposed(collectives: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """Length in which collectives run and nothing else does."""
    return covered(collectives + others) - covered(others)


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def allocated(peak: bool = False) -> float:
    """Bytes of device memory in use, now or at most."""
    if not GPU:
        return NAN
    return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def empty_cache() -> None:
    if GPU:
        torch.cuda.empty_cache()


def print_row(case: Case, row: Row, single: Single | None) -> None:
    speedup = single.both_ms / row.both_ms if single else NAN
    numbers = [row.forward_ms, row.both_ms, speedup, speedup / row.ranks, *row[4:-1]]
    cells = (case.attention, row.method, row.ranks, *case.shape, *(f"{x:.3f}" for x in numbers))
    difference = largest_difference(row.norms, single.norms) if single else NAN
    norms = " ".join(f"{x:.6e}" for x in row.norms)
    print(*cells, f"{difference:.1e}", norms, sep=",", flush=True)


def read_single(path: Path, cases: Sequence[Case]) -> dict[Case, Single]:
    """Returns what one GPU took for the cases, from the output of an earlier run."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    singles = {}
    for row in csv.DictReader(lines):
        if row.get("ranks") == "1" and row.get("norms"):
            shape = Shape(*(int(row[name]) for name in Shape._fields))
            norms = tuple(float(x) for x in row["norms"].split())
            singles[Case(row["attention"], shape)] = Single(float(row["both_ms"]), norms)
    for case in cases:
        if case not in singles:
            raise ValueError(f"{path} holds no row of 1 rank of {case} with the columns {HEADER}")
    return singles


def origin(path: Path) -> str:
    """Device and commit of an earlier run."""
    lines = path.read_text().splitlines()
    return ", ".join(x[2:] for x in lines if x.startswith(("# device:", "# commit:")))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m path_backend.benchmarks.context_parallel",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536], help="tokens in all")
    parser.add_argument("--heads", type=head_pair, default=(32, 8), help="query/key-value heads")
    parser.add_argument("--width", type=int, default=128, help="of a head")
    parser.add_argument("--attention", nargs="+", choices=ATTENTIONS, default=["path"])
    parser.add_argument("--method", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--rep", type=int, default=10)
    parser.add_argument(
        "--warmup", type=int, default=2, help="runs that do not count; one after the first length"
    )
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--single", type=Path, help="output of an earlier run with rows of one GPU")
    one.add_argument("--no-single", dest="measure_single", action="store_false", help="skip them")
    args = parser.parse_args(arguments)
    if args.rep < 1:
        parser.error(f"--rep must be at least 1, got {args.rep}")
    return args


if __name__ == "__main__":
    main()
