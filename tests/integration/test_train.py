"""Training through torchtitan's own entry point, as a user starts it."""

import os
import re
import subprocess
import sys

import pytest
from trainer import ROOT, TINY, TrainerError, train

FLAGS = ("default", "path", "path_fox", "fox")
BASELINES = ("nope", "stick_breaking")
RESUMABLE = ("--checkpoint.enable", "--checkpoint.interval=3", "--checkpoint.keep_latest_k=0")


@pytest.fixture(scope="module")
def stock_toml(tmp_path_factory):
    """The tiny job without this package's module: torchtitan as it is, on the CPU."""
    text = TINY.read_text()
    text = re.sub(r"custom_config_module = .*\n", "", text)
    text = text.replace('custom_import = "tiny_models"', 'custom_import = "stock_on_cpu"')
    path = tmp_path_factory.mktemp("stock") / "stock.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "attention, ranks",
    [*((flag, ranks) for flag in FLAGS for ranks in (1, 2)), *((flag, 2) for flag in BASELINES)],
)
def test_loss_falls(tmp_path, attention, ranks):
    """A value of the flag that does not train on one rank or with FSDP2 on two."""
    run = train(tmp_path, f"--model.attention={attention}", "--training.steps=24", ranks=ranks)
    assert len(run.loss) == 24
    assert ("Applied FSDP" in run.output) == (ranks == 2)
    assert max(run.loss[-4:]) < run.loss[0] - 0.5, run.loss


@pytest.mark.parametrize("attention", FLAGS)
def test_qwen3_with_tied_embeddings(tmp_path, attention):
    """torch 2.13 refuses the two FSDP2 groups of a tied embedding that torchtitan 0.2.2 makes."""
    arguments = ("--model.name=qwen3", f"--model.attention={attention}", "--training.steps=8")
    run = train(tmp_path, *arguments, ranks=2)
    assert run.loss[-1] < run.loss[0] - 0.5, run.loss


@pytest.mark.parametrize(
    "name, ranks", [("llama3", 1), ("llama3", 2), ("qwen3", 1)], ids=lambda x: str(x)
)
def test_default_gives_the_stock_losses(tmp_path, stock_toml, name, ranks):
    """`default` that is not bit for bit torchtitan. (Stock qwen3 does not start on two ranks.)"""
    arguments = (f"--model.name={name}", "--training.steps=3")
    stock = train(tmp_path / "stock", *arguments, ranks=ranks, config=stock_toml)
    ours = train(tmp_path / "ours", *arguments, "--model.attention=default", ranks=ranks)
    assert ours.loss == stock.loss
    assert ours.grad_norm == stock.grad_norm
    assert ours.scalars.keys() == stock.scalars.keys()


@pytest.mark.parametrize(
    "degree, factor",
    [
        ("pipeline_parallel_degree", 4 * 128),  # #2972: the sum over the tokens of a step
        ("data_parallel_replicate_degree", 1 / 2),  # #2323: the mean over two ranks
    ],
)
def test_faults_of_stock(tmp_path, stock_toml, degree, factor):
    """A repair of what torchtitan no longer does: then gradients are wrong because of it."""
    arguments = (f"--parallelism.{degree}=2", "--training.steps=1")
    stock = train(tmp_path / "stock", *arguments, ranks=2, config=stock_toml)
    ours = train(tmp_path / "ours", *arguments, "--model.attention=default", ranks=2)
    assert ours.loss == pytest.approx(stock.loss, rel=1e-6)
    assert factor * ours.grad_norm[0] == pytest.approx(stock.grad_norm[0], rel=1e-5)


@pytest.mark.parametrize("attention, ranks", [("path", 1), ("path_fox", 2)])
def test_resume_gives_the_same_losses(tmp_path, attention, ranks):
    """A parameter, optimizer state or place in the data that a checkpoint misses."""
    arguments = (f"--model.attention={attention}", *RESUMABLE, "--lr_scheduler.total_steps=6")
    whole = train(tmp_path / "whole", *arguments, ranks=ranks)
    first = train(
        tmp_path / "parts",
        *arguments,
        "--training.steps=3",
        "--checkpoint.no_last_save_model_only",
        ranks=ranks,
    )
    second = train(tmp_path / "parts", *arguments, ranks=ranks)
    assert first.loss + second.loss == whole.loss
    assert first.grad_norm + second.grad_norm == whole.grad_norm


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["path", "path_fox"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compile"])
def test_kernels_train_as_the_torch_form(tmp_path, attention, compiled):
    """Gradients of the kernels that mislead a run, though each lies within its limit."""
    job = (f"--model.attention={attention}", "--training.seq_len=1024", "--training.steps=30")
    job += ("--training.mixed_precision_param=bfloat16", "--training.local_batch_size=2")
    job += ("--activation_checkpoint.mode=selective",)
    job += ("--activation_checkpoint.selective_ac_option=op",)
    job += ("--compile.enable",) if compiled else ()
    runs = {
        form: train(tmp_path / form, *job, f"--model.path.implementation={form}")
        for form in ("torch", "triton")
    }
    # bf16 rounds both; on an H200 they fall from 7.6 to 6.2 (path), 6.1 (path_fox).
    assert max(runs["triton"].loss[-4:]) < runs["triton"].loss[0] - 1, runs["triton"].loss
    assert runs["triton"].loss == pytest.approx(runs["torch"].loss, rel=5e-3)


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory):
    """A folder of modules of a few tokens, so that every sequence packs many documents."""
    folder = tmp_path_factory.mktemp("documents")
    for i in range(400):
        (folder / f"module_{i}.py").write_text(f"x = {i}\nprint(x + {i % 7})\n")
    return folder


