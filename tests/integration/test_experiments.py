"""The list of experiments and the pool that runs it: order, limits, failures, what is skipped."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from trainer import ROOT

from path_backend.integration.commands import experiments
from path_backend.integration.commands.experiments import Job, Pool, select
from path_backend.integration.torchtitan.job import load_job

# Stands for Python in the pool: does what the name of the job says.
WORKER = """#!/usr/bin/env bash
for argument in "$@"; do
    case "$argument" in
        --run=*) name="${argument#--run=}" ;;
        --results=*) results="${argument#--results=}" ;;
    esac
done
echo "$CUDA_VISIBLE_DEVICES $name" >>"$WORKER_LOG"
case "$name" in
    *fail*) echo "no memory"; exit 3 ;;
    *hang*) sleep 60 & echo $! >>"$WORKER_LOG.children"; wait ;;
    *slow*) sleep 0.6 ;;
esac
case "$name" in
    *lost*) exit 0 ;;
esac
mkdir -p "$results/$(dirname "$name")" && echo '{}' >"$results/$name.json"
case "$name" in
    *crash*) exit 4 ;;
esac
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Returns the log of the jobs that were started: lines of GPU and name."""
    script = tmp_path / "python"
    script.write_text(WORKER)
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setenv("WORKER_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def make_pool(tmp_path, gpus=("0",), slots=4):
    return Pool(gpus, slots, tmp_path / "results", tmp_path / "work", ["--training.steps=1"])


def is_running(process):
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"  # an orphan may stay a zombie


def job(name, **options):
    return Job(f"group/{name}", "flip_flop", "path", **options)


@pytest.fixture(scope="module")
def plan():
    return experiments.plan()


def test_plan(plan, monkeypatch):
    """Two jobs that write one result, or one that its TOML file does not allow."""
    monkeypatch.chdir(ROOT)
    names = [job.name for job in plan]
    assert len(set(names)) == len(names)
    first = {(job.config, job.attention): job for job in reversed(plan)}
    assert len(first) == 4 * len(experiments.ATTENTIONS) + 5
    for job in first.values():
        config = load_job(job.arguments(ROOT / "outputs", ["--training.steps=3"]))
        assert config.model.attention == job.attention
        assert config.training.steps == 3
        assert config.job.dump_folder.endswith(f"outputs/{job.name}")


def test_seeds_differ(plan):
    """Seeds that repeat a run, or draw other weights but the same sequences."""
    jobs = {job.name: job for job in plan}
    for seed in range(3):
        for name in (f"flip_flop/path_{seed}", f"mqrar/path_2_back_{seed}"):
            assert {f"--debug.seed={seed}", f"--task.seed={seed}"} <= {*jobs[name].overrides}
        text = jobs[f"length_extrapolation/path_{seed}"].overrides
        assert {f"--debug.seed={seed}", "--training.steps=1500"} <= {*text}


def test_select(plan, tmp_path):
    """A finished job run again, a failed one not, or the order of the patterns lost."""
    (tmp_path / "flip_flop").mkdir()
    (tmp_path / "flip_flop" / "path_0.json").touch()
    (tmp_path / "flip_flop" / "path_1.failed.json").touch()
    chosen = select(plan, ["mqrar/path_1_back_0", "flip_flop/path_?"], tmp_path)
    assert [job.name for job in chosen] == [
        "mqrar/path_1_back_0",
        "flip_flop/path_1",
        "flip_flop/path_2",
    ]
    with pytest.raises(ValueError, match=r"pattern of job names such as .*, got 'flipflop/\*'"):
        select(plan, ["flipflop/*"], tmp_path)


def test_unknown_run():
    """A mistyped job answered without its name."""
    with pytest.raises(ValueError, match=r"--run must be a name that --list prints, got 'path'"):
        experiments.main(["--run=path"])


def test_pool(tmp_path, worker, capsys):
    """A job not run, a failure that stops the others or leaves no reason."""
    jobs = [job("a"), job("fail"), job("b")]
    failed = tmp_path / "results" / "group" / "a.failed.json"
    failed.parent.mkdir(parents=True)
    failed.touch()  # of an earlier attempt
    make_pool(tmp_path).run(jobs, 30)
    results = sorted(path.name for path in (tmp_path / "results" / "group").iterdir())
    assert results == ["a.json", "b.json", "fail.failed.json"]
    failure = json.loads((tmp_path / "results/group/fail.failed.json").read_text())
    assert failure == {"experiment": "group/fail", "failure": "exit 3", "log": ["no memory"]}
    output = capsys.readouterr().out
    assert "done: group/a\n" in output and "failed: group/fail: exit 3\n" in output


def test_a_result_decides(tmp_path, worker):
    """A finished job called failed since its process ended badly, or one without a result done."""
    make_pool(tmp_path).run([job("crash"), job("lost")], 30)
    results = sorted(path.name for path in (tmp_path / "results" / "group").iterdir())
    assert results == ["crash.json", "lost.failed.json"]


def test_slots(tmp_path, worker):
    """A GPU with more jobs than slots, one left idle, or a large job beside others."""
    jobs = [*(job(f"slow{i}") for i in range(4)), job("large", slots=16), job("last")]
    started = time.monotonic()
    make_pool(tmp_path, gpus=("0", "1"), slots=2).run(jobs, 30)
    assert time.monotonic() - started > 0.6
    lines = worker.read_text().splitlines()
    assert sorted(lines[:4]) == [f"{i % 2} group/slow{i}" for i in (0, 2, 1, 3)]
    assert sorted(line[2:] for line in lines[4:]) == ["group/large", "group/last"]


def test_limits(tmp_path, worker, capsys):
    """A job or the whole run beyond its time, children of a killed job left behind."""
    jobs = [job("hang", seconds=0.5), job("slow"), job("hang2"), job("never", slots=4)]
    make_pool(tmp_path).run(jobs, 2)
    folder = tmp_path / "results" / "group"
    reasons = {p.name: json.loads(p.read_text())["failure"] for p in folder.glob("*.failed.json")}
    assert reasons == {
        "hang.failed.json": "killed after 0 s",
        "hang2.failed.json": "killed: the time of all jobs was over",
    }
    assert (folder / "slow.json").exists()
    assert "not started: group/never" in capsys.readouterr().out
    for child in map(int, (tmp_path / "log.children").read_text().split()):
        assert not is_running(child)


def test_jobs_end_with_the_command(tmp_path, worker, monkeypatch):
    """Jobs that go on after `kill`, `timeout` or a scheduler ended the command."""
    monkeypatch.setattr(experiments, "plan", lambda: [job("hang")])
    monkeypatch.setattr(experiments, "_gpus", lambda: [""])
    children = tmp_path / "log.children"

    def terminate():
        while not children.exists() or not children.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate, daemon=True).start()
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="143"):
            experiments.main([f"--results={tmp_path / 'r'}", f"--work={tmp_path / 'w'}"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not is_running(int(children.read_text()))
    failure = json.loads((tmp_path / "r/group/hang.failed.json").read_text())
    assert failure["failure"] == "killed: interrupted"


def test_gpus(tmp_path, worker, monkeypatch):
    """Catches a name of a job taken for a GPU, which starts the whole plan, or a GPU not there."""
    monkeypatch.setattr(experiments, "plan", lambda: [job("a"), job("b")])
    monkeypatch.setattr(experiments, "_gpus", lambda: ["0", "1", "2"])
    folders = [f"--results={tmp_path / 'r'}", f"--work={tmp_path / 'w'}"]
    with pytest.raises(ValueError, match=r"of this machine, with commas \(there: 0, 1, 2\), got 7"):
        experiments.main([*folders, "--gpus", "2,7", "group/a"])
    before = signal.getsignal(signal.SIGTERM)
    experiments.main([*folders, "--gpus", "2", "group/a"])
    signal.signal(signal.SIGTERM, before)
    assert worker.read_text() == "2 group/a\n"


@pytest.mark.parametrize("option", ["--slots", "--predictions"])
@pytest.mark.parametrize("value", ["0", "-3", "abc"])
def test_positive_options(option, value, capsys):
    """Catches no slots, which are no limit, and a text refused without what was expected."""
    with pytest.raises(SystemExit):
        experiments.main(["--list", f"{option}={value}"])
    expected = f"argument {option}: must be an integer of at least 1, got '{value}'"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("name", ["flip_flop/path_0", "s5_swaps/nope_1_layers_0"])
def test_one_job(tmp_path, name):
    """A job that trains and leaves no scores, no curves, or its checkpoint."""
    command = [sys.executable, "-m", "path_backend.integration", "experiments", f"--run={name}"]
    done = subprocess.run(
        [
            *(*command, f"--results={tmp_path}", f"--work={tmp_path / 'work'}"),
            *("--predictions=50", "--training.steps=2", "--training.local_batch_size=4"),
            *("--validation.freq=2", "--validation.steps=1", "--validation.local_batch_size=4"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / f"{name}.json").read_text())
    assert result["experiment"] == name and result["step"] == 2
    assert f"--run {name} --predictions=50 --training.steps=2" in result["command"]
    assert all(score["predictions"] >= 50 for score in result["sets"].values())
    assert result["training"]["steps"] == 2
    for curve in ("loss_metrics/global_avg_loss", "validation_metrics/error"):
        assert "1" in result["training"]["curves"][curve]
    assert not (tmp_path / "work" / name).exists()
