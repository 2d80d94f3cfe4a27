"""Parameters that the layer adds are split by heads, as in the stock attention.

The stock plan handles wq, wk, wv, wo and the norms. Everything here must be a DTensor on the same
mesh: otherwise gradients are not reduced and gradient clipping meets two kinds of parameters.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
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
