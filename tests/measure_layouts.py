"""Train a model of 1B parameters on several layouts: speed, memory, communication and losses.

    NCCL_NVLS_ENABLE=0 python tests/measure_layouts.py > rows.md
    python tests/measure_layouts.py --layouts "one GPU" CP4 --attention path --compile.no-enable

Every layout starts from one seed checkpoint and sees the same `--sequences` in a step, split over
data parallel ranks or accumulated. Layouts of more ranks than there are GPUs are left out, by name,
or with --share several ranks share a GPU: then only the losses mean something.
Rows appear as they are measured: medians of the steps between the first and the last, which is
profiled. Communication is exposed while collectives of rank 0 run and nothing else does.
`difference` is the largest relative one of a step's loss and of its gradient norm to the first
layout of the attention. Other arguments reach the trainer. Without a GPU (with `--config
tests/tiny.toml`, say) ranks are processes of a CPU.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import trainer
from parity import Layout

from path_backend.benchmark_context_parallel import exposed

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
)


def main(arguments: list[str]) -> None:
    args, overrides = parse(arguments)
    print(line(COLUMNS), "|---" * len(COLUMNS) + "|", sep="\n", flush=True)
    with TemporaryDirectory() as folder:
        for attention in args.attention:
            job = (*job_of(args, attention), *overrides)
            seed = Path(folder, attention)
            trainer.train(seed, *job, "--checkpoint.create_seed_checkpoint", config=args.config)
            job = (*job, f"--checkpoint.initial_load_path={seed}/checkpoint/step-0")
            first = None
            for layout in (x for x in LAYOUTS if x.name in args.layouts):
                if not args.share and 0 < torch.cuda.device_count() < layout.ranks:
                    have = f"{layout.ranks} GPUs, got {torch.cuda.device_count()}"
                    print(f"{layout} needs {have}", file=sys.stderr)
                    continue
                run = trainer.train(
                    Path(folder, f"{attention} {layout}"),
                    *job,
                    *options_of(layout, args),
                    ranks=layout.ranks,
                    config=args.config,
                )
                first = first or run
                print(line(row(run, first, layout, attention)), flush=True)


def job_of(args: argparse.Namespace, attention: str) -> tuple[str, ...]:
    """What all runs of an attention have in common."""
    return (
        f"--model.attention={attention}",
        "--experimental.custom_import=parity_data",
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


def row(run: trainer.Run, first: trainer.Run, layout: Layout, attention: str) -> list[str]:
    """The cells of a run beside the first of its attention."""

    def median(name: str) -> float:
        return statistics.median(list(run.scalars[name].values())[1:-1])

    differences = (
        max(abs(x - y) / abs(y) for x, y in zip(xs, ys, strict=True))
        for xs, ys in ((run.loss, first.loss), (run.grad_norm, first.grad_norm))
    )
    traces = list(run.folder.rglob("rank0_trace.json"))
    return [
        layout.name,
        f"`{attention}`",
        f"{median('throughput(tps)'):,.0f}",
        f"{median('mfu(%)'):.1f} %",
        f"{max(run.scalars['memory/max_reserved(GiB)'].values()):.1f} GiB",
        communication(traces[0]) if traces and layout.ranks > 1 else "",
        ", ".join(f"{x:.0e}" for x in differences),
        ", ".join(f"{x:.5f}" for x in run.loss),
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
    return f"| {' | '.join(cells)} |"


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    names = [layout.name for layout in LAYOUTS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", nargs="+", choices=names, default=names)
    parser.add_argument("--attention", nargs="+", default=["path", "path_fox", "default"])
    parser.add_argument("--config", type=Path, default=TESTS / "llama3_1b.toml")
    parser.add_argument("--length", type=int, default=65536, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=2, help="of a step")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--share", action="store_true", help="GPUs among ranks, if too few")
    args, overrides = parser.parse_known_args(arguments)
    if args.steps < 3:
        parser.error(f"--steps must be at least 3, got {args.steps}")
    return args, overrides


if __name__ == "__main__":
    main(sys.argv[1:])
