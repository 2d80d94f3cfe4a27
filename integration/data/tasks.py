"""The tasks of `path_backend.tasks` as datasets of the trainer, by name.

    [training]
    dataset = "flip_flop"  # or a5_word_problem, s5_swaps, mqrar
    seq_len = 512  # tokens of a sequence

    [validation]
    dataset = "flip_flop_sparse"  # a set of the same task

    [task]  # seed and difficulty, see `TaskConfig`

Nothing is downloaded or stored. Tokenizer and vocabulary size follow the dataset. Sample i of a set
is the same on every layout: ranks and steps take samples in turn, so that a step of 64 sequences
has the same 64 however they are split. Text datasets go torchtitan's own way in training;
`repairs.validation_data` has their validation.
"""

# No `from __future__ import annotations`: torchtitan merges dataclasses by their fields' types.
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torchtitan.components.validate as validate
from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import BaseValidator
from torchtitan.config import JobConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, build_text_dataloader
from torchtitan.protocols.train_spec import TrainSpec

from path_backend import tasks
from path_backend.integration.data.task_error import log_errors
from path_backend.integration.repairs.validation_data import build_validation_text, weigh_batches
from path_backend.integration.torchtitan.substitute import substituted
from path_backend.tasks import A5WordProblem, FlipFlop, Mqrar, S5Swaps, Stream, Task

assert IGNORE_INDEX == tasks.IGNORE_INDEX


@dataclass
class TaskConfig:
    """The table [task]; what is set for another task than the dataset's has no effect."""

    seed: int = 0
    """Of the training sequences. Evaluation sequences are always the same."""

    flip_flop: FlipFlop = field(default_factory=FlipFlop)
    """Difficulty of flip_flop and flip_flop_validation."""

    mqrar: Mqrar = field(default_factory=Mqrar)
    """Difficulty of mqrar and mqrar_validation."""

    def __post_init__(self):
        if type(self.seed) is not int:
            raise ValueError(f"task.seed must be an integer, got {self.seed!r}")


# Every dataset's task; for each of `TRAINING`, its evaluation sets.
_TASKS: dict[str, Callable[[TaskConfig], Task]] = {
    "flip_flop": lambda config: config.flip_flop,
    "flip_flop_validation": lambda config: config.flip_flop,
    "flip_flop_sparse": lambda config: replace(config.flip_flop, p_ignore=0.98),
    "flip_flop_dense": lambda config: replace(config.flip_flop, p_ignore=0.1),
    "a5_word_problem": lambda config: A5WordProblem(),
    "a5_word_problem_validation": lambda config: A5WordProblem(),
    "s5_swaps": lambda config: S5Swaps(),
    "s5_swaps_validation": lambda config: S5Swaps(),
    "mqrar": lambda config: config.mqrar,
    "mqrar_validation": lambda config: config.mqrar,
}
TRAINING = {
    "flip_flop": ("flip_flop_validation", "flip_flop_sparse", "flip_flop_dense"),
    "a5_word_problem": ("a5_word_problem_validation",),
    "s5_swaps": ("s5_swaps_validation",),
    "mqrar": ("mqrar_validation",),
}


def evaluation_sets(dataset: str) -> tuple[str, ...]:
    """Names of the evaluation sets of a training dataset; none if it is text."""
    return TRAINING.get(dataset, ())


def training_task(job_config: JobConfig) -> Task | None:
    """The task that the job trains on; None if it is text.

    Raises ValueError if the job trains on an evaluation set, or validates on another task.
    """
    dataset = job_config.training.dataset
    if dataset in _TASKS and dataset not in TRAINING:
        raise ValueError(
            f"training.dataset must be one of {', '.join(TRAINING)}, or text, got {dataset!r}, "
            "which is for evaluation"
        )
    validation = job_config.validation
    if validation.enable and (dataset in _TASKS or validation.dataset in _TASKS):
        sets = evaluation_sets(dataset)
        if validation.dataset not in sets:
            expected = f"one of {', '.join(sets)}" if sets else "text"
            known = "" if sets else f"; the tasks are {', '.join(TRAINING)}"
            raise ValueError(
                f'validation.dataset must be {expected} for training.dataset = "{dataset}", '
                f"got {validation.dataset!r}{known}"
            )
    return _TASKS[dataset](_config(job_config)) if dataset in _TASKS else None


def describe(job_config: JobConfig) -> dict[str, Any]:
    """Seed and difficulty of the task that the job trains on."""
    task: Any = training_task(job_config)
    return {"seed": _config(job_config).seed, **asdict(task)}


def stream(job_config: JobConfig, dataset: str, length: int) -> Stream:
    """Samples of `length` tokens of a dataset, with the difficulty of the job."""
    config = _config(job_config)
    training = dataset in TRAINING
    return Stream(
        _TASKS[dataset](config),
        length,
        name=dataset,
        held_out=not training,
        seed=config.seed if training else 0,
    )


