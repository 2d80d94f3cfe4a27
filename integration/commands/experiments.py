"""Train and evaluate the experiments of RESULTS.md on the GPUs of this machine.

    path-backend experiments                          what has no result yet, in order of importance
    path-backend experiments 'flip_flop/*' --seconds 600 --list
    path-backend experiments --run flip_flop/path_0   one job, in this process

Each job is a run of torchtitan's trainer in a process of its own, then an evaluation of its
checkpoint there, and leaves one line in `<experiment>.jsonl` of the results folder. Jobs with a
result are skipped; `--run` replaces it. A job that fails or takes too long leaves its reason and
the end of its log in `failures.jsonl`, and is tried again the next time. Further arguments override
keys of every job's TOML file, as the trainer's do.

Start it where `configs/` lies: TOML files name the tokenizer relative to it.
"""

import argparse
import fnmatch
import importlib.util
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

from path_backend.integration.commands import results as store
from path_backend.integration.commands.arguments import positive_integer
from path_backend.integration.commands.scores import ATTENTIONS

CONFIGS = Path("configs")
RESULTS = CONFIGS / "results"
COMMON = ("--checkpoint.interval=1000000", "--training.gc_freq=1000", "--metrics.log_freq=200")
# TensorBoard's scalars that are kept, beside those of the layers.
CURVES = (
    *("loss_metrics/global_avg_loss", "grad_norm"),
    *("validation_metrics/loss", "validation_metrics/error"),
)
SLOTS = 6  # of one GPU: alone, a small job keeps it busy a third of the time


@dataclass(frozen=True)
class Job:
    """One training with its evaluation.

    The fields that name it are stored with its result; nothing is read from the name again.
    """

    experiment: str
    attention: str
    seed: int
    config: str  # name of the TOML file
    layers: int | None = None  # None: as the TOML file says
    n_back: int | None = None  # of mqrar
    overrides: tuple[str, ...] = ()
    evaluated: int | None = None  # tokens of the evaluated sequences; None: as trained
    slots: int = 1  # of the `SLOTS` of a GPU
    seconds: float = 600  # limit of its own

    @property
    def name(self) -> str:
        """Returns the name on the command line, which is also that of the result."""
        parts = [self.attention]
        if self.layers is not None:
            parts.append(f"{self.layers}_layers")
        if self.n_back is not None:
            parts.append(f"{self.n_back}_back")
        return f"{self.experiment}/{'_'.join([*parts, str(self.seed)])}"

    def arguments(self, work: Path, extra: Sequence[str]) -> list[str]:
        """Returns the arguments of the trainer."""
        n_back = () if self.n_back is None else (f"--task.mqrar.n_back={self.n_back}",)
        return [
            f"--job.config_file={CONFIGS / self.config}.toml",
            f"--job.dump_folder={work / self.name}",
            f"--model.attention={self.attention}",
            *COMMON,
            *n_back,
            *self.overrides,
            *extra,
        ]


def plan() -> list[Job]:
    """Returns every job, the most important first."""
    return [
        *_flip_flop(),
        *_words(seed=0),
        *_length_extrapolation(seed=0),
        *_mqrar(seed=0),
        *_mqrar_open_gates(seed=0),
        *_mqrar_lower_rate(seed=0),
        *_mqrar_small(seed=0),
        *(job for seed in (1, 2) for job in _again(seed)),
    ]


def _again(seed: int) -> Iterator[Job]:
    yield from _length_extrapolation(seed)
    yield from _words(seed)
    yield from _mqrar(seed)
    yield from _mqrar_small(seed)


def _flip_flop(seeds: int = 3) -> Iterator[Job]:
    for seed in range(seeds):
        for attention in ATTENTIONS:
            yield Job("flip_flop", attention, seed, "flip_flop", overrides=_seeded(seed))


def _words(seed: int) -> Iterator[Job]:
    yield from _word_problem("s5_swaps", depths=(1, 2), seed=seed)
    yield from _word_problem("a5_word_problem", depths=(1, 2, 3, 4), seed=seed)


def _word_problem(dataset: str, depths: Sequence[int], seed: int) -> Iterator[Job]:
    """A run teaches every length up to its own; it is asked for twice as many."""
    for layers in depths:
        model = f"--model.flavor=task_{layers}x128x4"
        for attention in ATTENTIONS:
            yield Job(
                dataset,
                attention,
                seed,
                dataset,
                layers=layers,
                overrides=(model, "--training.steps=6000", *_seeded(seed)),
                evaluated=42,
            )


def _length_extrapolation(seed: int) -> Iterator[Job]:
    """Text is the sources of the installed packages: the standard library is read too often.

    The seed is of the weights; every run reads the same text in the same order. Stick-breaking is
    left out, since its memory is quadratic in the length.
    """
    packages = sysconfig.get_path("purelib")
    if torch := importlib.util.find_spec("torch"):
        packages = str(Path(torch.origin or "").parents[1])
    folders = (f"--training.dataset_path={packages}", f"--validation.dataset_path={packages}")
    overrides = (*folders, "--training.steps=1500", f"--debug.seed={seed}")
    experiment = "length_extrapolation"
    for attention in ATTENTIONS:
        if attention != "stick_breaking":
            yield Job(experiment, attention, seed, experiment, overrides=overrides, slots=SLOTS)


