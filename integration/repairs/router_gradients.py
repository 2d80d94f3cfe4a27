"""#2387: a rank takes its part of a router's gradient for the whole.

With tensor parallelism of experts a rank has gradients of the scores through its part of each
expert, which torchtitan 0.2.2 takes for whole. They are if scores multiply the experts' inputs,
whose gradients are summed.

Applies: torchtitan 0.2.2, tensor_parallel_degree > 1 with experts and without expert parallelism
(with it the fault stays), every attention.

Delete: when https://github.com/pytorch/torchtitan/issues/2387 is fixed in the required
torchtitan, this file and `router_gradients.sum_gradients` in train_spec.py. test_experts of
tests/integration/test_parallel.py passes without it then.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torchtitan.distributed import ParallelDims


def sum_gradients(model: nn.Module, parallel_dims: ParallelDims) -> None:
    """Sums the gradients of routers over ranks that split experts. Call it after the stock plan."""
    if not parallel_dims.tp_enabled or parallel_dims.ep_enabled:
        return
    mesh = parallel_dims.get_mesh("tp")

    def sum_gradient(gate: nn.Module, inputs: tuple, scores: torch.Tensor) -> torch.Tensor:
        whole = DTensor.from_local(scores, mesh, (Replicate(),), run_check=False)
        return whole.to_local(grad_placements=(Partial(),))

    for module in model.modules():
        # torchtitan's MoE, whose import needs Triton
        if vars(module).get("score_before_experts") is False:
            module.router.gate.register_forward_hook(sum_gradient)
