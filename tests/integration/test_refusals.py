"""Jobs that are refused at start-up, and jobs beside them that are not."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_config import SINGLE, configured_args, parse
from torchtitan.models import llama3
from torchtitan.protocols import train_spec as registry
from torchtitan.tools import utils

from path_backend.integration.data.text import TOKENIZER_DIR
from path_backend.integration.repairs import cpu
from path_backend.integration.torchtitan import refusals, train_spec

PP2 = "--parallelism.pipeline_parallel_degree=2"


def test_rank_is_at_most_the_dim():
    """A product of two matrices larger than the one it stands for."""
    for rank in (0, 256):
        configured_args(parse(f"--model.path.w_rank={rank}"))
    configured_args(parse("--model.path.w_rank=257", "--model.attention=fox"))  # has no w
    with pytest.raises(ValueError, match="w_rank must be at most 256, .*'debugmodel'.*, got 257"):
        configured_args(parse("--model.path.w_rank=257"))


def test_refuses_a_degree_that_cuts_heads():
    """A job that would fail late being started."""
    argument = "--parallelism.tensor_parallel_degree=16"
    with pytest.raises(ValueError, match="must divide the 8 key/value heads"):
        configured_args(parse(argument), "8B")
    configured_args(parse(argument, "--model.attention=default"), "8B")


@pytest.mark.parametrize("attention", ["default", "path"])
@pytest.mark.parametrize(
    "flavor, message",
    [
        ("debugmodel", "must be 1, got 2: flavor 'debugmodel' of qwen3 ties the output layer"),
        ("debugmodel_moe", "must be 1, got 2: flavor 'debugmodel_moe' of qwen3 has experts"),
    ],
)
def test_refuses_pipelines(flavor, message, attention):
    """A pipeline of what torchtitan cannot split failing in the middle of its construction."""
    names = ("--model.name=qwen3", f"--model.flavor={flavor}")
    arguments = (*names, f"--model.attention={attention}")
    configured_args(parse(*arguments), flavor)
    with pytest.raises(ValueError, match=message):
        configured_args(parse(*arguments, PP2), flavor)


@pytest.mark.parametrize("keeps", [True, False], ids=["before 2.13", "since"])
@pytest.mark.parametrize("key, size", [("local_batch_size", 4), ("seq_len", 512)])
def test_refuses_a_pipeline_that_validates_other_batches(monkeypatch, keeps, key, size):
    """Micro-batches cut to buffers of another size: logits of one sequence, labels of two."""
    monkeypatch.setattr(refusals, "KEEPS_PIPELINE_BUFFERS", keeps)
    two_stages = (PP2, f"--training.{key}={size}")
    validation = ("--validation.enable", f"--validation.{key}={2 * size}")
    configured_args(parse(*validation, f"--training.{key}={size}"), "debugmodel")
    message = f"validation.{key} must be training.{key} in a pipeline, got {2 * size} and {size} "
    with pytest.raises(ValueError, match=message) if keeps else nullcontext():
        configured_args(parse(*two_stages, *validation), "debugmodel")


def test_refuses_a_pipeline_that_validates_fewer_micro_batches(monkeypatch):
    """A pipeline that meets a batch it cannot cut only when it validates."""
    monkeypatch.setattr(refusals, "KEEPS_PIPELINE_BUFFERS", False)
    arguments = ("--training.local_batch_size=8", PP2)
    arguments += ("--parallelism.pipeline_parallel_microbatch_size=2",)
    for size in (4, 8):
        configured_args(parse(*arguments, f"--validation.local_batch_size={size}"))
    message = "validation.local_batch_size must be a multiple of 4, .* in a pipeline, got 6"
    with pytest.raises(ValueError, match=message):
        configured_args(parse(*arguments, "--validation.local_batch_size=6"))
    configured_args(parse(*arguments[:1], "--validation.local_batch_size=6"))
    configured_args(parse(*arguments, "--validation.local_batch_size=6", "--validation.no-enable"))


@pytest.mark.parametrize("table", ["training", "validation"])
def test_refuses_lengths(table):
    """Ranks that die in the first validation: torchtitan checks the length in training alone."""
    arguments = (f"--{table}.seq_len=257", "--parallelism.tensor_parallel_degree=2")
    message = f"{table}.seq_len must be a multiple of .*tensor_parallel_degree = 2, got 257"
    with pytest.raises(ValueError, match=message):
        configured_args(parse(*arguments))
    configured_args(parse(*arguments[:1]))
    configured_args(parse("--validation.seq_len=257", arguments[1], "--validation.no-enable"))


def test_refuses_head_counts():
    """Query heads that no key/value head belongs to."""
    spec = llama3.get_train_spec()
    spec.model_args = {"odd": llama3.TransformerModelArgs(n_heads=4, n_kv_heads=3)}
    args = train_spec.wrap_train_spec(spec).model_args["odd"]
    with pytest.raises(ValueError, match="multiple of n_kv_heads, but flavor .* has 4 and 3"):
        args.update_from_config(parse())


@pytest.mark.parametrize("size", [0, -1])
def test_refuses_micro_batches_without_a_sequence(size):
    """A division by zero, or a minimum below zero asked for."""
    argument = f"--parallelism.pipeline_parallel_microbatch_size={size}"
    configured_args(parse(argument))
    with pytest.raises(ValueError, match=f"microbatch_size must be at least 1, got {size}"):
        configured_args(parse(PP2, argument))


@pytest.mark.parametrize(
    "schedule, size, needed", [("1F1B", 1, 2), ("1f1b", 2, 4), ("DualPipeV", 1, 4), ("GPipe", 4, 4)]
)
def test_refuses_a_pipeline_of_too_few_micro_batches(schedule, size, needed):
    """PyTorch's count of micro-batches and stages in place of the key that is too small."""
    arguments = (
        *(PP2, f"--parallelism.pipeline_parallel_schedule={schedule}"),
        *(f"--parallelism.pipeline_parallel_microbatch_size={size}", "--validation.no-enable"),
    )
    configured_args(parse(*arguments, f"--training.local_batch_size={needed}"))
    fewer = f"--training.local_batch_size={needed - 1}"
    configured_args(parse(*arguments[1:], fewer))
    message = f'local_batch_size must be at least {needed}, .* = "{schedule}", got {needed - 1}'
    with pytest.raises(ValueError, match=message):
        configured_args(parse(*arguments, fewer))


