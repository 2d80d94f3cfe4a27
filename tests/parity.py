"""Compare a run of the trainer on some layout with a run on one rank.

Runs start from one seed checkpoint and see the same 8 sequences a step (parity_data.py). Compared
are loss, gradient norm and number of tokens of each step, validation loss, and after the first step
every parameter and its gradient by name, read from the checkpoint (Adam's first moment is then
1 - beta1 times the clipped gradient).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from trainer import Run, train

BATCH = 8  # sequences a step, on any number of ranks
STEPS = 3
SEQ_LEN = 96  # as in parity_data.py

JOB = (
    "--experimental.custom_import=parity_data",
    *("--training.dataset=parity", f"--training.seq_len={SEQ_LEN}"),
    *(f"--training.global_batch_size={BATCH}", f"--training.steps={STEPS}"),
    # Below every gradient norm met here, so that clipping acts.
    "--training.max_norm=0.2",
    # Adam with its own eps turns the rounding of a gradient near zero into the sign of an update.
    *("--optimizer.eps=1e-4", "--lr_scheduler.warmup_steps=0", "--lr_scheduler.total_steps=100"),
    *("--validation.enable", "--validation.dataset=parity_validation"),
    *(f"--validation.seq_len={SEQ_LEN}", f"--validation.freq={STEPS}"),
    *("--checkpoint.enable", "--checkpoint.keep_latest_k=0", "--checkpoint.interval=100"),
    "--checkpoint.enable_first_step_checkpoint",
)


class Column(NamedTuple):
    """A model and its attention."""

    model: str
    attention: str
    flavor: str = "parity"

    @property
    def job(self) -> tuple[str, ...]:
        names = (f"--model.name={self.model}", f"--model.flavor={self.flavor}")
        return (*JOB, *names, f"--model.attention={self.attention}")

    def __str__(self) -> str:
        return f"{self.model} {self.attention}"


@dataclass(frozen=True)
class Budget:
    """Largest relative errors; of a tensor in the Frobenius norm, of the gradient norm as a tensor.

    The gradient of a bias, of beta or the gate, is a sum over all tokens whose terms may cancel.
    Its error, and that of the bias, is relative to what a column of the weight gets, if that is
    more: the same sum, each term times an input of size one. It has one number per head: so few
    are off by more than their standard deviation more often.
    """

    loss: float
    tensor: float
    bias: float


# A layout changes the order of sums, in fp32 of up to 768 tokens: roundings by 2^-24 at random are
# sqrt(768) 2^-24 = 1.7e-6. Terms of a loss have one sign: 1e-6 are 16 roundings of the result.
# Largest seen on CPUs: loss 4e-7, tensor 4e-6 (3e-6 of them from the norm that clips), bias 6e-6.
EXACT = Budget(loss=1e-6, tensor=1e-5, bias=1e-5)
# On GPUs the kernels multiply fp32 in terms of 16 bits. Of numbers that differ by 2^-24 one in 2^8
# is rounded the other way, by 2^-16: 2^-16 / sqrt(2^8) = 1e-6 for one product, more for chains of
# them and where terms cancel. Largest seen on H200: 9e-5, of beta's bias.
FP32 = Budget(loss=1e-5, tensor=3e-4, bias=3e-4) if torch.cuda.is_available() else EXACT
# Low precision, against one rank in fp32. bf16 rounds by 2^-9: a gradient that passes four layers
# of about 20 roundings, forward and backward, is off by sqrt(80) 2^-9 = 1.7e-2, which is also the
# largest seen (loss 3e-4). float8 rounds what the seven products of a layer take by
# 2^-4 at most, 2^-5 on average: sqrt(28) 2^-5 = 1.7e-1; seen 1.5e-1 (loss 6e-4).
# Biases: three standard deviations; seen on CPUs 2e-2 and 2.2e-1 in the columns always run.
BF16 = Budget(loss=1e-3, tensor=3e-2, bias=5e-2)
FLOAT8 = Budget(loss=1e-3, tensor=2.5e-1, bias=5e-1)


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism and other arguments, and what to expect of them."""

    name: str
    arguments: tuple[str, ...] = ()
    shard: int = 1
    replicate: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    accumulate: int = 1
    budget: Budget = FP32

    @property
    def ranks(self) -> int:
        return self.shard * self.replicate * self.tensor * self.pipeline * self.context

    @property
    def degrees(self) -> tuple[str, ...]:
        return (
            f"--parallelism.data_parallel_shard_degree={self.shard}",
            f"--parallelism.data_parallel_replicate_degree={self.replicate}",
            f"--parallelism.tensor_parallel_degree={self.tensor}",
            f"--parallelism.pipeline_parallel_degree={self.pipeline}",
            f"--parallelism.context_parallel_degree={self.context}",
        )

    @property
    def overrides(self) -> tuple[str, ...]:
        local_batch = BATCH // (self.shard * self.replicate)
        return (
            *self.degrees,
            f"--training.local_batch_size={local_batch // self.accumulate}",
            f"--validation.local_batch_size={local_batch // self.accumulate}",
            f"--validation.steps={self.accumulate}",
            *self.arguments,
        )

    def __str__(self) -> str:
        return self.name


