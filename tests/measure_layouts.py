"""Train a model of 1B parameters on several layouts: speed, memory, communication and losses.

    python tests/measure_layouts.py --attention path > rows.md
    python tests/measure_layouts.py --layouts "one GPU" CP4 --attention path --compile.no-enable

Every layout starts from one seed checkpoint and sees the same `--sequences` in a step, split over
data parallel ranks or accumulated. Layouts of more ranks than there are GPUs are left out, by name,
or with --share several ranks share a GPU: then only the losses mean something.
Rows appear as they are measured. Speeds are medians of the steps between the first and the last
two, which start and end the profiler. Memory is the most that rank 0 reserved; communication is
exposed while collectives of rank 0 run and nothing else there does, in the last step.
`difference` is the largest relative one of a step's loss and of its gradient norm to the first
layout that is run; the verdict is by parity.py's budgets for the precision. A run that fails says
so in its row. The status is 1 if one failed or differs. Other arguments reach the trainer. Without
a GPU (with `--config tests/tiny.toml`, say) ranks are processes of a CPU.
"""

import argparse
import json
import re
import signal
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import trainer
from parity import BF16, FP32, Budget, Layout

from path_backend.benchmarks.context_parallel import exposed, largest_difference
from path_backend.benchmarks.provenance import disable_multicast, preamble

TESTS = Path(__file__).resolve().parent
LAYOUTS = [
    Layout("one GPU"),
    Layout("FSDP2", shard=2),
    Layout("CP2", context=2),
    Layout("CP4", context=4),
    Layout("TP2 x CP2", tensor=2, context=2),
    Layout("FSDP2 x CP4", shard=2, context=4),
    Layout("FSDP2 x TP2 x CP2", shard=2, tensor=2, context=2),
]
COLUMNS = (
    "layout",
    "attention",
    "tokens/s per GPU",
    "MFU",
    "memory per GPU",
    "exposed, of a step",
    "difference",
    "losses",
    "verdict",
)


def main(arguments: list[str]) -> int:
    args, overrides = parse(arguments)
    budget = budget_of(args, overrides)
    disable_multicast()
    print(*preamble("tests/measure_layouts.py"), sep="\n")
    print(f"equal: losses within {budget.loss:g}, gradient norms within {budget.tensor:g}\n")
    print(line(COLUMNS), "|---" * len(COLUMNS) + "|", sep="\n", flush=True)
    good = True
    with TemporaryDirectory() as folder:
        for attention in args.attention:
            job = (*job_of(args, attention), *overrides)
            for name, *cells, verdict in rows(job, args, budget, Path(folder, attention)):
                print(line([name, f"`{attention}`", *cells, verdict]), flush=True)
                good &= verdict.startswith(("reference", "equals"))
    return 0 if good else 1


def rows(
    job: tuple[str, ...], args: argparse.Namespace, budget: Budget, folder: Path
) -> Iterator[list[str]]:
    """The cells of every run of an attention, but for its name."""
    options = {"config": args.config, "timeout": args.timeout}
    seed = folder / "seed"
    made = attempt(seed, *job, "--checkpoint.create_seed_checkpoint", **options)
    if isinstance(made, str):
        yield ["seed checkpoint", *[""] * 6, made]
        return
    job = (*job, f"--checkpoint.initial_load_path={seed}/checkpoint/step-0")
    first, reference = args.layouts[0], None
    for layout in args.layouts:
        own = options_of(layout, args)
        run = attempt(folder / layout.name, *job, *own, ranks=layout.ranks, **options)
        if isinstance(run, str):
            yield [layout.name, *[""] * 6, run]
            continue
        if layout is first:
            reference, difference, verdict = run, "–", "reference"
        elif reference:
            difference, equal = compare(run, reference, budget)
            verdict = f"{'equals' if equal else 'differs from'} {first}"
        else:
            difference, verdict = "", f"without {first}"
        losses = ", ".join(f"{x:.5f}" for x in run.loss)
        yield [layout.name, *speed(run, layout), difference, losses, verdict]


def attempt(folder: Path, *arguments: str, **options) -> trainer.Run | str:
    """A run, or the verdict that it failed, with the last exception of the rank that did."""
    try:
        return trainer.train(folder, *arguments, **options)
    except trainer.TrainerError as error:
        print(error, file=sys.stderr)
        rank, *output = str(error).splitlines()
        exceptions = [x for x in output if re.match(r"[\w.]+(Error|Exception)\b", x)]
        return ", ".join([f"failed: {rank}", *exceptions[-1:]])


