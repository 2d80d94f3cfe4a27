"""Our attentions work under the context parallelism of torchtitan 0.2.2.

torchtitan cuts tokens, labels and `positions` of each sequence into the segments of its load
balancer and gives every block the positions of its rank. Here the layout is read from those
positions, once per length, and document masks are cut as tokens are.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchtitan.distributed.context_parallel as stock
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from path_backend.context_parallel.layout import Layout, layout_from_positions
from path_backend.integration.torchtitan.substitute import substituted
from path_backend.layers.segmented import Segmented
from path_backend.layers.variants import VARIANTS

LOAD_BALANCERS = ("headtail", None)
ROTATE_METHODS = {"allgather": "allgather", "alltoall": "ring"}  # torchtitan's name: ours


def check(job_config, attention: str, n_kv_heads: int) -> None:
    """Refuse what cannot work. Raises ValueError, before any collective, on every rank."""
    parallelism = job_config.parallelism
    degree = parallelism.context_parallel_degree
    if degree == 1:
        return
    if not VARIANTS[attention].takes_segments:
        raise ValueError(
            f'parallelism.context_parallel_degree must be 1 with model.attention = "{attention}", '
            f"got {degree}"
        )
    for key, choices in (
        ("context_parallel_load_balancer", LOAD_BALANCERS),
        ("context_parallel_rotate_method", tuple(ROTATE_METHODS)),
    ):
        value = getattr(parallelism, key)
        if value not in choices:
            raise ValueError(
                f'parallelism.{key} must be one of {choices} with model.attention = "{attention}", '
                f"got {value!r}"
            )
    heads = n_kv_heads // parallelism.tensor_parallel_degree
    if job_config.model.path.context_parallel == "heads" and heads % degree:
        raise ValueError(
            'model.path.context_parallel = "heads" needs a parallelism.context_parallel_degree '
            f"that divides the {heads} key/value heads of each rank, got {degree}"
        )


@contextlib.contextmanager
def applied(
    parallelize: Callable[..., nn.Module],
    model: nn.Module,
    parallel_dims: ParallelDims,
    job_config,
) -> Iterator[None]:
    """Context in which torchtitan's `parallelize` gives `model` our context parallelism.

    It calls a function of its module by name with the inner attentions, where other attentions get
    hooks for SDPA; that name is ours for the time of the call.
    """
    if not parallel_dims.cp_enabled:
        yield
        return
    name = "apply_cp_to_attention_module"
    namespace = getattr(parallelize, "__globals__", {})
    if name not in namespace:
        raise ValueError(
            f"context parallelism needs a parallelize_fn whose module has {name}, "
            f"got none in {parallelize.__module__}"
        )
    method = ROTATE_METHODS[job_config.parallelism.context_parallel_rotate_method]
    if job_config.model.path.context_parallel == "heads":
        method = "heads"

    def share(modules: list[nn.Module], mesh: DeviceMesh, attention_type: str) -> None:
        share_sequences(model, Segmented(mesh.get_group(), method))

    with substituted(namespace, name, share):
        yield


def share_sequences(model: nn.Module, segmented: Segmented) -> None:
    """Give `segmented` to the attention of each block, and let each forward of `model` set them."""
    for block in model.layers.values():
        block.attention.segmented = segmented
    model.register_forward_pre_hook(_LayoutReader(segmented), with_kwargs=True)
    logger.info(f"Applied context parallelism ({segmented.exchange}) to the attention")


class _LayoutReader:
    """Sets before each forward the layout that its `positions` [B, tokens of this rank] have.

    Reading it waits for the device and for the other ranks. It is done once per length; later
    positions are compared with the first ones on the device.
    """

    def __init__(self, segmented: Segmented):
        self._shards = segmented
        self._known: dict[int, tuple[Layout, torch.Tensor]] = {}

    def __call__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        positions = kwargs.get("positions")
        if positions is None:
            raise ValueError(
                "a model with context parallelism needs the keyword argument positions [B, T], the "
                "place of each token in its sequence, got none"
            )
        length = positions.shape[1]
        if length not in self._known:
            layout = layout_from_positions(positions, self._shards.group)
            self._known[length] = layout, positions[:1].clone()
        self._shards.layout, expected = self._known[length]
        torch._assert_async(
            (positions == expected).all(),
            f"positions of {length} tokens must stay those of the first forward with that many",
        )


def shard_document_masks() -> None:
    """Let torchtitan cut a mask [B, T] of integers as it cuts tokens; it refuses other tensors.

    Call it once. Values stay: they count from the first token of the whole sequence.
    """
    cut = stock.cp_shard

    @functools.wraps(cut)
    def cp_shard(cp_mesh, inputs, attention_masks, *args, **kwargs):
        if not isinstance(attention_masks, torch.Tensor):
            return cut(cp_mesh, inputs, attention_masks, *args, **kwargs)
        (*inputs, mask), _ = cut(cp_mesh, (*inputs, attention_masks), None, *args, **kwargs)
        return tuple(inputs), mask

    stock.cp_shard = cp_shard
