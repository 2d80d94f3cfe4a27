"""Counting of errors: against a loop, in the validator, and the interval of a share."""

import random

import pytest
import torch
from trainer import train

from path_backend.integration.data.task_error import Errors, count_errors, wilson_interval

FLIP_FLOP = (
    *("--model.attention=path", "--training.dataset=flip_flop", "--model.flavor=task_1x64"),
    *("--training.seq_len=32", "--training.local_batch_size=4", "--training.steps=2"),
    *("--validation.enable", "--validation.dataset=flip_flop_dense", "--validation.steps=2"),
    *("--validation.seq_len=32", "--validation.freq=2"),
)


def test_count_errors_against_a_loop():
    """A label without question counted, positions shifted, or a loss averaged over the wrong."""
    torch.manual_seed(0)
    labels = torch.randint(0, 3, (6, 5))
    labels[torch.rand(6, 5) < 0.4] = -100
    labels[:, 4] = -100
    logits = torch.randn(6, 5, 3)
    rows = iter(logits.split(2))
    batches = [{"tokens": torch.zeros(2, 5), "labels": part} for part in labels.split(2)]
    result = count_errors(lambda tokens: next(rows), batches, predictions=10**6)
    made = wrong = loss = 0
    for b in range(6):
        for t in range(5):
            if labels[b, t] >= 0:
                made += 1
                wrong += int(logits[b, t].argmax() != labels[b, t])
                loss -= logits[b, t].log_softmax(0)[labels[b, t]].item()
    assert (result["predictions"], result["wrong"], result["sequences"]) == (made, wrong, 6)
    assert result["error"] == wrong / made
    assert result["loss"] == pytest.approx(loss / made)
    for t in range(4):
        asked = labels[:, t] >= 0
        missed = (logits[:, t].argmax(-1) != labels[:, t])[asked]
        assert result["error_by_position"][t] == pytest.approx(missed.double().mean().item())
    assert result["error_by_position"][4] is None


def test_stops_when_there_are_enough():
    """An endless set read to its end."""

    def endless():
        while True:
            yield {"tokens": torch.zeros(2, 3), "labels": torch.zeros(2, 3, dtype=torch.long)}

    result = count_errors(lambda tokens: torch.zeros(2, 3, 4), endless(), predictions=7)
    assert (result["predictions"], result["sequences"]) == (12, 4)


def test_interval():
    """A formula off, or an interval without width where no error was seen."""
    # Newcombe, Statistics in Medicine 17 (1998), table I: score method without correction.
    for wrong, predictions, expected in (
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ):
        assert wilson_interval(wrong, predictions) == pytest.approx(expected, abs=5e-5)
    low, high = wilson_interval(29, 29)
    assert high == 1 and low < 0.9
    with pytest.raises(ValueError, match="predictions must be at least 1, got 0"):
        wilson_interval(0, 0)


def test_interval_covers():
    """An interval that holds the true share much less often than it says."""
    draw = random.Random(0)
    hits = 0
    for _ in range(1000):
        wrong = sum(draw.random() < 0.1 for _ in range(80))
        low, high = wilson_interval(wrong, 80)
        hits += low <= 0.1 <= high
    assert 920 <= hits <= 980


def test_summary():
    """Counts of a summary that do not belong to its share."""
    summary = Errors(predictions=8, wrong=2, loss=4.0).summary()
    assert summary["error"] == 0.25 and summary["loss"] == 0.5
    assert summary["error_95"][0] < 0.25 < summary["error_95"][1]


@pytest.mark.parametrize(
    "ranks, batch, layout",
    [
        (2, 4, "--parallelism.data_parallel_shard_degree=2"),
        (2, 8, "--parallelism.tensor_parallel_degree=2"),
    ],
    ids=["FSDP2", "TP2"],
)
def test_validator_logs_errors(tmp_path, ranks, batch, layout):
    """The share of one rank logged for all, or predictions split over the vocabulary misread."""
    unchanged = "--optimizer.lr=0.0"
    seed = train(
        tmp_path / "one",
        *(*FLIP_FLOP, unchanged, "--checkpoint.enable"),
        *("--validation.local_batch_size=8", "--checkpoint.no_last_save_model_only"),
    )
    split = train(
        tmp_path / "split",
        *(*FLIP_FLOP, unchanged, layout, f"--validation.local_batch_size={batch}"),
        *("--checkpoint.enable", f"--checkpoint.initial_load_path={seed.folder}/checkpoint/step-2"),
        ranks=ranks,
    )
    errors = [list(run.scalars["validation_metrics/error"].values()) for run in (seed, split)]
    assert len(errors[0]) == 2  # steps 1 and 2
    assert 0.2 < errors[0][0] < 0.8
    low, high = (seed.scalars[f"validation_metrics/error_95_{end}"][1] for end in ("low", "high"))
    assert low < errors[0][0] < high
    assert errors[1] == pytest.approx(errors[0], abs=1e-6)


def test_pipelines_log_no_error(tmp_path):
    """A share of nothing, 0 / 0, that ends the job in its first validation, or is logged."""
    run = train(
        tmp_path,
        *(*FLIP_FLOP, "--model.flavor=task_2x64", "--parallelism.data_parallel_shard_degree=2"),
        *("--parallelism.pipeline_parallel_degree=2", "--validation.local_batch_size=4"),
        *("--training.local_batch_size=4", "--training.global_batch_size=8"),
        ranks=4,
    )
    assert len(run.validation_loss) == 2
    assert "validation_metrics/error" not in run.scalars


def test_text_has_no_error(tmp_path):
    """The share of wrong next tokens of a text, which nobody asked for, computed and logged."""
    arguments = ("--validation.enable", "--validation.dataset=python_stdlib_validation")
    limits = ("--validation.seq_len=128", "--validation.steps=1", "--validation.local_batch_size=2")
    run = train(tmp_path, *arguments, *limits, "--training.steps=1")
    assert run.validation_loss
    assert "validation_metrics/error" not in run.scalars
