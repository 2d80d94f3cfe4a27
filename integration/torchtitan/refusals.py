"""Refusals at start-up of what a job cannot have, with what to change.

torchtitan and PyTorch refuse some of it too, but in the first step or without naming a key, and
some they train wrongly. `check_job` looks at the configuration, `check_tokenizer` at what ends a
document, `check_training` at ranks and device. Each raises ValueError, on every rank.
"""

import torch
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from torch.torch_version import TorchVersion
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from path_backend.arguments import Inputs
from path_backend.integration.data.tasks import training_task
from path_backend.integration.repairs.ddp_mean_gradient import is_ddp
from path_backend.integration.torchtitan import context_parallel
from path_backend.layers.variants import VARIANTS
from path_backend.ops import why_not_kernels

KEEPS_PIPELINE_BUFFERS = TorchVersion(torch.__version__) < (2, 13)
V_SCHEDULES = (ScheduleZBVZeroBubble, ScheduleDualPipeV)


def check_job(args, job_config: JobConfig) -> None:
    """Whether a model with `args` (model.PathArgs) can be what the configuration asks for."""
    if job_config.parallelism.pipeline_parallel_degree > 1:
        _check_model_in_stages(args, job_config)
        _check_micro_batches(job_config)
    if args.attention == "default":
        path = getattr(job_config.model, "path", None)
        if path is not None and path.document_mask:
            raise ValueError(
                'model.path.document_mask must be false with model.attention = "default", whose '
                "mask is the flavor's own (debugmodel_flex_attn and 8B_flex of llama3 mask "
                "documents), got true"
            )
        return
    if args.path.rope and not args.variant.takes_rope:
        known = ", ".join(name for name, variant in VARIANTS.items() if variant.takes_rope)
        raise ValueError(
            f"model.path.rope = true needs model.attention to be one of {known}, "
            f"got {args.attention!r}"
        )
    _check_heads(args, job_config)
    context_parallel.check(job_config, args.attention, args.kv_heads)
    _check_lengths(job_config)


def warn_of_vocabulary(tokenizer: BaseTokenizer | None, args, job_config: JobConfig) -> None:
    """Warns of a flavor for tasks on text, whose vocabulary is not the tokenizer's."""
    flavor = job_config.model.flavor
    if not flavor.startswith("task_") or tokenizer is None or training_task(job_config):
        return
    if tokenizer.get_vocab_size() != args.vocab_size:
        logger.warning(
            f"model.flavor = {flavor!r} is for tasks: on text it has a vocabulary of "
            f"{args.vocab_size}, the tokenizer {tokenizer.get_vocab_size()}"
        )


def check_tokenizer(tokenizer: BaseTokenizer | None, args, job_config: JobConfig) -> None:
    """Whether documents end, if attention must stay inside them. `args` are the flavor's."""
    path = getattr(job_config.model, "path", None)
    if path is not None and path.document_mask:
        mask = "model.path.document_mask = true"
    elif getattr(args, "attn_mask_type", "causal") == "block_causal":
        mask = f"the mask of model.flavor = {job_config.model.flavor!r}"
    else:
        return
    if tokenizer is not None and tokenizer.eos_id is None:
        raise ValueError(
            f"{mask} needs a tokenizer with an end-of-text token, got one without for "
            f"training.dataset = {job_config.training.dataset!r}"
        )


