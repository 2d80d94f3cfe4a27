"""The evaluation of a checkpoint: its weights, lengths, texts, and the command itself."""

import json
import math
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools import utils
from trainer import ROOT

from path_backend.integration.commands import evaluate, perplexity
from path_backend.integration.data import tasks
from path_backend.integration.data.scalars import read_scalars
from path_backend.integration.data.task_error import count_errors
from path_backend.integration.torchtitan.job import load_job

TEXT_JOB = ROOT / "configs" / "length_extrapolation.toml"
TASK_JOB = ROOT / "configs" / "flip_flop.toml"
SMALL = ("--model.flavor=task_1x64", "--training.seq_len=32")


@pytest.fixture(autouse=True)
def start_from_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)  # TOML files name the tokenizer relative to it


def make_job(*arguments, config=TASK_JOB):
    return load_job([f"--job.config_file={config}", *SMALL, *arguments])


def save(job, folder, step=3, extra=None):
    """A checkpoint of the job's model with random weights, as the trainer writes it."""
    spec = get_train_spec(job.model.name)
    args = spec.model_args[job.model.flavor]
    args.update_from_config(job)
    model = spec.model_cls(args)
    torch.manual_seed(step)
    with torch.no_grad():
        model.init_weights()
    state = {**model.state_dict(), **(extra or {})}
    dcp.save(state, checkpoint_id=str(folder / f"step-{step}"))
    return model.to(utils.device_type).eval()


@pytest.mark.parametrize("attention", ["default", "path_fox", "nope"])
def test_loads_the_weights(tmp_path, attention):
    """A parameter that keeps its initial value, or a trainer's full checkpoint refused."""
    job = make_job(f"--model.attention={attention}")
    trainer_state = {"optimizer.state.output.weight.step": torch.ones(1), "train_state.step": 3}
    model = save(job, tmp_path, extra=trainer_state)
    subject = evaluate.load_subject(job, evaluate.find_checkpoint(tmp_path, None), 32)
    tokens = torch.randint(0, 5, (2, 32), device=subject.device)
    assert subject.step == 3 and not subject.model.training
    assert torch.equal(subject.logits(tokens), model(tokens))


@pytest.mark.parametrize(
    "saved, asked, message",
    [
        ("path", "nope", r"attention = 'nope'; missing: none; not expected: .*attention\.path"),
        ("nope", "fox", r"attention = 'fox'; missing: layers.0.attention.path.gate.bias, .*none$"),
    ],
)
def test_refuses_another_attention(tmp_path, saved, asked, message):
    """A checkpoint evaluated as another attention that happens to share its other parameters."""
    save(make_job(f"--model.attention={saved}"), tmp_path)
    with pytest.raises(ValueError, match=message):
        evaluate.load_subject(make_job(f"--model.attention={asked}"), tmp_path / "step-3", 32)


def test_finds_the_checkpoint(tmp_path):
    """The wrong step, one that was cut off in writing, or steps compared as text."""
    for step in (9, 10):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / ".metadata").touch()
    (tmp_path / "step-11").mkdir()
    assert evaluate.find_checkpoint(tmp_path, None) == tmp_path / "step-10"
    assert evaluate.find_checkpoint(tmp_path, 9) == tmp_path / "step-9"
    assert evaluate.find_checkpoint(tmp_path / "step-9", None) == tmp_path / "step-9"
    with pytest.raises(ValueError, match=r"checkpoint of step 11 \(steps there: 9, 10\), got "):
        evaluate.find_checkpoint(tmp_path, 11)
    with pytest.raises(ValueError, match=r"hold a checkpoint \(steps there: none\), got .*step-11"):
        evaluate.find_checkpoint(tmp_path / "step-11", None)
    (tmp_path / "step-9").rename(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"must be named step-<number>, got .*/mine"):
        evaluate.find_checkpoint(tmp_path / "mine", None)


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_rope_beyond_the_trained_length(tmp_path, name):
    """RoPE's table ending at the trained length, or another one taken for longer sequences."""
    job = load_job(
        [
            *(f"--job.config_file={TEXT_JOB}", f"--model.name={name}", "--training.seq_len=16"),
            *("--model.flavor=debugmodel", "--model.attention=default"),
        ]
    )
    model = save(job, tmp_path)
    subject = evaluate.load_subject(job, tmp_path / "step-3", 64)
    tokens = torch.randint(0, 2048, (1, 64), device=subject.device)
    logits = subject.logits(tokens)
    assert logits.shape[1] == 64
    torch.testing.assert_close(logits[:, :16], model(tokens[:, :16]), rtol=1e-4, atol=1e-4)


