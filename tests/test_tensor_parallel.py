"""Gradients under tensor parallelism, on two processes, beside those of one."""

import torch
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from path_backend.integration.tensor_parallel import sum_partial_gradients


def norm_gradients(group, x):
    """Local gradients of a norm's weight after each of two micro-batches, and their placements."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.RMSNorm(x.shape[-1]))
    parallelize_module(model, mesh, {"0": SequenceParallel()})
    sum_partial_gradients(model)
    gradients = []
    for batch in (x, 2 * x):
        (model(distribute_tensor(batch, mesh, [Shard(1)])) ** 3).sum().backward()
        gradient = model[0].weight.grad
        gradients.append((gradient.to_local().clone(), gradient.placements))
    return gradients


def test_gradients_of_norms_are_whole():
    """A rank whose fused optimizer steps with the gradient of its own tokens alone."""
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    outcomes = on_ranks(2, norm_gradients, x)
    norm = nn.RMSNorm(8)
    for micro_batch, batch in enumerate((x, 2 * x)):
        (norm(batch) ** 3).sum().backward()
        for gradients in outcomes:
            local, placements = gradients[micro_batch]
            assert placements == (Replicate(),)
            torch.testing.assert_close(local, norm.weight.grad)
