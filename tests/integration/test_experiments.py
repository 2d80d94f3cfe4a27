"""The list of experiments and the pool that runs it: order, limits, failures, what is skipped."""

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
from path_backend.integration.commands import results as store
from path_backend.integration.commands.experiments import Job, Pool, select
from path_backend.integration.torchtitan.job import load_job, model_args

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
mkdir -p "$results" && echo "{\\"name\\": \\"$name\\"}" >>"$results/group.jsonl"
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
    """Returns a job called group/<name>_0."""
    return Job("group", name, 0, "flip_flop", **options)


def done(folder):
    return sorted(record["name"] for record in store.load(folder, "group"))


def reasons(folder):
    return {record["name"]: record["failure"] for record in store.failures(folder)}


@pytest.fixture(scope="module")
def plan():
    return experiments.plan()


def test_plan(plan, monkeypatch):
    """Catches two jobs that write one result, or one that its TOML file does not allow."""
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
    """Catches seeds that repeat a run, or draw other weights but the same sequences."""
    jobs = {job.name: job for job in plan}
    for seed in range(3):
        for name in (f"flip_flop/path_{seed}", f"mqrar/path_2_back_{seed}"):
            assert {f"--debug.seed={seed}", f"--task.seed={seed}"} <= {*jobs[name].overrides}
        text = jobs[f"length_extrapolation/path_{seed}"].overrides
        assert {f"--debug.seed={seed}", "--training.steps=1500"} <= {*text}


def test_fields_name_a_job(plan):
    """Catches a field that the name shows and the job lacks, or the other way round."""
    jobs = {job.name: job for job in plan}
    deep = jobs["a5_word_problem/path_fox_3_layers_1"]
    assert (deep.attention, deep.layers, deep.n_back, deep.seed) == ("path_fox", 3, None, 1)
    back = jobs["mqrar_open_gates/fox_4_back_0"]
    assert (back.experiment, back.layers, back.n_back, back.seed) == (
        "mqrar_open_gates",
        None,
        4,
        0,
    )
    for job in [deep, back, *{job.experiment: job for job in plan}.values()]:
        config = load_job(job.arguments(ROOT / "outputs", []))
        assert config.debug.seed == job.seed
        assert job.n_back in (None, config.task.mqrar.n_back)
        assert job.layers in (None, model_args(config).n_layers)


def test_select(plan, tmp_path):
    """Catches a finished job run again, a failed one not, or the order of the patterns lost."""
    (tmp_path / "flip_flop.jsonl").write_text('{"name": "flip_flop/path_0"}\n')
    (tmp_path / "failures.jsonl").write_text('{"name": "flip_flop/path_1"}\n')
    chosen = select(plan, ["mqrar/path_1_back_0", "flip_flop/path_?"], tmp_path)
    assert [job.name for job in chosen] == [
        "mqrar/path_1_back_0",
        "flip_flop/path_1",
        "flip_flop/path_2",
    ]
    with pytest.raises(ValueError, match=r"pattern of job names such as .*, got 'flipflop/\*'"):
        select(plan, ["flipflop/*"], tmp_path)


def test_unknown_run():
    """Catches a mistyped job answered without its name."""
    with pytest.raises(ValueError, match=r"--run must be a name that --list prints, got 'path'"):
        experiments.main(["--run=path"])


def test_pool(tmp_path, worker, capsys):
    """Catches a job not run, a failure that stops the others or leaves no reason."""
    make_pool(tmp_path).run([job("a"), job("fail"), job("b")], 30)
    assert done(tmp_path / "results") == ["group/a_0", "group/b_0"]
    assert store.failures(tmp_path / "results") == [
        {
            "name": "group/fail_0",
            "experiment": "group",
            "failure": "exit 3",
            "log": ["no memory"],
        }
    ]
    output = capsys.readouterr().out
    assert "done: group/a_0\n" in output and "failed: group/fail_0: exit 3\n" in output


def test_a_result_decides(tmp_path, worker):
    """Catches a finished job called failed for a bad exit, or one without a result called done."""
    make_pool(tmp_path).run([job("crash"), job("lost")], 30)
    assert done(tmp_path / "results") == ["group/crash_0"]
    assert reasons(tmp_path / "results") == {"group/lost_0": "exit 0"}