def check_training(args, dims: ParallelDims, job_config: JobConfig) -> None:
    """Whether the ranks and the device of a trainer can train a model with `args`."""
    if job_config.checkpoint.create_seed_checkpoint:  # trains nothing, on one rank
        return
    if is_ddp(dims) and (dims.tp_enabled or dims.pp_enabled):  # llama3 refuses, qwen3 trains wrong
        raise ValueError(
            f"parallelism.data_parallel_replicate_degree = {dims.dp_replicate} needs "
            "data_parallel_shard_degree > 1 with tensor or pipeline parallelism, got "
            f"tensor_parallel_degree = {dims.tp}, pipeline_parallel_degree = {dims.pp}: "
            f"data_parallel_shard_degree = {dims.dp_replicate} instead of it is FSDP2"
        )
    if job_config.optimizer.early_step_in_backward:
        _check_early_step(args, dims, job_config)
    if job_config.training.enable_cpu_offload and not dims.fsdp_enabled:
        raise ValueError(
            "training.enable_cpu_offload needs FSDP2, which brings parameters to the device: "
            "parallelism.data_parallel_shard_degree or context_parallel_degree > 1, got "
            f"{dims.dp_shard} and {dims.cp}"
        )
    if getattr(args, "attention", "default") == "default":
        _check_stock_attention(dims, job_config)
    elif args.path.implementation == "triton":
        _check_kernels(args)


def _check_model_in_stages(args, job_config: JobConfig) -> None:
    for key, what in (
        ("enable_weight_tying", "ties the output layer to the embedding of another stage"),
        ("moe_enabled", "has experts"),
    ):
        if getattr(args, key, False):
            raise ValueError(
                "parallelism.pipeline_parallel_degree must be 1, got "
                f"{job_config.parallelism.pipeline_parallel_degree}: flavor "
                f"{job_config.model.flavor!r} of {job_config.model.name} {what}"
            )


def _check_micro_batches(job_config: JobConfig) -> None:
    """Batches that a schedule, or the validator on it, cannot run."""
    training, validation = job_config.training, job_config.validation
    parallelism = job_config.parallelism
    degree = parallelism.pipeline_parallel_degree
    size = parallelism.pipeline_parallel_microbatch_size
    name = parallelism.pipeline_parallel_schedule
    schedule = get_schedule_class(name)
    if size < 1:
        raise ValueError(
            f"parallelism.pipeline_parallel_microbatch_size must be at least 1, got {size}"
        )
    needed = 1
    if not parallelism.pipeline_parallel_schedule_csv:  # which has an order of its own
        needed = {Schedule1F1B: degree, ScheduleDualPipeV: 2 * degree}.get(schedule, 1)
    micro_batches = training.local_batch_size // size
    if micro_batches < needed:
        raise ValueError(
            f"training.local_batch_size must be at least {needed * size}, {needed} micro-batches "
            f"of parallelism.pipeline_parallel_microbatch_size = {size}, in a pipeline of "
            f'{degree} ranks with pipeline_parallel_schedule = "{name}", got '
            f"{training.local_batch_size}"
        )
    if not validation.enable:
        return
    if schedule in V_SCHEDULES:  # forward alone, they still look for gradients
        raise ValueError(
            "validation.enable must be false with parallelism.pipeline_parallel_schedule = "
            f'"{name}", with which PyTorch cannot validate, got true'
        )
    for key in ("local_batch_size", "seq_len") if KEEPS_PIPELINE_BUFFERS else ():
        sizes = getattr(validation, key), getattr(training, key)
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"validation.{key} must be training.{key} in a pipeline, got "
                f"{sizes[0]} and {sizes[1]} (torch {torch.__version__} keeps the buffers "
                "between stages that it made for the first batch; 2.13 does not)"
            )
    if validation.local_batch_size % micro_batches:
        raise ValueError(
            f"validation.local_batch_size must be a multiple of {micro_batches}, the number of "
            "micro-batches (training.local_batch_size / "
            "parallelism.pipeline_parallel_microbatch_size), in a pipeline, got "
            f"{validation.local_batch_size}"
        )


