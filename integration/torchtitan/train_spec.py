"""Train specs of torchtitan whose attention follows `[model] attention`.

`register` puts wrapped specs in front of llama3 and qwen3; `wrap_train_spec` does the same for a
spec of yours. A model fits if each of its blocks has an `attention` with wq, wk, wv, wo, head_dim,
and q_norm and k_norm or neither. Any other spec trains with `attention = "default"` only.
"""

import contextlib
import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchtitan.protocols.train_spec as registry
from torch import nn
from torchtitan.components.loss import LossFunction
from torchtitan.components.metrics import MetricsProcessor, build_metrics_processor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig
from torchtitan.config.job_config import Optimizer as OptimizerConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec
from torchtitan.tools.logging import logger

from path_backend.integration.data import tasks
from path_backend.integration.data.hub_tokenizer import with_hub_tokenizer
from path_backend.integration.repairs import pipeline
from path_backend.integration.repairs.substitute import substituted
from path_backend.integration.torchtitan import (
    context_parallel,
    metrics,
    refusals,
    resume,
    state_dict,
)
from path_backend.integration.torchtitan.model import PathArgs, args_with_attention, build_model
from path_backend.integration.torchtitan.tensor_parallel import (
    apply_tensor_parallel,
    repair_routers,
    sum_partial_gradients,
)

MODELS = ("llama3", "qwen3")


def register() -> None:
    """Register the wrapped spec of each of `MODELS`; it is built when torchtitan first uses it.

    torchtitan's look-up of a spec is replaced by one that guards those that nobody wrapped, its
    cutting of masks by one that takes ours, its loading of checkpoints by one that checks them.
    """
    for name in MODELS:
        register_train_spec(name, _LazyTrainSpec(name))
    stock = registry.get_train_spec
    registry.get_train_spec = functools.wraps(stock)(lambda name: _guarded(stock(name)))
    context_parallel.shard_document_masks()
    resume.refuse_other_checkpoints()


def wrap_train_spec(spec: TrainSpec) -> TrainSpec:
    """A spec that trains `spec`'s model with the attention that the job asks for, and on tasks."""
    spec = tasks.with_tasks(with_hub_tokenizer(spec))
    parallelize = spec.parallelize_fn
    if isinstance(parallelize, _Guard):  # from torchtitan's look-up
        parallelize = parallelize.stock
    flavors = _Flavors(
        {flavor: args_with_attention(args) for flavor, args in spec.model_args.items()}
    )
    return dataclasses.replace(
        spec,
        model_cls=functools.partial(build_model, spec.model_cls),
        model_args=flavors,
        build_tokenizer_fn=functools.partial(_build_tokenizer, spec.build_tokenizer_fn, flavors),
        parallelize_fn=functools.partial(_parallelize, parallelize),
        build_optimizers_fn=functools.partial(_build_optimizers, spec.build_optimizers_fn),
        build_loss_fn=functools.partial(_build_loss, spec.build_loss_fn),
        build_metrics_processor_fn=functools.partial(
            _build_metrics_processor, spec.build_metrics_processor_fn or build_metrics_processor
        ),
        build_validator_fn=(
            functools.partial(context_parallel.build_validator, spec.build_validator_fn)
            if spec.build_validator_fn
            else None
        ),
        state_dict_adapter=(
            functools.partial(state_dict.build_adapter, spec.state_dict_adapter)
            if spec.state_dict_adapter
            else None
        ),
        **pipeline.with_mean_loss(spec),
    )


class _Flavors(dict):
    """Arguments by flavor; of one that is not there, an error that lists those that are."""

    def __missing__(self, flavor: str) -> PathArgs:
        raise ValueError(f"model.flavor must be one of {', '.join(self)}, got {flavor!r}")


def _guarded(spec: TrainSpec) -> TrainSpec:
    """The spec if it is wrapped, else one that refuses an attention that it would ignore."""
    if any(isinstance(args, PathArgs) for args in spec.model_args.values()):
        return spec
    return dataclasses.replace(spec, parallelize_fn=_Guard(spec.parallelize_fn))


class _Guard:
    """`parallelize_fn` of a spec that is not wrapped: called by every trainer, before training."""

    def __init__(self, stock: Callable[..., nn.Module]):
        self.stock = stock

    def __call__(
        self, model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig
    ) -> nn.Module:
        attention = getattr(job_config.model, "attention", "default")
        if attention != "default":
            raise ValueError(
                f'model.attention = "{attention}" needs model.name to be one of '
                f"{', '.join(MODELS)} or of a spec made by "
                "path_backend.integration.torchtitan.train_spec.wrap_train_spec, got "
                f"{job_config.model.name!r}"
            )
        return self.stock(model, parallel_dims, job_config)


class _LazyTrainSpec:
    """Imports a stock model only when a job uses it: some need packages that others do not."""

    def __init__(self, name: str):
        self._name = name

    @functools.cached_property
    def _spec(self) -> TrainSpec:
        spec = importlib.import_module(f"torchtitan.models.{self._name}").get_train_spec()
        # qwen3 works in stages (its forward passes over missing modules), but 0.2.2 names no
        # function for it.
        spec = dataclasses.replace(spec, pipelining_fn=spec.pipelining_fn or pipeline_llm)
        wrapped = wrap_train_spec(spec)
        if self._name == "llama3":
            from path_backend.integration.torchtitan.flavors import flavors

            wrapped.model_args.update(flavors())
        return wrapped

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._spec, attribute)