def test_refuses_a_schedule_that_cannot_validate():
    """An assertion of PyTorch in the first validation, or jobs refused that do not validate."""
    zbv = "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"
    configured_args(parse(PP2, zbv, "--validation.no-enable"))
    configured_args(parse(zbv))
    csv = "--parallelism.pipeline_parallel_schedule_csv=schedule.csv"  # stages are placed by name
    for arguments in ((PP2, zbv), (PP2, zbv, csv)):
        with pytest.raises(ValueError, match='enable must be false with .* = "ZBVZeroBubble"'):
            configured_args(parse(*arguments))


def test_refuses_a_document_mask_of_the_stock_attention():
    """Attention across documents where the job said that it stays inside them."""
    default = ("--model.attention=default", "--model.path.document_mask")
    with pytest.raises(ValueError, match='mask must be false with .* = "default", .* got true'):
        configured_args(parse(*default))
    configured_args(parse(default[0], "--model.path.no-document_mask"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ("--model.path.document_mask", "--training.dataset=flip_flop"),
            "document_mask = true needs a tokenizer .*, got one without .* 'flip_flop'",
        ),
        (
            ("--model.flavor=debugmodel_varlen_attn", "--training.dataset=mqrar"),
            "mask of model.flavor = 'debugmodel_varlen_attn' needs a tokenizer .* 'mqrar'",
        ),
        (("--model.path.document_mask",), None),
        (("--training.dataset=flip_flop",), None),
    ],
)
def test_refuses_documents_that_do_not_end(arguments, message):
    """A job that meets its first mask, and the error, only in its first step."""
    job = parse(f"--model.hf_assets_path={TOKENIZER_DIR}", *arguments, "--validation.no-enable")
    build = registry.get_train_spec("llama3").build_tokenizer_fn
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        build(job)


def check_training(*arguments, name="llama3", **degrees):
    """The check of a trainer on so many ranks, a product of degrees."""
    job = parse(*arguments, f"--model.name={name}")
    ranks = 1
    for degree in degrees.values():
        ranks *= degree
    dims = replace(SINGLE, world_size=ranks, **degrees)
    refusals.check_training(configured_args(job), dims, job)


DDP, FSDP2 = {"dp_replicate": 2}, {"dp_shard": 2}
EARLY = "--optimizer.early_step_in_backward"
TIED = {"name": "qwen3"}  # the embedding of its debugmodel is the output layer
OFFLOAD = "--training.enable_cpu_offload"
STOCK = "--model.attention=default"