def budget_of(args: argparse.Namespace, overrides: list[str]) -> Budget:
    """What layouts may differ by in the precision of the job."""
    # Here because ranks import this file, and `default` is to run without the integration.
    from path_backend.integration.torchtitan.job import load_job

    job = job_of(args, args.attention[0])
    training = load_job([f"--job.config_file={args.config}", *job, *overrides]).training
    return FP32 if training.mixed_precision_param == "float32" else BF16


def job_of(args: argparse.Namespace, attention: str) -> tuple[str, ...]:
    """What all runs of an attention have in common."""
    return (
        f"--model.attention={attention}",
        "--experimental.custom_import=parity_data",
        "--debug.seed=0",  # another call starts from the same seed checkpoint
        "--training.dataset=parity",
        f"--training.dataset_path={args.sequences * args.steps} x {args.length}",
        f"--training.seq_len={args.length}",
        f"--training.steps={args.steps}",
        "--training.local_batch_size=1",
        f"--training.global_batch_size={args.sequences}",
        *("--metrics.log_freq=1", "--metrics.enable_tensorboard"),
        *("--checkpoint.enable", "--checkpoint.interval=1000"),
    )


def options_of(layout: Layout, args: argparse.Namespace) -> tuple[str, ...]:
    """What a layout adds to them."""
    profiling = (
        "--profiling.enable_profiling",
        f"--profiling.profile_freq={args.steps}",
        "--profiling.profiler_warmup=1",
    )
    on_gpus = profiling if torch.cuda.is_available() else ()
    return ("--checkpoint.load_only", *layout.degrees, *on_gpus)


def compare(run: trainer.Run, reference: trainer.Run, budget: Budget) -> tuple[str, bool]:
    """The differences of losses and gradient norms, and whether both are within the budget."""
    loss = largest_difference(run.loss, reference.loss)
    norm = largest_difference(run.grad_norm, reference.grad_norm)
    return f"{loss:.0e}, {norm:.0e}", loss <= budget.loss and norm <= budget.tensor


def speed(run: trainer.Run, layout: Layout) -> list[str]:
    """The cells of what a run took."""

    def median(name: str) -> float:
        return statistics.median(list(run.scalars[name].values())[1:-2])

    traces = list(run.folder.rglob("rank0_trace.json"))
    return [
        f"{median('throughput(tps)'):,.0f}",
        f"{median('mfu(%)'):.1f} %",
        f"{max(run.scalars['memory/max_reserved(GiB)'].values()):.1f} GiB",
        communication(traces[0]) if traces and layout.ranks > 1 else "",
    ]


def communication(trace: Path) -> str:
    """Exposed communication of a profiled step, and the step from its first kernel to its last."""
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            span = (event["ts"], event["ts"] + event["dur"])
            spans["nccl" in event["name"].lower()].append(span)
    everything = spans[True] + spans[False]
    whole = max(end for _, end in everything) - min(start for start, _ in everything)
    return f"{exposed(spans[True], spans[False]) / 1e3:.0f} of {whole / 1e3:,.0f} ms"


def line(cells) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options, with the layouts that can run here, and what goes to the trainer."""
    names = [layout.name for layout in LAYOUTS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", nargs="+", choices=names, default=names)
    parser.add_argument("--attention", nargs="+", default=["path", "path_fox", "default"])
    parser.add_argument("--config", type=Path, default=TESTS / "llama3_1b.toml")
    parser.add_argument("--length", type=int, default=65536, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=2, help="of a step")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=trainer.TIMEOUT, help="seconds of a run")
    parser.add_argument("--share", action="store_true", help="GPUs among ranks, if too few")
    args, overrides = parser.parse_known_args(arguments)
    if args.steps < 4:
        parser.error(f"--steps must be at least 4, got {args.steps}")
    gpus = torch.cuda.device_count()
    chosen, args.layouts = [x for x in LAYOUTS if x.name in args.layouts], []
    for layout in chosen:
        if not args.share and 0 < gpus < layout.ranks:
            print(f"{layout} needs {layout.ranks} GPUs, got {gpus}", file=sys.stderr)
            continue
        pieces = 2 * layout.context * layout.tensor
        if args.length < 1 or args.length % pieces:
            parser.error(f"--length of {layout} must be a multiple of {pieces}, got {args.length}")
        if args.sequences < 1 or args.sequences % layout.shard:
            need = f"--sequences of {layout} must be a multiple of {layout.shard}"
            parser.error(f"{need}, got {args.sequences}")
        args.layouts.append(layout)
    if not args.layouts:
        parser.error(f"--layouts must name one for {gpus} GPUs or fewer, got none")
    return args, overrides


def stop(*_) -> None:
    """An exception, so that the ranks are killed before this process ends."""
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main(sys.argv[1:]))
