"""#2217: the fused optimizer steps each rank with its own part of the norms' gradients.

Under tensor parallelism the gradient of a norm's weight comes as a partial sum of the rank's
tokens. Before torch 2.13 the fused optimizers take it for whole, and ranks drift apart. FSDP2 sums
it itself.

Applies: torch before 2.13, tensor_parallel_degree > 1 without FSDP2, every attention; it changes
nothing on later torch.

Delete: when torch 2.13 is the oldest that is supported, this file,
`partial_norm_gradients.build_optimizers` in train_spec.py and
tests/integration/test_tensor_parallel.py. The rows "TP2" of tests/integration/test_parallel.py pass
without it then.
"""

from collections.abc import Callable

from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config.job_config import Optimizer as OptimizerConfig
from torchtitan.distributed import ParallelDims


def build_optimizers(
    stock: Callable[..., OptimizersContainer],
    model_parts: list[nn.Module],
    optimizer_config: OptimizerConfig,
    parallel_dims: ParallelDims,
    *args,
    **kwargs,
) -> OptimizersContainer:
    """Returns the stock optimizers, of gradients that are whole."""
    if parallel_dims.tp_enabled and not parallel_dims.fsdp_enabled:
        for part in model_parts:
            sum_partial_gradients(part)
    return stock(model_parts, optimizer_config, parallel_dims, *args, **kwargs)


def sum_partial_gradients(model: nn.Module) -> None:
    """Sums each gradient over the ranks as soon as it is there.

    Call it when the parameters have memory: moving them from the meta device drops such hooks.
    """

    def whole(parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if any(placement.is_partial() for placement in gradient.placements):
            parameter.grad = gradient.redistribute(placements=parameter.placements)

    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            parameter.register_post_accumulate_grad_hook(whole)
