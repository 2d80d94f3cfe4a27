"""#2323: DDP averages gradients of a loss that is divided by the tokens of all ranks.

Each rank divides by the tokens of all, so that the gradients of ranks add up to those of the mean.
DDP averages instead, and must: when gradients accumulate it reduces those of earlier micro-batches
again, which an average leaves as they are and a sum does not. The gradients are too small by the
number of ranks. Here the gradient of the loss, not its value, is multiplied by it.

Applies: torchtitan 0.2.2, data_parallel_replicate_degree > 1 without FSDP2, every attention.

Delete: when the required torchtitan contains https://github.com/pytorch/torchtitan/pull/2323,
`build_loss` here and in train_spec.py; refusals.py needs `is_ddp` still. The rows "DDP" of
tests/integration/test_parallel.py pass without it then.
"""

from collections.abc import Callable

import torch
from torchtitan.components.loss import LossFunction
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims


def is_ddp(dims: ParallelDims) -> bool:
    """Returns whether replicas reduce gradients without FSDP2."""
    return dims.dp_replicate_enabled and not dims.fsdp_enabled


def build_loss(
    stock: Callable[..., LossFunction],
    job_config: JobConfig,
    *,
    parallel_dims: ParallelDims,
    **kwargs,
) -> LossFunction:
    """Returns the stock loss; under DDP one of the same value whose gradient is times the ranks."""
    loss_fn = stock(job_config, parallel_dims=parallel_dims, **kwargs)
    if not is_ddp(parallel_dims):
        return loss_fn
    ranks = parallel_dims.dp_replicate

    def loss_of_ddp(prediction: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(prediction, labels)
        return loss.detach() + ranks * (loss - loss.detach())

    return loss_of_ddp
