"""The kernels beside their peers: time, memory and accuracy as CSV on standard output.

    python -m path_backend.benchmarks.operator > results.csv
    python -m path_backend.benchmarks.operator --read results.csv --plot results.png
    python -m path_backend.benchmarks.operator --accuracy --documents --memory --kernels

Rows appear as they are measured; one that fails says why in its last column. All implementations
of a shape get the same q, k, v, w, beta and gate, in bf16 (w, beta and gates in fp32 where a peer
asks for it), and the L2 cache is cleared before each timed run. Forward is timed without autograd,
forward + backward ("both") with all gradients. Peak memory is what forward + backward add to the
inputs. Ratios, of time and of memory, are to SDPA's FlashAttention-2 on the same shape in the same
run.

Peers: SDPA of torch; with the wheel fla-core (tested: 0.6.0), flash-linear-attention's PaTH,
PaTH-FoX and FoX. Pictures need matplotlib.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from path_backend.arguments import Inputs
from path_backend.attention import path_attention
from path_backend.benchmarks.peers import (
    IMPLEMENTATIONS,
    OURS,
    REFERENCE,
    WITH_REFLECTIONS,
    Problem,
)
from path_backend.benchmarks.provenance import preamble
from path_backend.beta import beta_from_logits
from path_backend.testing import as_leaves, make_inputs, relative_error, run

DEVICE = "cuda"
DTYPE = torch.bfloat16
FORWARD, BOTH = 0, 3  # the medians in what `measure` returns


class Shape(NamedTuple):
    B: int
    T: int
    HQ: int
    H: int
    D: int


def draw(shape: Shape, device: str | None = None) -> Inputs:
    """Random inputs, made on the device: beta 2 sigmoid(N(0, 1)), gates logsigmoid(3 + N(0, 1))."""
    B, T, HQ, H, D = shape
    generator = torch.Generator(device or DEVICE).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=generator.device, generator=generator)

    q, k, v = (normal(B, T, heads, D).to(DTYPE) for heads in (HQ, H, H))
    w = F.normalize(normal(B, T, H, D), dim=-1).to(DTYPE)
    beta, _ = beta_from_logits(normal(B, T, H), w)
    return Inputs(q, k, v, w, beta, F.logsigmoid(normal(B, T, HQ) + 3), None)


def clock(function: Callable[[], Any], milliseconds: int) -> list[float]:
    """Median, 20th and 80th percentile of a call, in ms. Calls take `milliseconds` together, or
    there are at least five."""
    from triton.testing import do_bench

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    function()
    begin.record()
    function()
    end.record()
    torch.cuda.synchronize()
    rep = max(milliseconds, int(6 * begin.elapsed_time(end)))
    return do_bench(function, warmup=max(25, rep // 4), rep=rep, quantiles=[0.5, 0.2, 0.8])


def replayed(function: Callable[[], Any]) -> Callable[[], None]:
    """The call as a CUDA graph: the same work on the GPU without that of the host. What the call
    reads must live as long.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def peak_memory(function: Callable[[], Any]) -> float:
    """GiB that a call needs beyond what is allocated before it; the second call, so that no
    compilation or autotuning counts."""
    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def forward_and_backward(problem: Problem) -> Callable[[], tuple[Tensor, ...]]:
    """A function that computes the output and every gradient."""
    with torch.no_grad():
        d_out = torch.randn_like(problem.call())
    leaves = list(problem.leaves.values())
    return lambda: torch.autograd.grad(problem.call(), leaves, d_out)


def measure(problem: Problem, args: argparse.Namespace) -> list[float]:
    """Forward: median, p20, p80; both: the same; peak memory in GiB."""
    both = forward_and_backward(problem)
    peak = peak_memory(both)
    timed = replayed if args.graph else lambda function: function
    with torch.no_grad():
        forward = clock(timed(problem.call), args.rep)
    return [*forward, *clock(timed(both), args.rep), peak]


def guarded(name: str, inputs: Inputs, work: Callable[[Problem], Any]) -> tuple[Any, str]:
    """The result of `work` on an implementation's problem, or None and what went wrong."""
    implementation = IMPLEMENTATIONS[name]
    try:
        with implementation.context():
            problem = implementation.build(inputs)
            return work(problem), problem.note
    except Exception as error:  # a row that fails must not end a long run
        text = str(error).strip().splitlines() or [""]
        return None, f"{type(error).__name__}: {text[0][:200]}"
    finally:
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


