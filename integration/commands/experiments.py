"""Train and evaluate the experiments of the README on the GPUs of this machine.

    path-backend experiments                          what has no result yet, in order of importance
    path-backend experiments 'flip_flop/*' --seconds 600 --list
    path-backend experiments --run flip_flop/path_0   one job, in this process

Each job is a run of torchtitan's trainer in a process of its own, then an evaluation of its
checkpoint there, and leaves one JSON file in the results folder. Jobs with a result are skipped. A
job that fails or takes too long leaves its reason in `<name>.failed.json`, and is tried again the
next time. Further arguments override keys of every job's TOML file, as the trainer's do.

Start it where `configs/` lies: TOML files name the tokenizer relative to it.
"""

import argparse
import fnmatch
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from path_backend.integration.commands.arguments import positive_integer

CONFIGS = Path("configs")
RESULTS = CONFIGS / "results"
ATTENTIONS = ("path", "default", "fox", "path_fox", "stick_breaking", "nope")
COMMON = ("--checkpoint.interval=1000000", "--training.gc_freq=1000", "--metrics.log_freq=200")
SLOTS = 6  # of one GPU: alone, a small job keeps it busy a third of the time


@dataclass(frozen=True)
class Job:
    """One training with its evaluation. `name` is also the place of its result."""

    name: str
    config: str
    attention: str
    overrides: tuple[str, ...] = ()
    evaluated: int | None = None  # tokens of the evaluated sequences; None: as trained
    slots: int = 1  # of the `SLOTS` of a GPU
    seconds: float = 600  # limit of its own

    def arguments(self, work: Path, extra: Sequence[str]) -> list[str]:
        """What the trainer gets."""
        return [
            f"--job.config_file={CONFIGS / self.config}.toml",
            f"--job.dump_folder={work / self.name}",
            f"--model.attention={self.attention}",
            *COMMON,
            *self.overrides,
            *extra,
        ]


def plan() -> list[Job]:
    """Every job, the most important first."""
    return [
        *_flip_flop(),
        *_words(seed=0),
        *_length_extrapolation(seed=0),
        *_mqrar(seed=0),
        *_mqrar_open_gates(seed=0),
        *_mqrar_lower_rate(seed=0),
        *_small_mqrar(seed=0),
        *(job for seed in (1, 2) for job in _again(seed)),
    ]


def _again(seed: int) -> Iterator[Job]:
    yield from _length_extrapolation(seed)
    yield from _words(seed)
    yield from _mqrar(seed)
    yield from _small_mqrar(seed)


def _flip_flop(seeds: int = 3) -> Iterator[Job]:
    for seed in range(seeds):
        for attention in ATTENTIONS:
            yield Job(f"flip_flop/{attention}_{seed}", "flip_flop", attention, _seeded(seed))


def _words(seed: int) -> Iterator[Job]:
    yield from _word_problem("s5_swaps", depths=(1, 2), seed=seed)
    yield from _word_problem("a5_word_problem", depths=(1, 2, 3, 4), seed=seed)


def _word_problem(dataset: str, depths: Sequence[int], seed: int) -> Iterator[Job]:
    """A run teaches every length up to its own; it is asked for twice as many."""
    for depth in depths:
        for attention in ATTENTIONS:
            yield Job(
                f"{dataset}/{attention}_{depth}_layers_{seed}",
                dataset,
                attention,
                (f"--model.flavor=task_{depth}x128x4", "--training.steps=6000", *_seeded(seed)),
                evaluated=42,
            )


def _length_extrapolation(seed: int) -> Iterator[Job]:
    """On the sources of the installed packages: the standard library alone is read too often.

    The seed is of the weights; every run reads the same text in the same order.
    """
    packages = sysconfig.get_path("purelib")
    if torch := importlib.util.find_spec("torch"):
        packages = str(Path(torch.origin or "").parents[1])
    folders = (f"--training.dataset_path={packages}", f"--validation.dataset_path={packages}")
    for attention in ("path", "default", "fox", "path_fox", "nope"):
        name = f"length_extrapolation/{attention}_{seed}"
        overrides = (*folders, "--training.steps=1500", f"--debug.seed={seed}")
        yield Job(name, "length_extrapolation", attention, overrides, slots=SLOTS)


def _mqrar(seed: int) -> Iterator[Job]:
    in_minutes = (
        *("--training.mixed_precision_param=bfloat16", "--training.local_batch_size=32"),
        "--training.steps=4000",
    )
    for n_back in (1, 2, 3, 4):
        for attention in ATTENTIONS:
            yield Job(
                f"mqrar/{attention}_{n_back}_back_{seed}",
                "mqrar",
                attention,
                (f"--task.mqrar.n_back={n_back}", *in_minutes, *_seeded(seed)),
                slots=2,
            )


