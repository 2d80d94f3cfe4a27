"""Context parallelism of torchtitan 0.2.2 for our attentions, and repairs for every attention.

torchtitan cuts tokens, labels and `positions` of each sequence into the pieces of its load balancer
and gives every block the positions of its rank. Here the layout is read from those positions, once
per length, and document masks are cut as tokens are.

Repaired, for `default` too, are numbers that belong to whole sequences and are taken from parts of
them, or the reverse: the validation loss (divided by the tokens of one rank, then summed over the
ranks), the largest loss of a rank (#3111), the tokens seen (#2983). And the validator asks each
model for llama3's `freqs_cis`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchtitan.distributed.context_parallel as stock
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.validate import BaseValidator, Validator
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from path_backend.context_parallel.layout import Layout, layout_from_positions
from path_backend.integration.repairs.substitute import substituted
from path_backend.layers.attention import Shards
from path_backend.layers.variants import VARIANTS

LOAD_BALANCERS = ("headtail", None)
ROTATE_METHODS = {"allgather": "allgather", "alltoall": "ring"}  # torchtitan's name: ours


def check(job_config, attention: str, n_kv_heads: int) -> None:
    """Refuse what cannot work. Raises ValueError, before any collective, on every rank."""
    parallelism = job_config.parallelism
    degree = parallelism.context_parallel_degree
    if degree == 1:
        return
    if not VARIANTS[attention].context_parallel:
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
        share_sequences(model, Shards(mesh.get_group(), method))

    with substituted(namespace, name, share):
        yield


def share_sequences(model: nn.Module, shards: Shards) -> None:
    """Give `shards` to the attention of each block, and let each forward of `model` set them."""
    for block in model.layers.values():
        block.attention.shards = shards
    model.register_forward_pre_hook(_LayoutReader(shards), with_kwargs=True)
    logger.info(f"Applied context parallelism ({shards.exchange}) to the attention")


class _LayoutReader:
    """Before a forward: set the layout that its `positions` [B, tokens of this rank] have.

    Reading it waits for the device and for the other ranks. It is done once per length; later
    positions are compared with the first ones on the device.
    """

    def __init__(self, shards: Shards):
        self._shards = shards
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


def build_validator(stock_builder: Callable[..., BaseValidator], **arguments) -> BaseValidator:
    """torchtitan's validator, with the loss over all tokens under context parallelism."""
    validator = stock_builder(**arguments)
    dims = arguments.get("parallel_dims")
    if dims and dims.cp_enabled and type(validator).validate is Validator.validate:
        validator.parallel_dims = _DimsOfLoss(dims)
    return validator


class _DimsOfLoss:
    """Parallel dimensions of a validator that counts tokens where it sums losses.

    It counts over the mesh `batch` the tokens of its part of each sequence, and sums over `loss`,
    which has the ranks of a sequence too.
    """

    def __init__(self, parallel_dims: ParallelDims):
        self._stock = parallel_dims

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    @property
    def dp_enabled(self) -> bool:
        return self._stock.dp_cp_enabled

    def get_mesh(self, dims):
        return self._stock.get_mesh("loss" if dims == "batch" else dims)


def repair_model(model: nn.Module, parallel_dims: ParallelDims) -> None:
    """The validator reads `freqs_cis` of each model, to no end; qwen3 has none."""
    if parallel_dims.cp_enabled and not hasattr(model, "freqs_cis"):
        model.register_buffer("freqs_cis", None)


def repair_metrics(processor: MetricsProcessor, degree: int) -> None:
    """Log the tokens of each sequence once, and the largest loss per token of a rank's part.

    Labels are taken to be spread evenly over the ranks.
    """
    log = processor.log

    @functools.wraps(log)
    def repaired(step, global_avg_loss, global_max_loss, *args, extra_metrics=None, **kwargs):
        extra_metrics = dict(extra_metrics or {})
        if "n_tokens_seen" in extra_metrics:
            extra_metrics["n_tokens_seen"] /= degree
        maximum = global_max_loss * degree
        log(step, global_avg_loss, maximum, *args, extra_metrics=extra_metrics, **kwargs)

    processor.log = repaired