ONE_RANK = Layout("one rank")


class Parity:
    """Starts runs from the seed checkpoint of a column and keeps those on one rank."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._runs: dict[tuple[str, ...], Run] = {}

    def seed(self, column: Column) -> str:
        """The argument that starts a run of the column."""
        run = self._once(*column.job, "--checkpoint.create_seed_checkpoint")
        return f"--checkpoint.initial_load_path={run.folder}/checkpoint/step-0"

    def one_rank(self, column: Column, *arguments: str) -> Run:
        return self._once(*column.job, self.seed(column), *ONE_RANK.overrides, *arguments)

    def run(self, folder: Path, column: Column, layout: Layout, *arguments: str) -> Run:
        job = (*column.job, self.seed(column), *layout.overrides, *arguments)
        return train(folder, *job, ranks=layout.ranks)

    def _once(self, *arguments: str) -> Run:
        if arguments not in self._runs:
            self._runs[arguments] = train(self._folder / str(len(self._runs)), *arguments)
        return self._runs[arguments]


def parameters_and_moments(run: Run, step: int = 1) -> dict[str, torch.Tensor]:
    """Whole parameters by name from a checkpoint, and Adam's first moments as `<name>.exp_avg`."""
    state: dict = {}
    _load_state_dict(
        state,
        storage_reader=FileSystemReader(run.folder / "checkpoint" / f"step-{step}"),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    moments = {
        key.removeprefix("state."): value
        for key, value in state["optimizer"].items()
        if key.endswith(".exp_avg")
    }
    names = [key.removesuffix(".exp_avg") for key in moments]
    return {**{name: state[name] for name in names}, **moments}


def assert_same_training(run: Run, expected: Run, budget: Budget) -> None:
    assert run.loss == pytest.approx(expected.loss, rel=budget.loss)
    assert run.validation_loss == pytest.approx(expected.validation_loss, rel=budget.loss)
    assert run.grad_norm == pytest.approx(expected.grad_norm, rel=budget.tensor)
    assert run.tokens_seen == expected.tokens_seen
    assert_same_state(run, expected, budget)


def assert_same_state(run: Run, expected: Run, budget: Budget, step: int = 1) -> None:
    tensors, references = parameters_and_moments(run, step), parameters_and_moments(expected, step)
    assert tensors.keys() == references.keys()
    errors = {name: relative_error(tensors[name], references[name]) for name in references}
    for name in references:
        if name.endswith(".bias"):
            share = cancelled(name, references)
            errors[name] /= share
            errors[f"{name}.exp_avg"] /= share
    limits = {n: budget.bias if ".bias" in n else budget.tensor for n in references}
    wrong = {name: error for name, error in errors.items() if not error <= limits[name]}
    assert not wrong, wrong


def cancelled(name: str, references: dict[str, torch.Tensor]) -> float:
    """How much larger than the gradient of a bias that of a column of its weight is; 1 if not."""
    bias, weight = (
        references[f"{n}.exp_avg"].double() for n in (name, name.replace(".bias", ".weight"))
    )
    return max(1.0, float(weight.norm() / weight.shape[1] ** 0.5 / bias.norm()))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())