def _check_heads(args, job_config: JobConfig) -> None:
    here = f'model.attention = "{args.attention}"'
    flavor = f"flavor {job_config.model.flavor!r}"
    tp = job_config.parallelism.tensor_parallel_degree
    if args.reflections and args.path.w_rank > args.dim:
        raise ValueError(
            f"model.path.w_rank must be at most {args.dim}, the dim of {flavor}, or 0 for full "
            f"rank, got {args.path.w_rank}"
        )
    if args.n_heads % args.kv_heads:
        raise ValueError(
            f"{here} needs n_heads to be a multiple of n_kv_heads, but {flavor} has "
            f"{args.n_heads} and {args.kv_heads}"
        )
    if args.kv_heads % tp:
        raise ValueError(
            f"{here} shards key/value heads: parallelism.tensor_parallel_degree must divide "
            f"the {args.kv_heads} key/value heads of {flavor}, got {tp}"
        )


def _check_lengths(job_config: JobConfig) -> None:
    """Sequences that ranks cannot share: torchtitan does not look at those of validation."""
    tp = job_config.parallelism.tensor_parallel_degree
    cp = job_config.parallelism.context_parallel_degree
    divisor, what = tp, "parallelism.tensor_parallel_degree"
    if cp > 1:
        divisor, what = 2 * cp * tp, f"2 * parallelism.context_parallel_degree * {what}"
    for table, used in (("training", True), ("validation", job_config.validation.enable)):
        length = getattr(job_config, table).seq_len
        if used and length % divisor:
            raise ValueError(
                f"{table}.seq_len must be a multiple of {what} = {divisor}, got {length}"
            )


def _check_early_step(args, dims: ParallelDims, job_config: JobConfig) -> None:
    """Steps with gradients that are not those of the whole batch yet, which torchtitan takes."""
    key = "optimizer.early_step_in_backward must be false"
    if is_ddp(dims):
        raise ValueError(
            f"{key} under DDP (parallelism.data_parallel_replicate_degree = {dims.dp_replicate} "
            "with data_parallel_shard_degree = 1), got true: a rank would step with the gradients "
            "of its own tokens. FSDP2 reduces them first"
        )
    batch = job_config.training.local_batch_size * dims.dp_replicate * dims.dp_shard
    if job_config.training.global_batch_size > batch:
        raise ValueError(
            f"{key} when gradients accumulate (training.global_batch_size = "
            f"{job_config.training.global_batch_size} in batches of {batch}), got true: every "
            "batch would be a step"
        )
    if getattr(args, "enable_weight_tying", False) and dims.tp_enabled and dims.fsdp_enabled:
        raise ValueError(
            f"{key} with parallelism.tensor_parallel_degree = {dims.tp} beside FSDP2 for flavor "
            f"{job_config.model.flavor!r} of {job_config.model.name}, which ties the output layer "
            "to the embedding, got true: each of the two would step"
        )


def _check_stock_attention(dims: ParallelDims, job_config: JobConfig) -> None:
    """PyTorch's attention of tensors that ranks share, for which it has a rule on GPUs alone."""
    if utils.device_type != "cpu":
        return
    degrees = {"context_parallel_degree": dims.cp}
    if job_config.model.name == "qwen3":
        degrees["tensor_parallel_degree"] = dims.tp
    for key, degree in degrees.items():
        if degree > 1:
            raise ValueError(
                f"parallelism.{key} must be 1 on a CPU for {job_config.model.name} with "
                f'model.attention = "default", which PyTorch can share on GPUs alone, got {degree}'
            )


def _check_kernels(args) -> None:
    """Kernels asked for by name that do not take heads of this size, or this device."""
    reason: str | None = "stick-breaking attention is in plain torch"
    if not args.variant.stick_breaking:
        heads = torch.empty(1, 1, 1, args.head_size, dtype=torch.bfloat16, device="meta")
        w = heads if args.reflections else None
        device = torch.device(utils.device_type)
        reason = why_not_kernels(device, Inputs(heads, heads, heads, w))
    if reason is not None:
        raise ValueError(
            'model.path.implementation must be "auto" or "torch" here, got "triton", which does '
            f"not cover this job: {reason}"
        )
