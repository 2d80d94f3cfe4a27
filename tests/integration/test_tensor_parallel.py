"""Gradients under tensor parallelism, on two processes, beside those of one."""

import torch
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import get_train_spec
from trainer import TINY

from path_backend.integration.repairs.partial_norm_gradients import sum_partial_gradients
from path_backend.integration.torchtitan.job import load_job, model_args


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


def partial_gradients(group):
    """Names of parameters whose gradient is a partial sum, in a model built as the trainer does."""
    job = load_job([f"--job.config_file={TINY}", "--model.attention=path_fox"])
    dims = ParallelDims(
        dp_replicate=1, dp_shard=1, cp=1, tp=2, pp=1, ep=1, etp=1, world_size=2
    )  # fmt: skip
    dims.build_mesh()
    spec, args = get_train_spec(job.model.name), model_args(job)
    with torch.device("meta"):
        model = spec.model_cls(args)
    model = spec.parallelize_fn(model, dims, job)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    spec.build_optimizers_fn([model], job.optimizer, dims)
    model(torch.arange(32)[None]).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(isinstance(gradient, DTensor) for gradient in gradients.values())
    return [n for n, g in gradients.items() if any(p.is_partial() for p in g.placements)]


def test_gradients_of_a_job_are_whole():
    """Hooks set on parameters that have no memory yet, which lose them when they get some."""
    assert on_ranks(2, partial_gradients) == [[], []]