@pytest.mark.parametrize(
    "arguments, degrees, message",
    [
        ((EARLY,), DDP, r"early_step_in_backward must be false under DDP \(.* = 2 with"),
        ((EARLY, STOCK), DDP, "early_step_in_backward must be false under DDP"),
        ((EARLY,), FSDP2, None),
        ((EARLY,), {"dp_shard": 2, "dp_replicate": 2}, None),
        (
            (EARLY, "--training.local_batch_size=2", "--training.global_batch_size=8"),
            FSDP2,
            "must be false when gradients accumulate .* = 8 in batches of 4",
        ),
        ((EARLY, "--training.local_batch_size=4", "--training.global_batch_size=8"), FSDP2, None),
        (
            (EARLY,),
            {"dp_shard": 2, "tp": 2, **TIED},
            "for flavor 'debugmodel' of qwen3, which ties",
        ),
        ((EARLY,), {"cp": 2, "tp": 2, **TIED}, "degree = 2 beside FSDP2 for flavor 'debugmodel'"),
        ((EARLY,), {"tp": 2, **TIED}, None),
        ((EARLY,), {"dp_shard": 2, **TIED}, None),
        ((EARLY,), {"dp_shard": 2, "tp": 2}, None),
        ((OFFLOAD,), {}, r"enable_cpu_offload needs FSDP2.*, got 1 and 1"),
        ((OFFLOAD,), {"tp": 2}, "enable_cpu_offload needs FSDP2"),
        ((OFFLOAD, STOCK), DDP, "enable_cpu_offload needs FSDP2"),
        ((OFFLOAD,), FSDP2, None),
        ((OFFLOAD,), {"cp": 2}, None),
        ((OFFLOAD, "--checkpoint.create_seed_checkpoint"), {}, None),
    ],
)
def test_refuses_what_trains_wrong_or_not_at_all(arguments, degrees, message):
    """Ranks that drift apart in silence, or parameters on a CPU that meet inputs on a GPU."""
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check_training(*arguments, **degrees)


@pytest.mark.parametrize(
    "name, degrees, key",
    [
        ("llama3", {"cp": 2}, "context_parallel_degree"),
        ("qwen3", {"cp": 2}, "context_parallel_degree"),
        ("qwen3", {"tp": 2}, "tensor_parallel_degree"),
        ("llama3", {"tp": 2}, None),
    ],
)
def test_refuses_stock_attention_that_needs_a_gpu(monkeypatch, name, degrees, key):
    """PyTorch's word that an operator has no sharding rule, in the first step."""
    check_training(name=name, **degrees)
    message = f"parallelism.{key} must be 1 on a CPU for {name} with .*, got 2"
    monkeypatch.setattr(utils, "device_type", "cpu")
    with pytest.raises(ValueError, match=message) if key else nullcontext():
        check_training(STOCK, name=name, **degrees)
    monkeypatch.setattr(utils, "device_type", "cuda")
    check_training(STOCK, name=name, **degrees)


def test_refuses_kernels_that_do_not_cover_the_job(monkeypatch):
    """Kernels that were asked for by name missed only in the first step, or not at all."""
    backend = pytest.importorskip("path_backend.kernels.backend")  # reads the variable for good
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    triton = "--model.path.implementation=triton"
    monkeypatch.setattr(utils, "device_type", "cpu")
    for implementation in ("auto", "torch"):
        check_training(f"--model.path.implementation={implementation}")
    with pytest.raises(ValueError, match='"auto" or "torch" here, got "triton", .* on cpu'):
        check_training(triton)
    monkeypatch.setattr(utils, "device_type", "cuda")
    monkeypatch.setattr(backend.config, "capability", lambda: (9, 0))
    check_training(triton)
    with pytest.raises(ValueError, match='got "triton", .* stick-breaking'):
        check_training(triton, "--model.attention=stick_breaking")
    args, job = configured_args(parse(triton)), parse(triton)
    args.n_heads = args.n_kv_heads = 1  # of 256 channels
    with pytest.raises(ValueError, match="head width 256, the kernels hold at most 128"):
        refusals.check_training(args, SINGLE, job)
    args.attention = "fox"
    refusals.check_training(args, SINGLE, job)


NO_VALIDATION = "--validation.no-enable"


def test_vocabulary_of_tasks_on_text(caplog):
    """Catches an index error in the embedding, or a loss over tokens that cannot come."""
    tokenizer = SimpleNamespace(get_vocab_size=lambda: 2048)
    args = SimpleNamespace(vocab_size=128256)
    for flavor, dataset, warnings in (
        ("task_1x64", "python_stdlib", 1),
        ("task_1x64", "flip_flop", 0),
        ("debugmodel", "python_stdlib", 0),
    ):
        caplog.clear()
        job = parse(f"--model.flavor={flavor}", f"--training.dataset={dataset}", NO_VALIDATION)
        refusals.warn_of_vocabulary(tokenizer, args, job)
        assert len(caplog.records) == warnings, flavor
        if warnings:
            assert "128256, the tokenizer 2048" in caplog.records[0].message


@pytest.mark.parametrize("native, expected", [(True, "bfloat16"), (False, "float32")])
def test_precision_that_the_cpu_has(monkeypatch, caplog, native, expected):
    """Catches a first run that takes an hour on an emulated bf16, or fp32 without a word."""
    monkeypatch.setattr(cpu.utils, "device_type", "cpu")
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: native)
    job = parse("--training.mixed_precision_param=bfloat16")
    cpu.use_native_precision(job)
    assert job.training.mixed_precision_param == expected
    assert [record.message for record in caplog.records] == [] if native else caplog.records
