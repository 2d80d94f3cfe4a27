"""The script that trains one model on several layouts, measure_layouts.py."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import measure_layouts
import parity
import pytest
import torch
import trainer

from path_backend.integration.torchtitan.job import load_job

NAN = float("nan")
FAILED = "failed: rank 1: exit 1, ValueError: no / here"
TINY = [f"--config={trainer.TINY}", *"--length 128 --steps 4 --attention path".split()]


def rows_of(capsys):
    """The rows that were printed, by column."""
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in x.split("|")[1:-1]] for x in lines]
    assert header == list(measure_layouts.COLUMNS)
    return [dict(zip(header, row, strict=True)) for row in rows]


def a_run(losses=(8.0, 7.0, 6.0, 5.0), norms=(1.0, 1.0, 1.0, 1.0), speeds=(1.0, 2.0, 3.0, 4.0)):
    """A finished run, as the trainer returns it."""
    logged = {
        "loss_metrics/global_avg_loss": losses,
        "grad_norm": norms,
        "throughput(tps)": speeds,
        "mfu(%)": speeds,
        "memory/max_reserved(GiB)": speeds,
    }
    return trainer.Run(Path(), {name: dict(enumerate(x)) for name, x in logged.items()}, "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs a layout may be left out")
def test_rows(capsys):
    """Layouts that train on different sequences, so that no difference of them tells anything."""
    options = (*TINY, "--layouts", "FSDP2", "one GPU", "--training.max_norm=0.5")
    assert measure_layouts.main([*options]) == 0
    one, two = rows_of(capsys)
    for row in (one, two):
        assert row["attention"] == "`path`"
        losses = [float(x) for x in row["losses"].split(", ")]
        assert len(losses) == 4 and 0 < losses[2] < losses[0]
    assert (one["layout"], one["difference"], one["verdict"]) == ("one GPU", "–", "reference")
    assert (two["layout"], two["verdict"]) == ("FSDP2", "equals one GPU")
    difference, of_norm = (float(x) for x in two["difference"].split(", "))
    assert difference <= 1e-6 and of_norm <= 1e-5


@pytest.mark.parametrize(
    "run, expected",
    [
        (a_run(), ("0e+00, 0e+00", True)),
        (a_run(losses=(8.0, 7.0, 6.003, 5.0)), ("5e-04, 0e+00", True)),
        (a_run(losses=(8.0, 7.0, 6.01, 5.0)), ("2e-03, 0e+00", False)),
        (a_run(norms=(1.0, 0.9, 1.0, 1.0)), ("0e+00, 1e-01", False)),
        (a_run(losses=(8.0, 7.0, NAN, NAN)), ("nan, 0e+00", False)),
        (a_run(norms=(1.0, NAN, 1.0, 1.0)), ("0e+00, nan", False)),
    ],
)
def test_compare(run, expected):
    """A nan that counts as no difference, or a verdict that forgets the gradient norm."""
    assert measure_layouts.compare(run, a_run(), parity.BF16) == expected


def test_budget_of_a_precision():
    """Runs in bf16 told to differ, or runs in fp32 that may."""
    args, _ = measure_layouts.parse([])
    assert measure_layouts.budget_of(args, []) == parity.BF16
    fp32 = ["--training.mixed_precision_param=float32"]
    assert measure_layouts.budget_of(args, fp32) == parity.FP32


def test_speed_is_that_of_undisturbed_steps():
    """The first step, which compiles, or the last two, which the profiler slows."""
    speeds = (1.0, 20.0, 30.0, 40.0, 5.0, 6.0)
    tokens, *_ = measure_layouts.speed(a_run(speeds=speeds), measure_layouts.LAYOUTS[0])
    assert tokens == "30"


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs a layout may be left out")
@pytest.mark.parametrize(
    "failing, verdicts",
    [
        ("CP2", ["reference", FAILED, "equals one GPU"]),
        ("one GPU", [FAILED, "without one GPU", "without one GPU"]),
        ("seed", [FAILED]),
    ],
)
def test_a_run_that_fails(capsys, monkeypatch, failing, verdicts):
    """The rows after it lost, compared with another than the first, or a status of success."""

    def train(folder, *arguments, **options):
        if folder.name == failing and "--model.attention=path" in arguments:
            raise trainer.TrainerError("rank 1: exit 1\nValueError: no | here\n[W] left a group\n")
        return a_run()

    monkeypatch.setattr(trainer, "train", train)
    layouts = ["--layouts", "one GPU", "CP2", "CP4"]
    assert measure_layouts.main([*TINY, "fox", *layouts]) == 1
    *rows, first, second, third = rows_of(capsys)
    assert [row["verdict"] for row in rows] == verdicts
    compared = [row["verdict"] for row in rows if row["difference"]]
    assert compared == [x for x in verdicts if x in ("reference", "equals one GPU")]
    assert first["verdict"] == "reference" and second["verdict"] == third["verdict"]


def test_a_run_out_of_time(tmp_path):
    """A limit that is not handed on, or a rank that has not printed yet and hides it."""
    verdict = measure_layouts.attempt(tmp_path, timeout=0.0)
    assert verdict == "failed: rank 0: did not end in 0 s"


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_ranks_end_with_the_script(tmp_path):
    """Ranks that keep the GPUs after a time limit has ended the script."""
    command = [sys.executable, measure_layouts.__file__, *TINY, "--training.steps=100000"]
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(trainer.ROOT)}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        wait_for(lambda: [*tmp_path.rglob("one GPU/*/rank_0.log")])
        process.terminate()
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
        wait_for(lambda: not group_lives(process.pid))
    finally:
        if group_lives(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def group_lives(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("layout", measure_layouts.LAYOUTS, ids=str)
@pytest.mark.parametrize("attention", ["path", "path_fox", "default"])
def test_the_job_of_every_row_is_read(attention, layout):
    """An argument that torchtitan does not know found only where the GPUs are."""
    args, overrides = measure_layouts.parse(["--compile.no-enable"])
    job = load_job(
        [
            f"--job.config_file={args.config}",
            *measure_layouts.job_of(args, attention),
            *measure_layouts.options_of(layout, args),
            *overrides,
        ]
    )
    assert (job.model.attention, job.model.flavor) == (attention, "1B")
    assert job.debug.seed is not None  # else each call of the script has another seed checkpoint
    assert job.training.global_batch_size % (layout.shard * job.training.local_batch_size) == 0
    assert job.training.seq_len % (2 * layout.context * layout.tensor) == 0
    assert job.parallelism.context_parallel_degree == layout.context
    assert not job.compile.enable


def test_exposed_communication_of_a_trace(tmp_path):
    """Times of the host counted, or transfers under kernels taken for exposed ones."""
    events = [
        ("kernel", "matmul", 1000, 4000),
        ("kernel", "ncclDevKernel_AllGather", 4000, 3000),
        ("gpu_memcpy", "Memcpy DtoD", 9000, 1000),
        ("cpu_op", "nccl:all_gather", 0, 90000),
    ]
    trace = tmp_path / "trace.json"
    keys = ("cat", "name", "ts", "dur")
    events = [dict(zip(keys, event, strict=True)) for event in events]
    trace.write_text(json.dumps({"traceEvents": [*events, {"name": "process_name"}]}))
    assert measure_layouts.communication(trace) == "2 of 9 ms"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--steps=3", "--steps must be at least 4, got 3"),
        ("--length=100", "--length of CP4 must be a multiple of 8, got 100"),
        ("--sequences=1", "--sequences of FSDP2 x CP4 must be a multiple of 2, got 1"),
        ("--layouts CP4", "--layouts must name one for 2 GPUs or fewer, got none"),
    ],
)
def test_misuse(capsys, monkeypatch, arguments, message):
    """A median of no step at all, a row that fails after the others, or success without a row."""
    gpus = 2 if "CP4" in arguments else 8
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(SystemExit) as end:
        measure_layouts.parse([*"--layouts CP4".split(), "FSDP2 x CP4", *arguments.split()])
    assert end.value.code and message in capsys.readouterr().err


def test_layouts_of_too_many_gpus(capsys, monkeypatch):
    """A layout left out without a word, or one that could not have run and is checked."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    args, _ = measure_layouts.parse(["--layouts", "CP2", "CP4", "--length=4"])
    assert [x.name for x in args.layouts] == ["CP2"]
    assert "CP4 needs 4 GPUs, got 2" in capsys.readouterr().err