def _mqrar_open_gates(seed: int) -> Iterator[Job]:
    """Gates that start at 0.5 hide what lies ten tokens back; 0.998 keeps a fifth over 768."""
    for job in _mqrar(seed):
        if job.attention in ("path_fox", "fox"):
            name = job.name.replace("mqrar/", "mqrar_open_gates/")
            overrides = (*job.overrides, "--model.path.gate_start=0.998")
            yield replace(job, name=name, overrides=overrides)


def _mqrar_lower_rate(seed: int) -> Iterator[Job]:
    """RoPE learns nothing at the rate of the others; at a third of it, late."""
    for job in _mqrar(seed):
        if job.attention == "default":
            name = job.name.replace("mqrar/", "mqrar_lower_rate/")
            overrides = (*job.overrides, "--optimizer.lr=3e-4", "--training.steps=5000")
            yield replace(job, name=name, overrides=overrides)


def _small_mqrar(seed: int) -> Iterator[Job]:
    """For a CPU: each seed in half an hour on two cores."""
    small = (
        *("--model.flavor=task_2x64", "--training.seq_len=128", "--task.mqrar.pairs=8"),
        *("--training.local_batch_size=32", "--training.steps=500", "--validation.no-enable"),
    )
    for n_back in (1, 2, 3, 4):
        for attention in ATTENTIONS:
            name = f"mqrar_small/{attention}_{n_back}_back_{seed}"
            overrides = (f"--task.mqrar.n_back={n_back}", *small, *_seeded(seed))
            yield Job(name, "mqrar", attention, overrides)


def _seeded(seed: int) -> tuple[str, ...]:
    return (f"--debug.seed={seed}", f"--task.seed={seed}")


def run(job: Job, results: Path, work: Path, predictions: int, extra: Sequence[str]) -> None:
    """Train, evaluate and write the result, in this process."""
    from torchtitan.tools.logging import init_logger

    from path_backend.integration.commands import evaluate
    from path_backend.integration.torchtitan.job import load_job

    init_logger()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # 0: any free one
    folder = work / job.name
    shutil.rmtree(folder, ignore_errors=True)  # the trainer would go on from there
    arguments = job.arguments(work, extra)
    command = ("path-backend", "experiments", "--run", job.name)
    config = load_job(arguments)
    started = time.monotonic()
    _train(config)
    seconds = time.monotonic() - started
    result = evaluate.evaluate(
        config,
        evaluate.find_checkpoint(folder / config.checkpoint.folder, None),
        predictions=predictions,
        seq_len=job.evaluated,
        command=shlex.join([*command, f"--predictions={predictions}", *extra]),
    )
    curves = _curves(folder / config.metrics.save_tb_folder)
    training = {"seconds": round(seconds, 1), "steps": config.training.steps, "curves": curves}
    result |= {"experiment": job.name, "trainer": shlex.join(arguments), "training": training}
    _write(results / f"{job.name}.json", result)
    shutil.rmtree(folder)


def _train(config) -> None:
    import torch.distributed as dist
    from torchtitan.train import Trainer

    trainer = Trainer(config)
    try:
        trainer.train()
    finally:
        trainer.close()
    dist.destroy_process_group()


