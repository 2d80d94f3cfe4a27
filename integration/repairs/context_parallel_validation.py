"""#3257 and #2077: validation under context parallelism is wrong or fails.

torchtitan 0.2.2 divides the validation loss by the tokens of one rank, then sums it over the ranks
of a sequence: it is too large by the degree (#3257). And its validator reads `freqs_cis` of each
model, to no end; qwen3 has none, and its validation fails (#2077).

Applies: torchtitan 0.2.2, context_parallel_degree > 1 with validation.enable, every attention.

Delete: when the required torchtitan contains https://github.com/pytorch/torchtitan/pull/3257,
`build_validator` here and in train_spec.py; when https://github.com/pytorch/torchtitan/issues/2077
is fixed in it, `accept_freqs_cis` here and there. The rows "CP2" of
tests/integration/test_parallel.py pass without them then.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torchtitan.components.validate import BaseValidator, Validator
from torchtitan.distributed import ParallelDims


def build_validator(stock_builder: Callable[..., BaseValidator], **arguments) -> BaseValidator:
    """Returns torchtitan's validator, with the loss over all tokens under context parallelism."""
    validator = stock_builder(**arguments)
    dims = arguments.get("parallel_dims")
    if dims and dims.cp_enabled and type(validator).validate is Validator.validate:
        validator.parallel_dims = _DimsOfLoss(dims)
    return validator


class _DimsOfLoss:
    """Parallel dimensions that make a validator count tokens where it sums losses.

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


def accept_freqs_cis(model: nn.Module, parallel_dims: ParallelDims) -> None:
    """Gives a model without llama3's `freqs_cis` an empty one, which the validator reads."""
    if parallel_dims.cp_enabled and not hasattr(model, "freqs_cis"):
        model.register_buffer("freqs_cis", None)
