"""#2522: tied embeddings do not start under FSDP2 on torch 2.13.

torchtitan 0.2.2 shards the embedding and [norm, output] as two groups, and torch 2.13 refuses a
parameter that is in both. Later torchtitan shards the three as one, and so does this.

Applies: torchtitan 0.2.2, FSDP2, flavors with enable_weight_tying, every attention.

Delete: when the required torchtitan contains https://github.com/pytorch/torchtitan/pull/2522, this
file and `tied_embeddings.one_group` in train_spec.py. test_tied_embeddings of
tests/integration/test_parallel.py passes without it then.
"""

import contextlib
from collections.abc import Callable, Iterator

from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from path_backend.integration.torchtitan.substitute import substituted


@contextlib.contextmanager
def one_group(
    stock: Callable[..., nn.Module], model: nn.Module, parallel_dims: ParallelDims
) -> Iterator:
    """Context in which `stock` shards embedding, norm and output of a tied model as one group."""
    tied = getattr(model.model_args, "enable_weight_tying", False)
    if not (tied and parallel_dims.fsdp_enabled):
        yield
        return
    apply_fsdp = getattr(stock, "__globals__", {}).get("apply_fsdp")
    namespace = getattr(apply_fsdp, "__globals__", {})
    fully_shard = namespace.get("fully_shard")
    if fully_shard is None:  # it may shard in its own way, and right
        logger.warning(
            "Tied embeddings are not put into one FSDP2 group: expected an apply_fsdp that calls "
            f"fully_shard beside parallelize_fn, found none in {stock.__module__}"
        )
        yield
        return

    def shard_together(module, **options):
        if module is model.tok_embeddings:
            return module
        if isinstance(module, list) and model.output in module:
            module = [model.tok_embeddings, *module]
        return fully_shard(module, **options)

    with substituted(namespace, "fully_shard", shard_together):
        yield