def _mqrar(seed: int) -> Iterator[Job]:
    in_minutes = (
        *("--training.mixed_precision_param=bfloat16", "--training.local_batch_size=32"),
        "--training.steps=4000",
    )
    for n_back in (1, 2, 3, 4):
        for attention in ATTENTIONS:
            overrides = (*in_minutes, *_seeded(seed))
            yield Job(
                "mqrar", attention, seed, "mqrar", n_back=n_back, overrides=overrides, slots=2
            )


def _mqrar_open_gates(seed: int) -> Iterator[Job]:
    """Gates that start at 0.5 hide what lies ten tokens back; 0.998 keeps a fifth over 768."""
    for job in _mqrar(seed):
        if job.attention in ("path_fox", "fox"):
            overrides = (*job.overrides, "--model.path.gate_start=0.998")
            yield replace(job, experiment="mqrar_open_gates", overrides=overrides)


def _mqrar_lower_rate(seed: int) -> Iterator[Job]:
    """RoPE learns nothing at the rate of the others; at a third of it, late."""
    for job in _mqrar(seed):
        if job.attention == "default":
            overrides = (*job.overrides, "--optimizer.lr=3e-4", "--training.steps=5000")
            yield replace(job, experiment="mqrar_lower_rate", overrides=overrides)


def _mqrar_small(seed: int) -> Iterator[Job]:
    """Small models are for a CPU: each seed takes half an hour on two cores."""
    small = (
        *("--model.flavor=task_2x64", "--training.seq_len=128", "--task.mqrar.pairs=8"),
        *("--training.local_batch_size=32", "--training.steps=500", "--validation.no-enable"),
    )
    for n_back in (1, 2, 3, 4):
        for attention in ATTENTIONS:
            overrides = (*small, *_seeded(seed))
            yield Job("mqrar_small", attention, seed, "mqrar", n_back=n_back, overrides=overrides)


def _seeded(seed: int) -> tuple[str, ...]:
    return (f"--debug.seed={seed}", f"--task.seed={seed}")


def run(job: Job, results: Path, work: Path, predictions: int, extra: Sequence[str]) -> None:
    """Trains, evaluates and stores the result, in this process."""
    from torchtitan.tools.logging import init_logger

    from path_backend.integration.commands import evaluate
    from path_backend.integration.data.scalars import read_scalars
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
    scalars = read_scalars(folder / config.metrics.save_tb_folder)
    curves = {n: c for n, c in scalars.items() if n in CURVES or n.startswith("path/")}
    store.save(results, describe(job, config, result, seconds, arguments), curves)
    shutil.rmtree(folder)


def describe(
    job: Job, config: Any, result: dict[str, Any], seconds: float, arguments: Sequence[str]
) -> store.Record:
    """Returns what is stored of a run: what it is, its scores, then what they depend on.

    `config` is torchtitan's job, `result` that of `evaluate`, `arguments` are the trainer's.
    """
    from path_backend.integration.torchtitan.job import model_args

    model, conditions = model_args(config), dict(result["job"])
    for known in ("attention", "seed"):
        conditions.pop(known)
    record = {
        "name": job.name,
        "experiment": job.experiment,
        "attention": job.attention,
        "layers": model.n_layers,
        "width": model.dim,
        "heads": model.n_heads,
        "n_back": job.n_back,
        "seed": job.seed,
        "parameters": result["parameters"],
        "steps": result["step"],
        "seconds": round(seconds, 1),
        "length": result.get("length"),
        "task": result.get("task"),
        "sets": result.get("sets"),
        "perplexity": result.get("perplexity"),
        **{key: result[key] for key in ("date", "device", "versions")},
        "job": {key: value for key, value in conditions.items() if value is not None},
        "command": result["command"],
        "trainer": list(arguments),
    }
    return {key: value for key, value in record.items() if value is not None}


def _train(config) -> None:
    import torch.distributed as dist
    from torchtitan.train import Trainer

    trainer = Trainer(config)
    try:
        trainer.train()
    finally:
        trainer.close()
    dist.destroy_process_group()


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
        """Runs jobs until all are done or `seconds` are over, and kills what then still runs."""
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
        """Keeps `reason` if there is no result; one counts, whatever came after it."""
        self.running.remove(running)
        self.free[running.gpu] += self._slots(running.job)
        job = running.job
        if job.name in _names(self.results, job.experiment):
            print(f"done: {job.name}", flush=True)
            return
        tail = running.log.read_text(errors="replace").splitlines()[-30:]
        failure = {"name": job.name, "experiment": job.experiment, "failure": reason, "log": tail}
        store.save_failure(self.results, failure)
        print(f"failed: {job.name}: {reason}", flush=True)

    def _slots(self, job: Job) -> int:
        return min(job.slots, self.slots)


def _names(results: Path, experiment: str) -> set[str]:
    return {record["name"] for record in store.load(results, experiment)}


def select(jobs: Sequence[Job], patterns: Sequence[str], results: Path) -> list[Job]:
    """Returns jobs without a result, in the order of the patterns, then of the plan.

    Raises ValueError for a pattern that no job matches.
    """
    chosen: dict[str, Job] = {}
    for pattern in patterns or ["*"]:
        matching = [job for job in jobs if fnmatch.fnmatchcase(job.name, pattern)]
        if not matching:
            raise ValueError(f"expected a pattern of job names such as 'mqrar/*', got {pattern!r}")
        chosen |= {job.name: job for job in matching}
    experiments = {job.experiment for job in chosen.values()}
    done = set().union(*(_names(results, experiment) for experiment in experiments))
    return [job for job in chosen.values() if job.name not in done]


def _gpus() -> list[str]:
    """Returns the numbers of this machine's GPUs; one without a number if there is none."""
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
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON lines")
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