Rows = Iterator[Sequence[Any]]
"""The first is the header."""

SPEED_HEADER = (
    "implementation,B,T,HQ,H,D,forward_ms,forward_p20,forward_p80,both_ms,both_p20,both_p80,"
    "peak_gib,forward_ratio,both_ratio,note"
).split(",")


def speed_table(args: argparse.Namespace) -> Rows:
    """Time and memory of every implementation on every shape."""
    yield SPEED_HEADER
    for shape in shapes(args):
        inputs = None if args.dry_run else draw(shape)
        reference = None
        for name in args.only:
            if inputs is None:
                yield [name, *shape]
                continue
            times, note = guarded(name, inputs, lambda problem: measure(problem, args))
            reference = times if name == REFERENCE else reference
            ratios = [ratio(times, reference, median) for median in (FORWARD, BOTH)]
            yield [name, *shape, *numbers(times, 7), *ratios, note]


def documents_table(args: argparse.Namespace) -> Rows:
    """Ours at the longest length: without a mask, with one document (what the mask costs), and
    documents of `--document-length` tokens."""
    yield "implementation,B,T,HQ,H,D,document,forward_ms,both_ms,times_faster,note".split(",")
    for shape in shapes(args, longest_only=True):
        inputs = None if args.dry_run else draw(shape)
        for name in (x for x in args.only if x in OURS):
            without = None
            for length in (None, shape.T, args.document_length):
                label = "no mask" if length is None else length
                if inputs is None:
                    yield [name, *shape, label]
                    continue
                times, note = guarded(
                    name, packed(inputs, length), lambda problem: measure(problem, args)
                )
                without = times if length is None else without
                cells = numbers(times and times[FORWARD : BOTH + 1 : BOTH], 2)
                yield [name, *shape, label, *cells, ratio(without, times, BOTH), note]


