"""torchtitan #2636, #2791: text validation depends on what was validated before.

torchtitan 0.2.2 goes on in each round of validation where the last one stopped (#2636, #2791), so
that losses of two rounds, or of a resumed run, cannot be compared, and a whole set
(`validation.steps = -1`) is empty in the second round. Its ranks pack documents of their own, may
have different numbers of batches, and a short last batch counts as much as a whole one.

Here every rank packs the whole set and takes its rows of each batch, as tasks do: batch i of all
ranks together holds the same sequences however they are split. Packing more than the own share
costs time in the first round only, because each rank keeps its rows. Tokens after the last whole
sequence are left out, as torchtitan does.

Applies: to text validation of every job.

Delete: when torchtitan's validator starts its data again in every round, on every layout, and
weighs batches by their tokens; this file and its call in `data/tasks.py::_build_validator`.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import BaseValidator
from torchtitan.config import JobConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset


class ValidationText(BaseDataLoader):
    """Batches of `rows` sequences for one data parallel rank; each iteration starts again.

    A batch is {"input": tokens [rows, T]} and labels [rows, T], int64. A set that is read whole
    gives every rank the same number of batches: rows that are missing in the last one are zeros
    whose labels are ignored. Kept are four bytes for each token of the rank.
    """

    def __init__(
        self, sequences: HuggingFaceTextDataset, rows: int, rank: int, ranks: int, *, whole: bool
    ):
        self.whole = whole
        self.weight = 1.0
        """What the mean loss of the current batch counts in the mean over all batches."""
        self._sequences = sequences
        self._source = iter(sequences)
        self._rows, self._rank, self._ranks = rows, rank, ranks
        self._kept: list[Tensor] = []  # of each batch [rows or fewer, T + 1] int32
        self._counts: list[int] = []  # of each batch, its sequences on all ranks

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while self.whole and self._read():
            pass
        if self.whole and not self._kept:
            raise ValueError(
                "validation.seq_len must be less than the number of tokens in the validation set, "
                f"{self._sequences.dataset_name}, got {self._sequences.seq_len}"
            )
        for i in itertools.count():
            if i == len(self._kept) and (self.whole or not self._read()):
                return
            if self.whole:
                self.weight = self._counts[i] * len(self._counts) / sum(self._counts)
            yield self._batch(self._kept[i])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    def _read(self) -> bool:
        """Pack one more batch of all ranks and keep the own rows; False at the end of the set."""
        drawn = list(itertools.islice(self._source, self._rows * self._ranks))
        if not drawn:
            return False
        own = torch.zeros(0, self._sequences.seq_len + 1, dtype=torch.int32)
        rows = drawn[self._rank * self._rows : (self._rank + 1) * self._rows]
        if rows:
            own = torch.stack([torch.cat([x["input"], y[-1:]]) for x, y in rows]).int()
        self._kept.append(own)
        self._counts.append(len(drawn))
        return True

    def _batch(self, own: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        tokens = torch.zeros(self._rows, own.shape[1], dtype=torch.int64)
        tokens[: len(own)] = own
        labels = tokens[:, 1:].clone()
        labels[len(own) :] = IGNORE_INDEX
        return {"input": tokens[:, :-1].clone()}, labels


def build_validation_text(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    job_config: JobConfig,
    infinite: bool = False,
) -> ValidationText:
    """Returns the loader of [validation], in the place of `build_text_validation_dataloader`.

    Raises ValueError for a number of steps or of worker processes that it does not take.
    """
    config = job_config.validation
    if config.steps < 1 and config.steps != -1:
        raise ValueError(
            "validation.steps must be a number of batches, at least 1, or -1 for the whole set, "
            f"got {config.steps}"
        )
    if config.dataloader.num_workers:
        raise ValueError(
            "validation.dataloader.num_workers must be 0 for text, whose sequences are kept after "
            f"the first round, got {config.dataloader.num_workers}"
        )
    sequences = HuggingFaceTextDataset(
        dataset_name=config.dataset,
        dataset_path=config.dataset_path,
        tokenizer=tokenizer,
        seq_len=config.seq_len,
        infinite=infinite,
    )
    return ValidationText(
        sequences, config.local_batch_size, dp_rank, dp_world_size, whole=config.steps == -1
    )


def weigh_batches(validator: BaseValidator) -> BaseValidator:
    """Make the validator's mean over the batches of a whole set the mean over its tokens.

    It divides the loss of a batch by the tokens of that batch and then takes the mean of batches.
    """
    data = getattr(validator, "validation_dataloader", None)
    if not isinstance(data, ValidationText) or not data.whole:
        return validator
    stock_loss, schedule = validator.loss_fn, validator.pp_schedule

    def weighed_loss(prediction: Tensor, labels: Tensor) -> Tensor:
        return stock_loss(prediction, labels) * data.weight

    validator.loss_fn = weighed_loss
    if schedule is not None:  # which has a loss function of its own
        stock_eval = schedule.eval

        def weighed_eval(*args, losses: list[Tensor] | None = None, **kwargs):
            output = stock_eval(*args, losses=losses, **kwargs)
            if losses:
                losses[:] = [loss * data.weight for loss in losses]
            return output

        schedule.eval = weighed_eval
    return validator
