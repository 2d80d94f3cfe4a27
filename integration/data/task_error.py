"""Errors of a model on a task: how many of its predictions are not the label.

`count_errors` runs through an evaluation set; `log_errors` makes torchtitan's validator report the
share of errors of what it validates, beside the loss.
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.validate import BaseValidator
from torchtitan.distributed import utils
from torchtitan.tools.logging import logger

MAX_POSITIONS = 64  # of sequences whose errors are reported by position
NORMAL_95 = 1.959963984540054  # 97.5 % quantile of the normal distribution


@dataclass
class Errors:
    """Counts of predictions, of wrong ones, and the sum of their losses in nats."""

    predictions: int = 0
    wrong: int = 0
    loss: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Counts, the share of errors with its 95 % interval, and the mean loss."""
        return {
            "predictions": self.predictions,
            "wrong": self.wrong,
            "error": self.wrong / self.predictions,
            "error_95": wilson_interval(self.wrong, self.predictions),
            "loss": self.loss / self.predictions,
        }


def error_scalars(place: str, summary: dict[str, Any]) -> dict[str, float]:
    """The share of errors and its interval as TensorBoard's scalars, below `place`."""
    low, high = summary["error_95"]
    return {
        f"{place}/error": summary["error"],
        f"{place}/error_95_low": low,
        f"{place}/error_95_high": high,
    }


def wilson_interval(wrong: int, predictions: int) -> tuple[float, float]:
    """95 % interval of a share; it has a width even if no error, or nothing else, was seen.

    Source: Wilson, Probable Inference, JASA 22 (1927). Raises ValueError without predictions.
    """
    if predictions < 1:
        raise ValueError(f"predictions must be at least 1, got {predictions}")
    share, z2 = wrong / predictions, NORMAL_95**2
    middle = share + z2 / (2 * predictions)
    half = NORMAL_95 * math.sqrt(share * (1 - share) / predictions + z2 / (4 * predictions**2))
    low, high = ((middle + sign * half) / (1 + z2 / predictions) for sign in (-1, 1))
    # At the ends a bound equals the share, but for rounding.
    return (0.0 if wrong == 0 else low), (1.0 if wrong == predictions else high)


def wrong_predictions(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Masks [B, T] of the labels that count and of those that logits [B, T, V] get wrong."""
    counts = labels != IGNORE_INDEX
    return counts, counts & (logits.argmax(-1) != labels)


@torch.no_grad()
def count_errors(
    forward: Callable[[Tensor], Tensor],
    batches: Iterable[dict[str, Tensor]],
    predictions: int,
) -> dict[str, Any]:
    """Score `forward` (tokens [B, T] -> logits [B, T, V]) until it has made `predictions`.

    Every label of the last batch counts, so it may be a few more. The result is that of
    `Errors.summary`, with the number of `sequences` and, if they are short, the share of errors at
    each position, `error_by_position` (None where nothing is asked).
    """
    errors, sequences = Errors(), 0
    by_position: Tensor | None = None  # predictions and wrong ones [2, T]
    for batch in batches:
        tokens, labels = batch["tokens"], batch["labels"]
        logits = forward(tokens).float()
        loss = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
        counts = torch.stack([mask.sum(0) for mask in wrong_predictions(logits, labels)])
        by_position = counts if by_position is None else by_position + counts
        errors.predictions, errors.wrong = by_position.sum(1).tolist()
        errors.loss += loss.item()
        sequences += len(tokens)
        if errors.predictions >= predictions:
            break
    result = {**errors.summary(), "sequences": sequences}
    if by_position is not None and by_position.shape[1] <= MAX_POSITIONS:
        made, wrong = by_position.tolist()
        result["error_by_position"] = [
            w / m if m else None for m, w in zip(made, wrong, strict=True)
        ]
    return result


def log_errors(validator: BaseValidator) -> BaseValidator:
    """Make the validator log `validation_metrics/error` over all ranks, with its 95 % interval.

    It counts where the validator computes its loss; pipelines do that elsewhere, and log none.
    """
    stock_loss, stock_validate = validator.loss_fn, validator.validate
    sums = torch.zeros(2, dtype=torch.int64)  # wrong, all

    def counting_loss(logits: Tensor, labels: Tensor) -> Tensor:
        nonlocal sums
        whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
        counts, wrong = wrong_predictions(whole, labels)
        sums = sums.to(labels.device) + torch.stack([wrong.sum(), counts.sum()])
        return stock_loss(logits, labels)

    def summary() -> dict[str, Any]:
        dims = validator.parallel_dims
        wrong, predictions = sums.tolist()
        if dims.dp_cp_enabled:
            mesh = dims.get_optional_mesh("loss")
            wrong, predictions = (utils.dist_sum(x, mesh) for x in sums.float())
        if not predictions:
            return {}
        return Errors(int(predictions), int(wrong)).summary()

    @functools.wraps(stock_validate)
    def validate(model_parts, step: int) -> None:
        nonlocal sums
        sums = torch.zeros_like(sums)
        processor = validator.metrics_processor
        stock_log = processor.log_validation

        def log(*, loss: float, step: int) -> None:
            errors = summary()
            metrics = error_scalars("validation_metrics", errors) if errors else {}
            stock_log(loss=loss, step=step, extra_metrics=metrics)
            if errors:
                low, high = errors["error_95"]
                logger.info(
                    f"validate step: {step:2}  error: {errors['error']:.5f}  "
                    f"95 % interval: {low:.5f} to {high:.5f}"
                )

        processor.log_validation = log
        try:
            stock_validate(model_parts, step)
        finally:
            processor.log_validation = stock_log

    validator.loss_fn, validator.validate = counting_loss, validate
    return validator