def packed(inputs: Inputs, length: int | None) -> Inputs:
    """The inputs with a mask of documents of `length` tokens, without one for None."""
    if length is None:
        return inputs
    B, T = inputs.q.shape[:2]
    position = torch.arange(T, dtype=torch.int32, device=DEVICE)
    start = (position // length * length).expand(B, -1)
    return inputs._replace(document_start=start.contiguous())


def memory_table(args: argparse.Namespace) -> Rows:
    """Peak memory of forward + backward over the length, one sequence each; growth is that from
    the length before."""
    yield "implementation,B,T,HQ,H,D,peak_gib,ratio,growth,note".split(",")
    for HQ, H in args.heads:
        for D in args.widths:
            reference: dict[int, float | None] = {}
            for name in args.only:
                previous = None
                for T in args.memory_lengths:
                    shape = Shape(1, T, HQ, H, D)
                    if args.dry_run:
                        yield [name, *shape]
                        continue
                    peak, note = guarded(
                        name,
                        draw(shape),
                        lambda problem: peak_memory(forward_and_backward(problem)),
                    )
                    if name == REFERENCE:
                        reference[T] = peak
                    ratios = [quotient(peak, reference.get(T)), quotient(peak, previous)]
                    previous = peak
                    size = "" if peak is None else f"{peak:.4f}"
                    yield [name, *shape, size, *ratios, note]


HARD: dict[str, dict[str, Any]] = {
    "random": {},
    "beta in [1.9 2]": {"beta": "high"},
    "nearly constant w beta 2": {"w": "constant", "beta": "two"},
}
ERRORS = ("out", "dq", "dk", "dv", "dw", "dbeta", "dlog_gate")


def accuracy_table(args: argparse.Namespace) -> Rows:
    """Errors against the torch form in fp64, relative (2-norm); beta is clipped as in layers."""
    yield ["implementation", "T", "D", "inputs", "d_out", *ERRORS, "note"]
    T = args.accuracy_length
    for D in args.widths:
        for case, options in HARD.items():
            for factor in (1.0, 1e-8):
                for name in (x for x in args.only if x in WITH_REFLECTIONS):
                    if args.dry_run:
                        yield [name, T, D, case, factor]
                        continue
                    gate = WITH_REFLECTIONS[name]
                    inputs = make_inputs(
                        T, D=D, gate=gate, dtype=DTYPE, device=DEVICE, **options
                    ).map(torch.detach)
                    errors, note = guarded(name, clipped(inputs), accuracy_of(name, inputs, factor))
                    errors = errors or {}
                    cells = [f"{errors[x]:.1e}" if x in errors else "" for x in ERRORS]
                    yield [name, T, D, case, factor, *cells, note]


def clipped(inputs: Inputs) -> Inputs:
    """The inputs with beta clipped against the rounded w."""
    assert inputs.w is not None and inputs.beta is not None
    beta, _ = beta_from_logits(torch.logit(inputs.beta / 2), inputs.w)
    return inputs._replace(beta=beta)


def accuracy_of(name: str, inputs: Inputs, factor: float) -> Callable[[Problem], dict[str, float]]:
    """A function that gives the errors of a problem on clipped(inputs), for d(out) x factor."""

    def work(problem: Problem) -> dict[str, float]:
        out = problem.call()
        generator = torch.Generator().manual_seed(1)
        d_out = (torch.randn(out.shape, generator=generator) * factor).to(out)
        grads = torch.autograd.grad(out, list(problem.leaves.values()), d_out)
        scale = inputs.q.shape[-1] ** -0.5 if IMPLEMENTATIONS[name].scales_gate else 1.0
        exact = run(
            path_attention,
            as_leaves(clipped(inputs), torch.float64),
            d_out,
            implementation="torch",
            gate_scale=scale,
        )
        actual = dict(zip((f"d{x}" for x in problem.leaves), grads, strict=True)) | {"out": out}
        return {x: relative_error(actual[x], exact[x]) for x in actual}

    return work


def kernels_table(args: argparse.Namespace) -> Rows:
    """Device time of each kernel in one forward + backward, longest first."""
    yield "implementation,B,T,HQ,H,D,kernel,calls,ms,note".split(",")
    for shape in shapes(args):
        inputs = None if args.dry_run else draw(shape)
        for name in args.only:
            if inputs is None:
                yield [name, *shape]
                continue
            kernels, note = guarded(name, inputs, profile)
            if kernels is None:
                yield [name, *shape, "", "", "", note]
            for kernel, calls, ms in kernels or ():
                yield [name, *shape, kernel, calls, f"{ms:.4f}", note]


def profile(problem: Problem, steps: int = 5) -> list[tuple[str, float, float]]:
    """(kernel, calls, ms) of one forward + backward, means over `steps`."""
    both = forward_and_backward(problem)
    for _ in range(3):
        both()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            both()
        torch.cuda.synchronize()
    # Host-side events carry the time of the kernels they start: only the kernels are counted.
    events = [
        (event.key[:80], event.count / steps, event.self_device_time_total / 1e3 / steps)
        for event in profiler.key_averages()
        if event.device_type.name == "CUDA"
    ]
    return sorted(events, key=lambda event: -event[2])


def ratio(above: list[float] | None, below: list[float] | None, index: int) -> str:
    return "" if above is None or below is None else quotient(above[index], below[index])


def quotient(above: float | None, below: float | None) -> str:
    return "" if above is None or below is None else f"{above / below:.3f}"


def numbers(values: Iterable[float] | None, count: int) -> list[str]:
    return [""] * count if values is None else [f"{value:.4f}" for value in values]


def shapes(args: argparse.Namespace, longest_only: bool = False) -> Iterator[Shape]:
    """`--tokens` tokens per call, in one sequence where that is longer. Lengths in their order on
    the command line: what matters most can come first."""
    for T in (max(args.lengths),) if longest_only else args.lengths:
        for D in args.widths:
            for HQ, H in args.heads:
                yield Shape(max(1, args.tokens // T), T, HQ, H, D)


def read_speed(path: Path) -> list[dict[str, str]]:
    """The rows of the speed table in a file that holds this script's output."""
    blocks = path.read_text().split("\n\n")
    for block in blocks:
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        if lines and lines[0].split(",") == SPEED_HEADER:
            return list(csv.DictReader(lines))
    raise ValueError(f"{path} holds no table with the columns {','.join(SPEED_HEADER)}")


def plot(rows: list[dict[str, str]], path: Path) -> None:
    """Forward + backward per token over T, one panel for each width and number of heads."""
    import_module("matplotlib").use("Agg")
    pyplot = import_module("matplotlib.pyplot")
    rows = [row for row in rows if row["both_ms"]]
    panels = sorted({(int(row["D"]), int(row["HQ"]), int(row["H"])) for row in rows})
    if not panels:
        raise ValueError("there is no time to plot: every row failed")
    figure, axes = pyplot.subplots(
        *(1, len(panels)),
        figsize=(1.5 + 3.7 * len(panels), 4),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for (D, HQ, H), axis in zip(panels, axes[0], strict=True):
        for i, name in enumerate(IMPLEMENTATIONS):
            points = sorted(
                (int(row["T"]), 1e3 * float(row["both_ms"]) / (int(row["B"]) * int(row["T"])))
                for row in rows
                if (row["implementation"], int(row["D"]), int(row["HQ"]), int(row["H"]))
                == (name, D, HQ, H)
            )
            if points:
                style = "o-" if name in OURS else "s--"
                axis.plot(*zip(*points, strict=True), style, color=f"C{i}", label=name, ms=4)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("T (tokens)")
        axis.set_title(f"D = {D}, {HQ} heads on {H}")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("forward + backward, µs per token")
    lines = {line.get_label(): line for axis in axes[0] for line in axis.get_lines()}
    names = [name for name in IMPLEMENTATIONS if name in lines]
    figure.legend([lines[x] for x in names], names, loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=150)


def head_pair(text: str) -> tuple[int, int]:
    """'32/8' -> (32, 8)."""
    HQ, H = map(int, text.split("/"))
    if H < 1 or HQ < 1 or HQ % H:
        raise ValueError
    return HQ, H


TABLES: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "speed": speed_table,
    "accuracy": accuracy_table,
    "documents": documents_table,
    "memory": memory_table,
    "kernels": kernels_table,
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m path_backend.benchmarks.operator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    for name, table in TABLES.items():
        add(f"--{name}", action="store_true", help=(table.__doc__ or "").strip())
    names, heads = list(IMPLEMENTATIONS), [(16, 16), (32, 8)]
    add("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    add("--lengths", nargs="+", type=int, default=[2048, 8192, 32768], metavar="T")
    add("--widths", nargs="+", type=int, default=[128, 64], metavar="D")
    add("--heads", nargs="+", type=head_pair, default=heads, metavar="HQ/H", help="16/16 32/8")
    add("--tokens", type=int, default=16384, help="tokens per call, B = tokens / T (default 16384)")
    help_rep = "milliseconds of each measurement, but at least five calls (default 200)"
    add("--rep", type=int, default=200, help=help_rep)
    add("--graph", action="store_true", help="speed, documents: replay CUDA graphs, no host")
    add("--document-length", type=int, default=2048, metavar="T")
    add("--accuracy-length", type=int, default=4096, metavar="T")
    lengths = [8192, 16384, 32768, 65536, 131072]
    add("--memory-lengths", nargs="+", type=int, default=lengths, metavar="T")
    add("--dry-run", action="store_true", help="print what would be measured")
    add("--plot", type=Path, metavar="FILE.png", help="draw the speed table")
    add("--read", type=Path, metavar="FILE.csv", help="measure nothing, plot this output")
    args = parser.parse_args(argv)
    args.tables = [name for name in TABLES if getattr(args, name)] or ["speed"]
    args.only = [name for name in names if name in args.only]  # the reference comes first
    if args.read and not args.plot:
        parser.error("--read needs --plot")
    if args.plot and not args.read and ("speed" not in args.tables or args.dry_run):
        parser.error("--plot draws the speed table: add --speed, or --read a file that holds it")
    if not (args.dry_run or args.read) and DEVICE == "cuda" and not torch.cuda.is_available():
        parser.error("expected a CUDA device, found none: only --dry-run and --read work here")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.read:
        plot(read_speed(args.read), args.plot)
        return
    for line in preamble(__spec__.name):
        print(f"# {line}")
    writer = csv.writer(sys.stdout, lineterminator="\n")
    measured = []
    for name in args.tables:
        print(flush=True)
        for row in TABLES[name](args):
            writer.writerow(row)
            sys.stdout.flush()
            if name == "speed":
                measured.append([str(cell) for cell in row])
    if args.plot:
        plot([dict(zip(measured[0], row, strict=True)) for row in measured[1:]], args.plot)


if __name__ == "__main__":
    main()
