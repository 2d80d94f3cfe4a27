"""Tensor parallelism of what the layer adds: heads are split, as in the stock attention.

The stock plan handles wq, wk, wv, wo and the norms. Everything here must be a DTensor on the same
mesh: otherwise gradients are not reduced and gradient clipping meets two kinds of parameters.
`repair_routers` mends the stock plan for experts, `sum_partial_gradients` what the optimizer gets.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard `attention.path` of every block by heads. Call it before the stock parallelization."""
    styles = {
        "w_down": ReplicatedLinear(),
        "w_up": ColwiseParallel(),
        "conv": ShardedWeight(),
        "beta": ColwiseParallel(),
        "gate": ColwiseParallel(),
    }
    for block in model.layers.values():
        path = block.attention.path
        plan = {name: styles[name] for name, _ in path.named_children()}
        if plan:  # attention without parameters of its own has none
            parallelize_module(path, mesh, plan)


def repair_routers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Sum the gradients of routers over ranks that split experts. Call it after the stock plan.

    A rank has gradients of the scores through its part of each expert. torchtitan 0.2.2 takes them
    for whole (#2387). They are if scores multiply the experts' inputs, whose gradients are summed.
    """

    def sum_gradient(gate: nn.Module, inputs: tuple, scores: torch.Tensor) -> torch.Tensor:
        whole = DTensor.from_local(scores, mesh, (Replicate(),), run_check=False)
        return whole.to_local(grad_placements=(Partial(),))

    for module in model.modules():
        # torchtitan's MoE, whose import needs Triton
        if vars(module).get("score_before_experts") is False:
            module.router.gate.register_forward_hook(sum_gradient)


def sum_partial_gradients(model: nn.Module) -> None:
    """Sum each gradient over the ranks as soon as it is there. Call it when the parameters have
    memory: moving them from the meta device drops such hooks.

    That of a norm's weight comes as a partial sum of the rank's tokens. Before torch 2.13 the fused
    optimizers take it for whole, and ranks drift apart (#2217). FSDP2 sums it itself.
    """

    def whole(parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if any(placement.is_partial() for placement in gradient.placements):
            parameter.grad = gradient.redistribute(placements=parameter.placements)

    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            parameter.register_post_accumulate_grad_hook(whole)


class ReplicatedLinear(ParallelStyle):
    """Every rank computes the whole layer on a replicated DTensor; its gradients are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, output_fn=self._sum_gradient)

    @staticmethod
    def _sum_gradient(module, output, device_mesh):
        # The next layer returns a partial sum per rank; through this no-op it becomes the sum.
        return output.redistribute(placements=(Replicate(),))


class ShardedWeight(ParallelStyle):
    """Split a weight [channels, ..] by channels; the module works on the local part."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight = distribute_tensor(module.weight, device_mesh, [Shard(0)])
        module.weight = nn.Parameter(weight)
        return module