def test_slots(tmp_path, worker):
    """Catches a GPU with more jobs than slots, one left idle, or a large job beside others."""
    jobs = [*(job(f"slow{i}") for i in range(4)), job("large", slots=16), job("last")]
    started = time.monotonic()
    make_pool(tmp_path, gpus=("0", "1"), slots=2).run(jobs, 30)
    assert time.monotonic() - started > 0.6
    lines = worker.read_text().splitlines()
    assert sorted(lines[:4]) == [f"{i % 2} group/slow{i}_0" for i in (0, 2, 1, 3)]
    assert sorted(line[2:] for line in lines[4:]) == ["group/large_0", "group/last_0"]


def test_limits(tmp_path, worker, capsys):
    """Catches a job or the whole run beyond its time, children of a killed job left behind."""
    jobs = [job("hang", seconds=0.5), job("slow"), job("hang2"), job("never", slots=4)]
    make_pool(tmp_path).run(jobs, 2)
    assert reasons(tmp_path / "results") == {
        "group/hang_0": "killed after 0 s",
        "group/hang2_0": "killed: the time of all jobs was over",
    }
    assert done(tmp_path / "results") == ["group/slow_0"]
    assert "not started: group/never_0" in capsys.readouterr().out
    for child in map(int, (tmp_path / "log.children").read_text().split()):
        assert not is_running(child)


def test_jobs_end_with_the_command(tmp_path, worker, monkeypatch):
    """Catches jobs that go on after `kill`, `timeout` or a scheduler ended the command."""
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
    assert reasons(tmp_path / "r") == {"group/hang_0": "killed: interrupted"}


def test_gpus(tmp_path, worker, monkeypatch):
    """Catches a name of a job taken for a GPU, which starts the whole plan, or a GPU not there."""
    monkeypatch.setattr(experiments, "plan", lambda: [job("a"), job("b")])
    monkeypatch.setattr(experiments, "_gpus", lambda: ["0", "1", "2"])
    folders = [f"--results={tmp_path / 'r'}", f"--work={tmp_path / 'w'}"]
    with pytest.raises(ValueError, match=r"of this machine, with commas \(there: 0, 1, 2\), got 7"):
        experiments.main([*folders, "--gpus", "2,7", "group/a_0"])
    before = signal.getsignal(signal.SIGTERM)
    experiments.main([*folders, "--gpus", "2", "group/a_0"])
    signal.signal(signal.SIGTERM, before)
    assert worker.read_text() == "2 group/a_0\n"


@pytest.mark.parametrize("option", ["--slots", "--predictions"])
@pytest.mark.parametrize("value", ["0", "-3", "abc"])
def test_positive_options(option, value, capsys):
    """Catches no slots, which are no limit, and a text refused without what was expected."""
    with pytest.raises(SystemExit):
        experiments.main(["--list", f"{option}={value}"])
    expected = f"argument {option}: must be an integer of at least 1, got '{value}'"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, fields",
    [
        ("flip_flop/path_0", {"layers": 1, "width": 64, "heads": 2, "length": 512}),
        ("s5_swaps/nope_2_layers_1", {"layers": 2, "width": 128, "heads": 4, "length": 42}),
    ],
)
def test_one_job(tmp_path, name, fields):
    """Catches a job that trains and leaves no scores, no curves, or its checkpoint."""
    command = [sys.executable, "-m", "path_backend.integration", "experiments", f"--run={name}"]
    finished = subprocess.run(
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
    assert finished.returncode == 0, finished.stderr[-3000:]
    job = next(job for job in experiments.plan() if job.name == name)
    (result,) = store.load(tmp_path, job.experiment)
    expected = {"name": name, "attention": job.attention, "seed": job.seed, "steps": 2, **fields}
    assert {key: result[key] for key in expected} == expected
    assert f"--run {name} --predictions=50 --training.steps=2" in result["command"]
    assert f"--model.attention={job.attention}" in result["trainer"]
    assert result["date"] and result["device"] and result["versions"]["torch"]
    assert all(score["predictions"] >= 50 for score in result["sets"].values())
    (line,) = store.load_curves(tmp_path, job.experiment)
    steps = {name: group["steps"] for group in line["curves"] for name in group["values"]}
    assert steps["loss_metrics/global_avg_loss"] == [1]  # and every 200th
    assert steps["validation_metrics/error"] == [1, 2]
    assert not (tmp_path / "work" / name).exists()