@pytest.mark.parametrize("attention", ["path", "fox"])
def test_document_mask(tmp_path, short_documents, attention):
    """A mask that is built and not used, and validation or pipelines that do not take it."""
    arguments = (
        f"--model.attention={attention}",
        f"--training.dataset_path={short_documents}",
        "--training.steps=4",
    )
    validation = (
        "--validation.enable",
        "--validation.dataset=python_stdlib_validation",
        f"--validation.dataset_path={short_documents}",
        "--validation.seq_len=128",
        "--validation.local_batch_size=4",
        "--validation.steps=1",
        "--validation.freq=2",
    )
    without = train(tmp_path / "without", *arguments, *validation)
    masked = train(tmp_path / "with", *arguments, *validation, "--model.path.document_mask")
    assert masked.loss[0] != without.loss[0]
    assert masked.validation_loss[0] != without.validation_loss[0]
    assert masked.loss[0] == pytest.approx(without.loss[0], abs=0.05)  # the same data and weights
    assert masked.loss[-1] < masked.loss[0]


def test_statistics_reach_tensorboard(tmp_path):
    """A layer or a statistic missing, a share outside [0, 1], or values at steps not logged."""
    arguments = ("--model.attention=path_fox", "--metrics.log_freq=2", "--training.steps=4")
    run = train(tmp_path, *arguments, ranks=2)
    statistics = {name: values for name, values in run.scalars.items() if "path/" in name}
    names = ("beta_mean", "beta_clipped", "eigenvalue_min", "gate_mean")
    assert statistics.keys() == {f"path/{n}/layer_{i}" for n in names for i in range(2)}
    for name, values in statistics.items():
        assert list(values) == [1, 2, 4], name
    for layer in range(2):
        first = {n: statistics[f"path/{n}/layer_{layer}"][1] for n in names}
        assert 0.8 < first["beta_mean"] < 1.2  # biases start at 0
        assert first["beta_clipped"] == 0
        assert -0.5 < first["eigenvalue_min"] < first["beta_mean"]
        assert 0.4 < first["gate_mean"] < 0.6


def test_compile(tmp_path):
    """A graph break or a changed number under torch.compile with selective checkpointing per op."""
    arguments = ("--model.attention=path_fox", "--training.steps=2", "--training.seq_len=64")
    eager = train(tmp_path / "eager", *arguments)
    compiled = train(
        tmp_path / "compiled",
        *arguments,
        "--compile.enable",
        "--compile.backend=aot_eager",
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=op",
    )
    assert compiled.loss == pytest.approx(eager.loss, rel=1e-6)
    statistic = "path/eigenvalue_min/layer_1"
    assert compiled.scalars[statistic] == pytest.approx(eager.scalars[statistic], rel=1e-4)


def test_refusal_names_the_key(tmp_path):
    """A job that cannot run failing somewhere inside instead of at its start."""
    with pytest.raises(TrainerError, match="training.seq_len must be a multiple of .* = 4, got 98"):
        arguments = ("--parallelism.context_parallel_degree=2", "--training.seq_len=98")
        train(tmp_path, "--model.attention=path", *arguments, ranks=2)


def test_refuses_a_model_that_is_not_wrapped(tmp_path):
    """Stock attention trained in silence: torchtitan itself finds the spec of such a model."""
    arguments = ("--model.name=deepseek_v3", "--model.flavor=debugmodel")
    with pytest.raises(TrainerError, match="needs model.name to be one of .*, got 'deepseek_v3'"):
        train(tmp_path, *arguments, "--model.attention=path")


def test_torchrun_command(tmp_path):
    """The command of the README failing where this module's own launcher does not."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("--local-ranks-filter=0", "--role=rank", "--tee=3", "-m", "torchtitan.train"),
        *("--job.config_file=configs/llama3_debug_path.toml", f"--job.dump_folder={tmp_path}"),
        *("--training.steps=2", "--training.seq_len=64", "--validation.seq_len=64"),
        "--training.enable_cpu_offload",  # a second backend, which only this way asks for
        "--metrics.disable_color_printing",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    assert re.search(r"step:  2  loss: +[0-9.]+", output)
    assert re.search(r"validate step:  1  loss: +[0-9.]+", output)
    assert (tmp_path / "checkpoint" / "step-2").is_dir()
    assert list(tmp_path.glob("tb/*/events.out.*"))
