"""Context parallelism on the GPUs of one host beside one GPU: time, memory, exposed communication.

    torchrun --nproc_per_node 2 -m path_backend.benchmark_context_parallel > results.csv

Rows come from rank 0 as they are measured. A time is that of the slowest rank, the median of
`--rep` runs; "both" is forward + backward with all gradients. Communication is exposed while a
rank's collectives run and none of its other kernels does; that, and the time in collectives, is the
mean of the ranks in one profiled run. Peak memory is what forward + backward add to the inputs, on
the rank that needs most. A row of 1 rank is `path_attention` on one GPU, the others idle; it is the
only one of a run on one rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from path_backend.attention import path_attention
from path_backend.benchmark import Shape, draw, head_pair, preamble
from path_backend.context_parallel import ROTATE_METHODS, Layout, context_parallel_attention
from path_backend.testing import Inputs

HEADER = (
    "attention,method,ranks,B,T,HQ,H,D,forward_ms,both_ms,speedup,efficiency,exposed_ms,"
    "collectives_ms,peak_gib"
)
ATTENTIONS = {"path": ("log_gate",), "path_fox": (), "fox": ("w", "beta")}
"""Inputs that each attention leaves out."""

Step = Callable[[], Any]


def main() -> None:
    args = parse(sys.argv[1:])
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    if rank == 0:
        print(*(f"# {line}" for line in preamble(__spec__.name)), HEADER, sep="\n", flush=True)
    for T in args.lengths:
        HQ, H = args.heads
        shape = Shape(1, T, HQ, H, args.width)
        for attention in args.attention:
            single = None
            for row in measure(shape, attention, args):
                single = row[2] if row[1] == 1 else single
                if rank == 0:
                    print_row(shape, attention, single, *row)
    dist.barrier()
    dist.destroy_process_group()


def measure(
    shape: Shape, attention: str, args: argparse.Namespace
) -> Iterator[tuple[str, int, list[float], list[float], float]]:
    """(method, ranks, forward and both in ms, exposed and collectives in ms, GiB) of each row."""
    absent: dict[str, Any] = dict.fromkeys(ATTENTIONS[attention])
    inputs = draw(shape)._replace(**absent)
    ranks = dist.get_world_size()
    if args.single:
        steps = steps_of(inputs, path_attention) if dist.get_rank() == 0 else None
        yield "", 1, *clock(steps, args, communicates=False)
        del steps
        torch.cuda.empty_cache()
    if ranks == 1:
        return
    layout = Layout.head_tail(ranks, shape.T // (2 * ranks))
    local = inputs.map(lambda x: take(x, layout))
    del inputs
    for method in args.method:
        options = {"layout": layout, "group": dist.group.WORLD, "rotate_method": method}
        steps = steps_of(local, context_parallel_attention, **options)
        yield method, ranks, *clock(steps, args)
        del steps
        torch.cuda.empty_cache()


def take(x: Tensor, layout: Layout) -> Tensor:
    """This rank's tokens of [B, T, ...]."""
    starts = layout.starts[dist.get_rank()]
    return torch.cat([x[:, start : start + layout.length] for start in starts], dim=1)


def steps_of(inputs: Inputs, function: Callable[..., Tensor], **options: Any) -> tuple[Step, Step]:
    """Forward alone without autograd, and forward + backward."""
    inputs = inputs.leaves()
    leaves = list(inputs.differentiable().values())

    def forward() -> Tensor:
        with torch.no_grad():
            return inputs.call(function, **options)

    d_out = torch.randn_like(forward())
    return forward, lambda: torch.autograd.grad(inputs.call(function, **options), leaves, d_out)


def clock(
    steps: tuple[Step, Step] | None, args: argparse.Namespace, communicates: bool = True
) -> tuple[list[float], list[float], float]:
    """Times of both steps, communication of the second, its peak memory. Every rank calls; one
    without steps waits.
    """
    forward, both = steps or (lambda: None, lambda: None)
    times = [timed(step, args.rep, args.warmup) for step in (forward, both)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    total = torch.tensor(communication_of(both) if communicates else [0.0, 0.0], device="cuda")
    dist.all_reduce(total)
    largest = torch.tensor(peak, device="cuda")
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return times, (total / dist.get_world_size()).tolist(), largest.item()


def timed(step: Step, repetitions: int, warmup: int) -> float:
    """Median over the runs of the slowest rank's time, in ms."""
    times = []
    for i in range(warmup + repetitions):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        torch.cuda.synchronize()
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor(begin.elapsed_time(end), device="cuda")
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if i >= warmup:
            times.append(slowest.item())
    return statistics.median(times)


def communication_of(step: Step) -> list[float]:
    """ms in which collectives run alone, and ms in which they run at all."""
    for profiled in (dist.barrier, step):  # the first starts the profiler, each rank in its time
        dist.barrier()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            profiled()
            torch.cuda.synchronize()
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            spans["nccl" in event.name].append((event.time_range.start, event.time_range.end))
    everything = covered(spans[True] + spans[False])
    return [(everything - covered(spans[False])) / 1e3, covered(spans[True]) / 1e3]


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def print_row(
    shape: Shape,
    attention: str,
    single: list[float] | None,
    method: str,
    ranks: int,
    times: list[float],
    communication: list[float],
    peak: float,
) -> None:
    speedup = single[1] / times[1] if single else float("nan")
    numbers = [*times, speedup, speedup / ranks, *communication, peak]
    print(attention, method, ranks, *shape, *(f"{x:.3f}" for x in numbers), sep=",", flush=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m path_backend.benchmark_context_parallel",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536], help="tokens in all")
    parser.add_argument("--heads", type=head_pair, default=(32, 8), help="query/key-value heads")
    parser.add_argument("--width", type=int, default=128, help="of a head")
    parser.add_argument("--attention", nargs="+", choices=ATTENTIONS, default=["path"])
    parser.add_argument("--method", nargs="+", choices=ROTATE_METHODS, default=ROTATE_METHODS)
    parser.add_argument("--rep", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2, help="runs before those that count")
    parser.add_argument("--no-single", dest="single", action="store_false", help="skip one GPU")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