def evaluation_batches(
    job_config: JobConfig,
    dataset: str,
    sequences: int,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[dict[str, torch.Tensor]]:
    """The first `sequences` samples of an evaluation set, as "tokens" and "labels" [B, T] int64.

    Batch size and length are those of [validation] if not given; the last batch may be smaller.
    What is drawn does not depend on the batch size or the device. A label belongs to the logits of
    the same place, and is IGNORE_INDEX where nothing is asked.
    """
    trained = job_config.training.dataset
    sets = evaluation_sets(trained)
    if dataset not in sets:
        raise ValueError(
            f'dataset must be an evaluation set of training.dataset = "{trained}" '
            f"({', '.join(sets) or 'text has none'}), got {dataset!r}"
        )
    samples = stream(job_config, dataset, seq_len or job_config.validation.seq_len)
    batch_size = batch_size or job_config.validation.local_batch_size
    for first in range(0, sequences, batch_size):
        count = min(batch_size, sequences - first)
        tokens, labels = samples.samples(first, count, device)
        yield {"tokens": tokens, "labels": labels}


def with_tasks(spec: TrainSpec) -> TrainSpec:
    """`spec` with builders of tokenizer, data loader and validator that know the tasks."""
    return replace(
        spec,
        build_tokenizer_fn=functools.partial(_build_tokenizer, spec),
        build_dataloader_fn=functools.partial(_build_dataloader, spec.build_dataloader_fn),
        build_validator_fn=(
            functools.partial(_build_validator, spec.build_validator_fn)
            if spec.build_validator_fn
            else None
        ),
    )


class TaskTokenizer(BaseTokenizer):
    """Names of tokens, separated by blanks, to ids and back. There is no end-of-text token."""

    def __init__(self, vocabulary: tuple[str, ...]):
        super().__init__()
        self._names = vocabulary
        self._ids = {name: i for i, name in enumerate(vocabulary)}

    def encode(self, text: str, **kwargs) -> list[int]:
        return [self._ids[name] for name in text.split()]

    def decode(self, ids: list[int], **kwargs) -> str:
        return " ".join(self._names[i] for i in ids)

    def get_vocab_size(self) -> int:
        return len(self._names)


class TaskData(torch.utils.data.Dataset):
    """Batches of a stream for one data parallel rank; ranks take blocks of `rows` in turn."""

    def __init__(self, samples: Stream, rows: int, rank: int, ranks: int):
        self._samples, self._rows, self._rank, self._ranks = samples, rows, rank, ranks

    def __len__(self) -> int:
        return sys.maxsize  # a stream does not end

    def __getitem__(self, batch: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        first = (batch * self._ranks + self._rank) * self._rows
        tokens, labels = self._samples.samples(first, self._rows)
        return {"input": tokens}, labels


def _config(job_config: JobConfig) -> TaskConfig:
    return getattr(job_config, "task", None) or TaskConfig()


def _build_tokenizer(stock: TrainSpec, job_config: JobConfig) -> BaseTokenizer | None:
    dataset = job_config.training.dataset
    if stock.build_dataloader_fn is build_text_dataloader and dataset not in _TASKS | DATASETS:
        known = ", ".join([*TRAINING, *DATASETS])
        raise ValueError(f"training.dataset must be one of {known}, got {dataset!r}")
    task = training_task(job_config)
    if task is not None:
        return TaskTokenizer(task.vocabulary)
    return stock.build_tokenizer_fn(job_config) if stock.build_tokenizer_fn else None


def _build_dataloader(
    stock: Callable[..., BaseDataLoader],
    *,
    dp_world_size: int,
    dp_rank: int,
    job_config: JobConfig,
    **kwargs,
) -> BaseDataLoader:
    if training_task(job_config) is None:
        workers = job_config.training.dataloader.num_workers
        if stock is build_text_dataloader and workers > 1:
            raise ValueError(
                "training.dataloader.num_workers must be 0 or 1 for text, got "
                f"{workers}: each worker would give out all sequences again. Set 1 to tokenize "
                "while the model trains"
            )
        return stock(dp_world_size=dp_world_size, dp_rank=dp_rank, job_config=job_config, **kwargs)
    return _loader("training", job_config, dp_rank, dp_world_size)


def _build_validator(
    stock: Callable[..., BaseValidator], *, job_config: JobConfig, **kwargs
) -> BaseValidator:
    """torchtitan's validator asks one function for its data: here others answer."""
    name = "build_text_validation_dataloader"
    if training_task(job_config) is None:
        with substituted(vars(validate), name, build_validation_text):
            return weigh_batches(stock(job_config=job_config, **kwargs))
    with substituted(vars(validate), name, _build_validation_dataloader):
        return log_errors(stock(job_config=job_config, **kwargs))


def _build_validation_dataloader(
    dp_world_size: int, dp_rank: int, job_config: JobConfig, **kwargs
) -> BaseDataLoader:
    if job_config.validation.steps < 0:
        raise ValueError(
            f"validation.steps must be a number of batches for {job_config.validation.dataset}, "
            f"which does not end, got {job_config.validation.steps}"
        )
    return _loader("validation", job_config, dp_rank, dp_world_size)


def _loader(table: str, job_config: JobConfig, rank: int, ranks: int) -> BaseDataLoader:
    """Loader of what the table [training] or [validation] names; it starts again when iterated."""
    config: Any = getattr(job_config, table)
    if config.dataset_path:
        raise ValueError(
            f"{table}.dataset_path must not be set for {config.dataset}, which is drawn, "
            f"got {config.dataset_path!r}"
        )
    samples = stream(job_config, config.dataset, config.seq_len)
    return ParallelAwareDataloader(
        TaskData(samples, config.local_batch_size, rank, ranks),
        dp_rank=rank,
        dp_world_size=ranks,
        batch_size=None,  # the dataset makes whole batches
        **asdict(config.dataloader),
    )
