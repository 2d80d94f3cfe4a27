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
from collections.abc import Callable
from typing import Any

import torch
import torchtitan.protocols.train_spec as registry
from torch import nn
from torchtitan.components.metrics import MetricsProcessor, build_metrics_processor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

from path_backend.integration.data import tasks
from path_backend.integration.data.hub_tokenizer import with_hub_tokenizer
from path_backend.integration.repairs import (
    compiled_embedding,
    context_parallel_metrics,
    context_parallel_validation,
    ddp_mean_gradient,
    partial_norm_gradients,
    pipeline_mean_loss,
    qwen3_pipeline,
    router_gradients,
    tied_embeddings,
)
from path_backend.integration.torchtitan import (
    context_parallel,
    metrics,
    refusals,
    resume,
    state_dict,
)
from path_backend.integration.torchtitan.model import PathArgs, args_with_attention, build_model
from path_backend.integration.torchtitan.tensor_parallel import apply_tensor_parallel

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
    """Returns a spec that trains `spec`'s model with the attention that the job asks for.

    It trains on tasks too, and has the repairs of torchtitan for every attention.
    """
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
        build_optimizers_fn=functools.partial(
            partial_norm_gradients.build_optimizers, spec.build_optimizers_fn
        ),
        build_loss_fn=functools.partial(ddp_mean_gradient.build_loss, spec.build_loss_fn),
        build_metrics_processor_fn=functools.partial(
            _build_metrics_processor, spec.build_metrics_processor_fn or build_metrics_processor
        ),
        build_validator_fn=(
            functools.partial(context_parallel_validation.build_validator, spec.build_validator_fn)
            if spec.build_validator_fn
            else None
        ),
        state_dict_adapter=(
            functools.partial(state_dict.build_adapter, spec.state_dict_adapter)
            if spec.state_dict_adapter
            else None
        ),
        **pipeline_mean_loss.with_mean_loss(spec),
    )


class _Flavors(dict):
    """Arguments by flavor; a flavor that is not there raises an error that lists those that are."""

    def __missing__(self, flavor: str) -> PathArgs:
        raise ValueError(f"model.flavor must be one of {', '.join(self)}, got {flavor!r}")


def _guarded(spec: TrainSpec) -> TrainSpec:
    """Returns the spec if it is wrapped, else one that refuses an attention it would ignore."""
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
        wrapped = wrap_train_spec(qwen3_pipeline.with_pipeline(spec))
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
    flavor = flavors.get(job_config.model.flavor)
    if flavor is not None:
        refusals.warn_of_vocabulary(tokenizer, flavor, job_config)
    refusals.check_tokenizer(tokenizer, flavors.get(job_config.model.flavor), job_config)
    return tokenizer


def _parallelize(
    stock: Callable[..., nn.Module],
    model: nn.Module,
    parallel_dims: ParallelDims,
    job_config: JobConfig,
) -> nn.Module:
    """Split our parameters, then do everything else as stock does it, with its repairs."""
    refusals.check_training(model.model_args, parallel_dims, job_config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(tied_embeddings.one_group(stock, model, parallel_dims))
        if getattr(model.model_args, "attention", "default") != "default":
            _save_attention(stock, job_config)
            if parallel_dims.tp_enabled:
                apply_tensor_parallel(model, parallel_dims.get_mesh("tp"))
            stack.enter_context(context_parallel.applied(stock, model, parallel_dims, job_config))
        model = stock(model, parallel_dims, job_config)
    context_parallel_validation.accept_freqs_cis(model, parallel_dims)
    router_gradients.sum_gradients(model, parallel_dims)
    compiled_embedding.finish(model, parallel_dims, job_config)
    return model


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


def _build_metrics_processor(
    stock: Callable[..., MetricsProcessor],
    job_config: JobConfig,
    parallel_dims: ParallelDims,
    model_args: PathArgs | None = None,
    tag: str | None = None,
) -> MetricsProcessor:
    processor = stock(job_config, parallel_dims, model_args, tag)
    if parallel_dims.cp_enabled:
        context_parallel_metrics.count_once(processor, parallel_dims.cp)
    if model_args is not None and model_args.watch:
        metrics.watch(processor, model_args.n_layers)
    return processor