def test_task_errors_do_not_depend_on_the_passes(tmp_path, monkeypatch):
    """Sequences lost, repeated or scored with others' labels where draws and passes meet."""
    job = make_job("--model.attention=path")
    model = save(job, tmp_path)
    subject = evaluate.load_subject(job, tmp_path / "step-3", 32)
    monkeypatch.setattr(evaluate, "TOKENS_PER_DRAW", 32 * 7)
    monkeypatch.setattr(evaluate, "TOKENS_PER_PASS", 32 * 3)
    scores = evaluate.evaluate_task(subject, 20, 32)
    assert scores.keys() == {f"flip_flop_{name}" for name in ("validation", "sparse", "dense")}
    for name, score in scores.items():
        assert score["predictions"] >= 20
        batches = tasks.evaluation_batches(
            job, name, score["sequences"], batch_size=1, seq_len=32, device=subject.device
        )
        expected = count_errors(model, batches, 10**6)
        assert score["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert {**score, "loss": 0} == {**expected, "loss": 0}


class Bigram(nn.Module):
    """A model whose loss is known: logits depend on the token alone."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.output = nn.Linear(4, 7)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        return hidden if self.output is None else self.output(hidden)


@pytest.mark.parametrize("option, value", [("text", ["a"]), ("factors", [2]), ("documents", 3)])
def test_refuses_options_of_text_for_a_task(tmp_path, option, value):
    """An option of text accepted and ignored."""
    with pytest.raises(ValueError, match=f'--{option} must be left out for .*"flip_flop".*, got '):
        evaluate.evaluate(make_job(), tmp_path, predictions=1, **{option: value}, command="")


def test_refuses_another_rank_of_w(tmp_path):
    """A checkpoint of other sizes refused without the keys that decide them."""
    save(make_job("--model.attention=path"), tmp_path)
    job = make_job("--model.attention=path", "--model.path.w_rank=8")
    with pytest.raises(ValueError, match=r"same w_rank and conv_width .* got layers.0\S*w_down"):
        evaluate.load_subject(job, tmp_path / "step-3", 32)


def test_refuses_a_length_for_text(tmp_path):
    """`--seq-len` accepted and ignored."""
    job = load_job([f"--job.config_file={TEXT_JOB}"])
    with pytest.raises(ValueError, match="--seq-len must be left out for .*--factors, got 64"):
        evaluate.evaluate(job, tmp_path, predictions=1, seq_len=64, command="")


def test_task_beyond_the_trained_length(tmp_path):
    """A length that is asked for and not used, or one that RoPE's table ends before."""
    job = make_job("--model.attention=default")
    save(job, tmp_path)
    result = evaluate.evaluate(job, tmp_path / "step-3", predictions=9, seq_len=50, command="")
    assert all(len(s["error_by_position"]) == 50 for s in result["sets"].values())
    assert result["length"] == 50 and result["task"] == {"seed": 0, "p_ignore": 0.8}
    assert evaluate.other_length(result) == "_at_50"


def test_token_losses(monkeypatch):
    """Losses shifted by a token, rows lost between pieces, or a model left without its output."""
    monkeypatch.setattr(perplexity, "OUTPUT_ROWS", 3)
    model = Bigram()
    tokens = torch.randint(0, 7, (12,))
    losses = perplexity.token_losses(model, model, tokens)
    scores = model(tokens[:-1]).log_softmax(-1)
    torch.testing.assert_close(losses, -scores.gather(1, tokens[1:, None]).squeeze(1))

    def fail(tokens):
        raise KeyError

    with pytest.raises(KeyError):
        perplexity.token_losses(model, fail, tokens)
    assert model.output is not None


def test_long_documents():
    """Documents cut at the wrong length, short ones joined to fill it, or a limit ignored."""
    texts = ["a" * n for n in (3, 5, 9, 10, 8, 4, 9, 12)]
    found = perplexity.long_documents(texts, lambda text: list(range(len(text))), (4, 8), limit=3)
    assert [(length, len(tokens)) for length, tokens in found] == [
        (4, 5),
        (4, 5),
        (8, 9),
        (8, 9),
        (8, 9),
    ]


def test_summary_over_lengths():
    """A length averaged over documents that do not fill it, or tokens behind it."""
    losses = [(2, torch.tensor([1.0, 3.0])), (4, torch.tensor([3.0, 5.0, 7.0, 9.0]))]
    short, long, none = perplexity.summarize(losses, (4, 2, 8), bucket=2)
    assert (short["length"], short["documents"], short["loss"]) == (2, 2, 3.0)
    assert (long["length"], long["documents"], long["loss"]) == (4, 1, 6.0)
    assert long["loss_by_position"] == [4.0, 8.0]
    assert long["perplexity"] == pytest.approx(math.exp(6))
    assert none == {
        **{"length": 8, "documents": 0, "bucket": 2},
        **{"loss": None, "perplexity": None, "loss_by_position": None},
    }


def test_read_folder(tmp_path):
    """Binary or empty files read as text, or the order of files left to the file system."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "d.txt").write_text(" \n")
    assert perplexity.read_folder(tmp_path) == ["first", "second"]
    with pytest.raises(ValueError, match="--text must be a folder with UTF-8 files, got .*/empty"):
        perplexity.read_folder(tmp_path / "empty")


def run_command(*arguments):
    command = [sys.executable, "-m", "path_backend.integration", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_command(tmp_path):
    """The command of GUIDE.md failing, or figures that miss the file or TensorBoard."""
    overrides = ("--model.attention=path", "--training.seq_len=16", "--model.flavor=debugmodel")
    job = load_job([f"--job.config_file={TEXT_JOB}", *overrides])
    save(job, tmp_path / "checkpoint", step=7)
    modules = tmp_path / "modules"
    modules.mkdir()
    for i in range(40):  # one in ten is held out
        (modules / f"m{i}.py").write_text(f"x_{i} = {i}\n" * 30)
    done = run_command(
        *("evaluate", "--config", TEXT_JOB, "--checkpoint", tmp_path / "checkpoint"),
        *("--text", "configs", "--factors", 1, 2, "--documents", 3),
        *(f"--job.dump_folder={tmp_path}", f"--validation.dataset_path={modules}", *overrides),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "evaluation" / "step-7.json").read_text())
    assert result["step"] == 7 and result["job"]["attention"] == "path"
    assert result["command"].startswith("path-backend evaluate --config ")
    assert result["versions"]["torch"] == torch.__version__
    assert result["perplexity"].keys() == {"python_stdlib_validation", "configs"}
    scalars = read_scalars(tmp_path / "tb" / "evaluation")
    for name, rows in result["perplexity"].items():
        assert [row["length"] for row in rows] == [16, 32]
        assert len(rows[1]["loss_by_position"]) == 4
        for row in rows:
            values = scalars[f"evaluation/{name}/perplexity_at_{row['length']}"]
            assert values == {7: pytest.approx(row["perplexity"], rel=1e-5)}


def test_scalars_of_a_task():
    """Bounds of the interval swapped or left out, or another length taken for that of training."""
    scores = {"error": 0.2, "error_95": [0.1, 0.3], "loss": 0.5}
    job = {"seq_len": 32}
    assert evaluate.scalars({"job": job, "length": 50, "sets": {"s": {**scores}}}).keys() == {
        f"evaluation/s_at_50/{name}" for name in ("error", "error_95_low", "error_95_high", "loss")
    }
    assert evaluate.scalars({"job": job, "length": 32, "sets": {"s": scores}}) == {
        "evaluation/s/error": 0.2,
        "evaluation/s/error_95_low": 0.1,
        "evaluation/s/error_95_high": 0.3,
        "evaluation/s/loss": 0.5,
    }


@pytest.mark.parametrize("arguments", [(), ("evalaute",)])
def test_unknown_command(arguments):
    """A wrong word that does nothing, or an error without the list of commands."""
    done = run_command(*arguments)
    assert done.returncode == 2
    for name in ("evaluate", "experiments", "report", "convert", "fla"):
        assert name in done.stderr