def _build_tokenizer(
    stock: Callable[[JobConfig], BaseTokenizer | None], flavors: _Flavors, job_config: JobConfig
) -> BaseTokenizer | None:
    tokenizer = stock(job_config)
    refusals.check_tokenizer(tokenizer, flavors.get(job_config.model.flavor), job_config)
    return tokenizer


def _parallelize(
    stock: Callable[..., nn.Module],
    model: nn.Module,
    parallel_dims: ParallelDims,
    job_config: JobConfig,
) -> nn.Module:
    """Tensor parallelism of our parameters, then everything else as stock does it.

    The repairs of stock torchtitan 0.2.2 apply to every attention, `default` too: without them it
    does not run or does not learn, and an attention would be compared with a broken one.
    """
    refusals.check_training(model.model_args, parallel_dims, job_config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_one_group_for_tied_embeddings(stock, model, parallel_dims))
        if getattr(model.model_args, "attention", "default") != "default":
            _save_attention(stock, job_config)
            if parallel_dims.tp_enabled:
                apply_tensor_parallel(model, parallel_dims.get_mesh("tp"))
            stack.enter_context(context_parallel.applied(stock, model, parallel_dims, job_config))
        model = stock(model, parallel_dims, job_config)
    context_parallel.repair_model(model, parallel_dims)
    if parallel_dims.tp_enabled and not parallel_dims.ep_enabled:
        repair_routers(model, parallel_dims.get_mesh("tp"))
    if parallel_dims.tp_enabled and job_config.compile.enable and model.tok_embeddings is not None:
        _finish_embeddings(model)
    return model


def _build_optimizers(
    stock: Callable[..., OptimizersContainer],
    model_parts: list[nn.Module],
    optimizer_config: OptimizerConfig,
    parallel_dims: ParallelDims,
    *args,
    **kwargs,
) -> OptimizersContainer:
    """The stock optimizers, of gradients that are whole."""
    if parallel_dims.tp_enabled and not parallel_dims.fsdp_enabled:
        for part in model_parts:
            sum_partial_gradients(part)
    return stock(model_parts, optimizer_config, parallel_dims, *args, **kwargs)


def _build_loss(
    stock: Callable[..., LossFunction],
    job_config: JobConfig,
    *,
    parallel_dims: ParallelDims,
    **kwargs,
) -> LossFunction:
    """The stock loss; under DDP its gradient, not its value, is multiplied by the ranks (#2323).

    Each rank divides by the tokens of all, so that the gradients of ranks add up to those of the
    mean. DDP averages instead, and must: when gradients accumulate it reduces those of earlier
    micro-batches again, which an average leaves as they are and a sum does not.
    """
    loss_fn = stock(job_config, parallel_dims=parallel_dims, **kwargs)
    if not refusals.is_ddp(parallel_dims):
        return loss_fn
    ranks = parallel_dims.dp_replicate

    def loss_of_ddp(prediction: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(prediction, labels)
        return loss.detach() + ranks * (loss - loss.detach())

    return loss_of_ddp


def _save_attention(stock: Callable[..., nn.Module], job_config: JobConfig) -> None:
    """Let selective checkpointing per op keep the attention instead of computing it again."""
    checkpointing = job_config.activation_checkpoint
    if checkpointing.mode != "selective" or checkpointing.selective_ac_option != "op":
        return
    save_list = getattr(sys.modules[stock.__module__], "_op_sac_save_list", None)
    if save_list is None:
        raise ValueError(
            'activation_checkpoint.selective_ac_option = "op" needs a set _op_sac_save_list in the '
            f"module of parallelize_fn to keep the attention, got none in {stock.__module__}"
        )
    ops = torch.ops.path_backend
    save_list |= {op.default for op in (ops.attention, ops.context_parallel_attention, ops.halo)}


def _finish_embeddings(model: nn.Module) -> None:
    """Tensor parallelism with compiled blocks, on torch 2.13.

    The sharded embedding returns a collective in flight. A compiled block that receives one passes
    no gradient back: the embedding would not train (with FSDP2) or the backward fails (without).
    """
    model.tok_embeddings.register_forward_hook(lambda module, inputs, output: output.clone())


@contextlib.contextmanager
def _one_group_for_tied_embeddings(
    stock: Callable[..., nn.Module], model: nn.Module, parallel_dims: ParallelDims
) -> Iterator:
    """FSDP2 of a model whose output layer is its embedding, on torch 2.13.

    torchtitan 0.2.2 shards the embedding and [norm, output] as two groups, and torch 2.13 refuses a
    parameter that is in both. Later torchtitan (#2522) shards the three as one, and so does this.
    """
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


def _build_metrics_processor(
    stock: Callable[..., MetricsProcessor],
    job_config: JobConfig,
    parallel_dims: ParallelDims,
    model_args: PathArgs | None = None,
    tag: str | None = None,
) -> MetricsProcessor:
    processor = stock(job_config, parallel_dims, model_args, tag)
    if parallel_dims.cp_enabled:
        context_parallel.repair_metrics(processor, parallel_dims.cp)
    if model_args is not None and model_args.watch:
        metrics.watch(processor, model_args.n_layers)
    return processor
