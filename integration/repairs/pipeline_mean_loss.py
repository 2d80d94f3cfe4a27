"""#2972: pipelines train on the gradients of the summed loss.

torchtitan 0.2.2 divides the loss of a step by its number of tokens, except under pipeline
parallelism: there the gradients are those of the sum, too large by that number, so that clipping
sets their size and the logged norm means something else. Here the last stage divides each
micro-batch's loss. The number is known by then: the trainer draws all batches of a step before it
runs the first.

Applies: torchtitan 0.2.2, pipeline_parallel_degree > 1, every attention.

Delete: when https://github.com/pytorch/torchtitan/issues/2972 is fixed in the required
torchtitan, this file and `pipeline_mean_loss.with_mean_loss` in train_spec.py. The rows "PP2" of
tests/integration/test_parallel.py pass without it then.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims, utils
from torchtitan.protocols.train_spec import DataLoaderBuilder, PipeliningFunction, TrainSpec


def with_mean_loss(spec: TrainSpec) -> dict[str, Any]:
    """Returns `spec`'s builders of the data loader and pipeline, joined by a count of tokens."""
    if spec.pipelining_fn is None:
        return {}
    mean = _MeanLoss(spec.build_dataloader_fn, spec.pipelining_fn)
    return {"build_dataloader_fn": mean.build_dataloader, "pipelining_fn": mean.build_pipeline}


class _MeanLoss:
    """Builders that let the pipeline divide its loss by the tokens that the data loader gave."""

    def __init__(self, build_dataloader: DataLoaderBuilder, build_pipeline: PipeliningFunction):
        self._stock_dataloader = build_dataloader
        self._stock_pipeline = build_pipeline
        self._drawn: _CountingLoader | None = None
        self._divisor = 1.0

    def build_dataloader(self, *args, job_config: JobConfig, **kwargs) -> BaseDataLoader:
        loader = self._stock_dataloader(*args, job_config=job_config, **kwargs)
        if job_config.parallelism.pipeline_parallel_degree == 1:
            return loader
        self._drawn = _CountingLoader(loader)
        return self._drawn

    def build_pipeline(
        self, model, parallel_dims: ParallelDims, job_config, device, args, parallelize, loss_fn
    ):
        def mean_loss(prediction: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return loss_fn(prediction, labels) / self._divisor

        schedule, parts, has_first, has_last = self._stock_pipeline(
            model, parallel_dims, job_config, device, args, parallelize, mean_loss
        )
        mesh = parallel_dims.get_mesh("batch") if parallel_dims.dp_enabled else None
        stock_step = schedule.step

        def step(*args, target=None, losses: list[torch.Tensor] | None = None, **kwargs):
            if target is not None and torch.is_grad_enabled():
                self._divisor = self._tokens(mesh, device)
            else:
                self._divisor = 1.0  # validation divides the sum by its own tokens
            output = stock_step(*args, target=target, losses=losses, **kwargs)
            if losses:  # the trainer divides them again, for its log
                losses[:] = [loss.detach() * self._divisor for loss in losses]
            return output

        schedule.step = step
        return schedule, parts, has_first, has_last

    def _tokens(self, mesh: DeviceMesh | None, device: torch.device) -> float:
        """Returns the valid tokens of the current step on all data parallel ranks."""
        tokens = self._drawn.take()
        if tokens is None:  # a later micro-batch of gradient accumulation
            return self._divisor
        if mesh is None:
            return float(tokens)
        return utils.dist_sum(torch.tensor(tokens, device=device), mesh)


class _CountingLoader(BaseDataLoader):
    """A data loader that counts the valid labels of the batches it has given out."""

    def __init__(self, loader: BaseDataLoader):
        self._loader = loader
        self._tokens: int | None = None

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for inputs, labels in self._loader:
            self._tokens = (self._tokens or 0) + int((labels != IGNORE_INDEX).sum())
            yield inputs, labels

    def take(self) -> int | None:
        """Returns the count since the last call, or None if no batch was drawn since."""
        tokens, self._tokens = self._tokens, None
        return tokens

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loader.load_state_dict(state_dict)