def _curves(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard has of losses, validation errors and the layers' statistics, by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves: dict[str, dict[int, float]] = {}
    for path in sorted(folder.rglob("events.out.*")):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        for name in events.Tags()["scalars"]:
            wanted = ("loss_metrics/global_avg_loss", "validation_metrics/loss", "grad_norm")
            if name in (*wanted, "validation_metrics/error") or name.startswith("path/"):
                curves[name] = {e.step: float(f"{e.value:.4g}") for e in events.Scalars(name)}
    return curves


@dataclass
class _Running:
    job: Job
    gpu: int
    process: subprocess.Popen
    log: Path
    deadline: float


class Pool:
    """Runs jobs in their order, each in a process, on GPUs with enough free slots."""

    def __init__(
        self,
        gpus: Sequence[str],
        slots: int,
        results: Path,
        work: Path,
        arguments: Sequence[str],
    ):
        """`arguments` are for the process of each job."""
        self.gpus, self.slots = gpus, slots
        self.free = [slots] * len(gpus)
        self.results, self.work, self.arguments = results, work, arguments
        self.running: list[_Running] = []

    def run(self, jobs: Sequence[Job], seconds: float) -> None:
        """Until all are done, or `seconds` are over: then what still runs is killed."""
        end = time.monotonic() + seconds
        waiting, reason = list(jobs), "interrupted"
        try:
            while (waiting or self.running) and time.monotonic() < end:
                while waiting and max(self.free) >= self._slots(waiting[0]):
                    self._start(waiting.pop(0))
                self._collect()
                time.sleep(0.1)
            reason = "the time of all jobs was over"
        finally:
            for running in list(self.running):
                self._kill(running, f"killed: {reason}")
        if waiting:
            print(f"not started: {', '.join(job.name for job in waiting)}", flush=True)

    def _start(self, job: Job) -> None:
        gpu = self.free.index(max(self.free))
        self.free[gpu] -= self._slots(job)
        log = self.work / f"{job.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "path_backend.integration", "experiments"]
        command += [f"--run={job.name}", f"--results={self.results}", f"--work={self.work}"]
        environment = (
            {"OMP_NUM_THREADS": "1"} | os.environ | {"CUDA_VISIBLE_DEVICES": self.gpus[gpu]}
        )
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, *self.arguments],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # to kill its data loader with it
            )
        deadline = time.monotonic() + job.seconds
        self.running.append(_Running(job, gpu, process, log, deadline))

    def _collect(self) -> None:
        for running in list(self.running):
            code = running.process.poll()
            if code is not None:
                self._end(running, f"exit {code}")
            elif time.monotonic() > running.deadline:
                self._kill(running, f"killed after {running.job.seconds:.0f} s")

    def _kill(self, running: _Running, reason: str) -> None:
        os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait()
        self._end(running, reason)

    def _end(self, running: _Running, reason: str) -> None:
        """`reason` is left if there is no result; one that is there counts, whatever came after."""
        self.running.remove(running)
        self.free[running.gpu] += self._slots(running.job)
        name = running.job.name
        failed = self.results / f"{name}.failed.json"
        if (self.results / f"{name}.json").exists():
            failed.unlink(missing_ok=True)
            print(f"done: {name}", flush=True)
            return
        tail = running.log.read_text(errors="replace").splitlines()[-30:]
        _write(failed, {"experiment": name, "failure": reason, "log": tail})
        print(f"failed: {name}: {reason}", flush=True)

    def _slots(self, job: Job) -> int:
        return min(job.slots, self.slots)


def _write(path: Path, content: dict[str, Any]) -> None:
    """All or nothing: a file that exists is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def select(jobs: Sequence[Job], patterns: Sequence[str], results: Path) -> list[Job]:
    """Jobs without a result, in the order of the patterns, then of the plan.

    Raises ValueError for a pattern that no job matches.
    """
    chosen: dict[str, Job] = {}
    for pattern in patterns or ["*"]:
        matching = [job for job in jobs if fnmatch.fnmatchcase(job.name, pattern)]
        if not matching:
            raise ValueError(f"expected a pattern of job names such as 'mqrar/*', got {pattern!r}")
        chosen |= {job.name: job for job in matching}
    return [job for job in chosen.values() if not (results / f"{job.name}.json").exists()]


def _gpus() -> list[str]:
    """Numbers of the GPUs of this machine; one without a number if there is none."""
    import torch

    return [str(i) for i in range(torch.cuda.device_count())] or [""]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="path-backend experiments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("patterns", nargs="*", help="names of jobs, with * and ?; default: all")
    parser.add_argument("--run", metavar="NAME", help="run this job in this process")
    parser.add_argument("--list", action="store_true", help="print the names of what would run")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument(
        "--work", type=Path, default=Path("outputs/experiments"), help="folder of logs, checkpoints"
    )
    parser.add_argument(
        "--predictions",
        type=positive_integer,
        default=1_000_000,
        help="per evaluation set of a task",
    )
    parser.add_argument(
        "--slots",
        type=positive_integer,
        default=SLOTS,
        help="of a GPU; a small job takes one, a large one all",
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="limit of all jobs")
    parser.add_argument(
        "--gpus", metavar="0,1", help="numbers of the GPUs to use (default: all, or the CPU)"
    )
    options, extra = parser.parse_known_args(arguments)
    jobs = plan()
    if options.run:
        job = next((job for job in jobs if job.name == options.run), None)
        if job is None:
            raise ValueError(f"--run must be a name that --list prints, got {options.run!r}")
        run(job, options.results, options.work, options.predictions, extra)
        return
    jobs = select(jobs, options.patterns, options.results)
    if options.list:
        print("\n".join(job.name for job in jobs))
        return
    gpus = _gpus()
    chosen = options.gpus.split(",") if options.gpus else gpus
    if unknown := set(chosen) - set(gpus):
        there = ", ".join(filter(None, gpus)) or "none"
        raise ValueError(
            f"--gpus must be numbers of GPUs of this machine, with commas (there: {there}), "
            f"got {', '.join(sorted(unknown))}"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # jobs end with us
    arguments = [f"--predictions={options.predictions}", *extra]
    pool = Pool(chosen, options.slots, options.results, options.work, arguments)
    pool.run(jobs, options.seconds)


if __name__ == "__main__":
    main()
