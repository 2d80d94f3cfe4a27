"""Every layout of torchtitan trains what one rank trains.

Always on is each row in one column, the columns taking turns; PATH_BACKEND_MATRIX=1 runs each row
in all of them. make_matrix.py does so and writes the table of PARALLELISM.md.
"""

import importlib.util
import os
from dataclasses import dataclass
from itertools import cycle

import pytest
import torch
from parity import BF16, EXACT, FLOAT8, FP32, Column, Layout, Parity, assert_same_training
from trainer import TrainerError, train

# On GPUs with NCCL, on CPUs with gloo: the same tests.
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

COLUMNS = [Column(model, kind) for model in ("llama3", "qwen3") for kind in ("path", "path_fox")]
MATRIX = bool(int(os.environ.get("PATH_BACKEND_MATRIX", "0")))

DOCUMENTS = ("--model.path.document_mask",)
# For a CPU inductor would need a C++ compiler.
BACKEND = "inductor" if torch.cuda.is_available() else "aot_eager"
COMPILE = ("--compile.enable", f"--compile.backend={BACKEND}")
ASYNC_TP = ("--parallelism.enable_async_tensor_parallel",)
BY_LAYER = ("--activation_checkpoint.mode=selective",)
BY_OP = (*BY_LAYER, "--activation_checkpoint.selective_ac_option=op")
FULL = ("--activation_checkpoint.mode=full",)
CONTIGUOUS = ("--parallelism.context_parallel_load_balancer=None",)
HEADS = ("--model.path.context_parallel=heads",)
RING = ("--parallelism.context_parallel_rotate_method=alltoall",)
IN_BF16 = ("--training.mixed_precision_param=bfloat16",)
IN_FLOAT8 = ("--model.converters=quantize.linear.float8",)
EMULATED = (*IN_FLOAT8, "--quantize.linear.float8.emulate")
OFFLOAD = ("--training.enable_cpu_offload",)
EARLY_STEP = ("--optimizer.early_step_in_backward",)
ZBV = ("--parallelism.pipeline_parallel_schedule=ZBVZeroBubble",)
INTERLEAVED = (
    "--parallelism.pipeline_parallel_schedule=Interleaved1F1B",
    "--parallelism.pipeline_parallel_first_stage_less_layers=0",
    "--parallelism.pipeline_parallel_last_stage_less_layers=0",
)

ONE_MICRO_BATCH = (
    "--parallelism.pipeline_parallel_schedule=GPipe",
    "--parallelism.pipeline_parallel_microbatch_size=8",
)

LAYOUTS = [
    Layout("gradient accumulation", accumulate=2),
    Layout("FSDP2", shard=2),
    Layout("FSDP2, gradient accumulation", shard=2, accumulate=2),
    Layout("FSDP2, CPU offload", OFFLOAD, shard=2),
    Layout("DDP", replicate=2),
    Layout("DDP, gradient accumulation", replicate=2, accumulate=2),
    Layout("HSDP (2 x 2)", shard=2, replicate=2),
    Layout("TP2 with sequence parallel", tensor=2),
    Layout("FSDP2 x TP2", shard=2, tensor=2),
    Layout("PP2, 1F1B", pipeline=2),
    Layout("PP2, interleaved 1F1B, gradient accumulation", INTERLEAVED, pipeline=2, accumulate=2),
    Layout("FSDP2 x PP2", shard=2, pipeline=2),
    Layout("TP2 x PP2", tensor=2, pipeline=2),
    Layout("CP2", context=2),
    Layout("CP2, contiguous", CONTIGUOUS, context=2),
    Layout("CP2, ring", RING, context=2),
    Layout("CP2 by heads", HEADS, context=2),
    Layout("CP4, ring, gradient accumulation", RING, context=4, accumulate=2),
    Layout("FSDP2 x CP2", shard=2, context=2),
    Layout("TP2 x CP2", tensor=2, context=2),
    Layout("PP2 x CP2", pipeline=2, context=2),
    Layout("FSDP2 x CP4", shard=2, context=4),
    Layout("FSDP2 x TP2 x CP2", shard=2, tensor=2, context=2),
    Layout("FSDP2, selective checkpointing by layer", BY_LAYER, shard=2),
    Layout("FSDP2, selective checkpointing by op", BY_OP, shard=2),
    Layout("FSDP2, full checkpointing", FULL, shard=2),
    Layout("FSDP2, compile (model, loss)", COMPILE, shard=2),
    Layout("TP2, compile", COMPILE, tensor=2),
    Layout("TP2, compile, async TP", (*COMPILE, *ASYNC_TP), tensor=2),
    Layout("PP2, compile", COMPILE, pipeline=2),
    Layout("FSDP2, documents", DOCUMENTS, shard=2),
    Layout(
        "FSDP2, documents, CPU offload, selective checkpointing by layer",
        (*DOCUMENTS, *OFFLOAD, *BY_LAYER),
        shard=2,
    ),
    Layout(
        "HSDP (2 x 2), documents, gradient accumulation",
        DOCUMENTS,
        shard=2,
        replicate=2,
        accumulate=2,
    ),
    Layout("TP2, documents", DOCUMENTS, tensor=2),
    Layout("TP2, documents, compile, async TP", (*DOCUMENTS, *COMPILE, *ASYNC_TP), tensor=2),
    Layout("PP2, documents", DOCUMENTS, pipeline=2),
    Layout(
        "PP2, interleaved 1F1B, documents, gradient accumulation",
        (*DOCUMENTS, *INTERLEAVED),
        pipeline=2,
        accumulate=2,
    ),
    Layout(
        "FSDP2, documents, compile, selective checkpointing by op",
        (*DOCUMENTS, *COMPILE, *BY_OP),
        shard=2,
    ),
    Layout("CP4, documents, full checkpointing", (*DOCUMENTS, *FULL), context=4),
    Layout("PP2 x CP2, documents", DOCUMENTS, pipeline=2, context=2),
    Layout(
        "CP2, documents, compile, selective checkpointing by op",
        (*DOCUMENTS, *COMPILE, *BY_OP),
        context=2,
    ),
    Layout("FSDP2, bf16", IN_BF16, shard=2, budget=BF16),
    Layout("DDP, bf16 (autocast)", IN_BF16, replicate=2, budget=BF16),
    Layout("CP2, bf16", IN_BF16, context=2, budget=BF16),
    Layout(
        "FSDP2 x TP2, bf16, documents, compile, full checkpointing",
        (*IN_BF16, *DOCUMENTS, *COMPILE, *FULL),
        shard=2,
        tensor=2,
        budget=BF16,
    ),
    Layout("FSDP2, float8 (emulated)", EMULATED, shard=2, budget=FLOAT8),
    Layout("TP2, float8 (emulated)", EMULATED, tensor=2, budget=FLOAT8),
    Layout(
        "FSDP2, float8 (emulated), documents",
        (*EMULATED, *DOCUMENTS),
        shard=2,
        budget=FLOAT8,
    ),
]
if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
    LAYOUTS.append(Layout("FSDP2, float8", IN_FLOAT8, shard=2, budget=FLOAT8))


@dataclass(frozen=True)
class Refusal:
    """A layout that does not start, the message that says so, and the reason in few words."""

    layout: Layout
    message: str
    reason: str


REFUSALS = [
    Refusal(
        Layout("TP4 on 2 key/value heads", tensor=4),
        "tensor_parallel_degree must divide the 2 key/value heads of flavor 'parity', got 4",
        "the degree must divide the key/value heads",
    ),
    Refusal(
        Layout("TP2, sequence of odd length", ("--training.seq_len=95",), tensor=2),
        "training.seq_len must be a multiple of parallelism.tensor_parallel_degree = 2, got 95",
        "the degree must divide the sequence",
    ),
    Refusal(
        Layout("TP2, validation on odd lengths", ("--validation.seq_len=95",), tensor=2),
        "validation.seq_len must be a multiple of parallelism.tensor_parallel_degree = 2, got 95",
        "the degree must divide the sequence",
    ),
    Refusal(
        Layout("PP2, validation on 6 sequences", ("--validation.local_batch_size=6",), pipeline=2),
        "validation.local_batch_size must be .* in a pipeline, got 6",
        "as many micro-batches as in training",
    ),
    *(
        Refusal(
            Layout(f"DDP x {name}", replicate=2, **part),
            "data_parallel_replicate_degree = 2 needs data_parallel_shard_degree > 1 with .*, got "
            f".* = {part.get('tensor', 1)}, .* = {part.get('pipeline', 1)}:",
            "needs FSDP2",
        )
        for name, part in (("TP2", {"tensor": 2}), ("PP2", {"pipeline": 2}))
    ),
    Refusal(
        Layout("PP2, 1F1B, one micro-batch", ("--training.local_batch_size=1",), pipeline=2),
        "training.local_batch_size must be at least 2, .* got 1",
        "needs a micro-batch per rank",
    ),
    Refusal(
        Layout("PP2, ZBV, validation", ZBV, pipeline=2),
        'validation.enable must be false with .* = "ZBVZeroBubble"',
        "PyTorch cannot validate with it",
    ),
    Refusal(
        Layout("DDP, optimizer step in backward", EARLY_STEP, replicate=2),
        "optimizer.early_step_in_backward must be false under DDP",
        "needs FSDP2",
    ),
    Refusal(
        Layout("gradient accumulation, optimizer step in backward", EARLY_STEP, accumulate=2),
        "optimizer.early_step_in_backward must be false when gradients accumulate",
        "would step on each part of a batch",
    ),
    Refusal(
        Layout("TP2, CPU offload", OFFLOAD, tensor=2),
        "training.enable_cpu_offload needs FSDP2",
        "needs FSDP2",
    ),
    Refusal(
        Layout("TP2, async TP without compile", ASYNC_TP, tensor=2),
        "Async TP requires",
        "needs compile",
    ),
    Refusal(
        Layout("CP2, sequence of 98", ("--training.seq_len=98",), context=2),
        "training.seq_len must be a multiple of .* = 4, got 98",
        "twice the degree must divide the sequence",
    ),
]
if not torch.cuda.is_available():
    REFUSALS.append(
        Refusal(
            Layout("float8 without a GPU for it", IN_FLOAT8, shard=2),
            "only supported on SM89 or later.*set `float8.emulate` to True",
            "needs SM89 or `emulate`",
        )
    )


def in_columns(rows):
    """Every row in every column, or each in one, the columns taking turns."""
    turn = cycle(COLUMNS)
    for row in rows:
        name = row.name if isinstance(row, Layout) else row.layout.name
        for column in COLUMNS if MATRIX else [next(turn)]:
            yield pytest.param(row, column, id=f"{name}, {column}")


def masks(layout: Layout) -> list[str]:
    """The arguments of a layout that change what is trained: one rank gets them too."""
    return [argument for argument in layout.arguments if argument in DOCUMENTS]


@pytest.fixture(scope="module")
def parity(tmp_path_factory):
    return Parity(tmp_path_factory.mktemp("parity"))


@pytest.fixture
def cell(record_property):
    """Record a cell of the table of PARALLELISM.md."""

    def record(layout: Layout, column: Column, text: str) -> None:
        for name, value in (("row", layout.name), ("column", str(column)), ("cell", text)):
            record_property(name, value)

    return record


@pytest.mark.parametrize("layout, column", list(in_columns(LAYOUTS)))
def test_same_training(parity, tmp_path, cell, layout, column):
    """A gradient summed over the wrong ranks, heads mixed up, a mask or a scale that got lost."""
    if "float8" in layout.name and not importlib.util.find_spec("torchao"):
        pytest.skip("needs torchao")
    if ASYNC_TP[0] in layout.arguments and 0 < torch.cuda.device_count() < layout.ranks:
        pytest.skip("symmetric memory wants a GPU for each rank")
    same = "equal" if layout.budget == FP32 else f"within {layout.budget.tensor:g}"
    cell(layout, column, same)
    run = parity.run(tmp_path, column, layout)
    assert_same_training(run, parity.one_rank(column, *masks(layout)), layout.budget)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on CPUs every row is so")
@pytest.mark.parametrize(
    "layout",
    [Layout("FSDP2", shard=2), Layout("TP2", tensor=2), Layout("PP2", pipeline=2)],
    ids=str,
)
def test_same_training_in_exact_fp32(parity, tmp_path, layout):
    """An error of a layout on GPUs that hides in what the kernels round."""
    column, form = Column("qwen3", "path_fox"), "--model.path.implementation=torch"
    run = parity.run(tmp_path, column, layout, form)
    assert_same_training(run, parity.one_rank(column, form), EXACT)


@pytest.mark.parametrize(
    "layout, attention",
    [  # TP2 with "default" does not run on CPU: SDPA has no sharding rule there
        (Layout("FSDP2", shard=2), "default"),
        (Layout("FSDP2", shard=2), "path_fox"),
        (Layout("TP2", tensor=2), "path_fox"),
    ],
    ids=str,
)
def test_tied_embeddings(parity, tmp_path, layout, attention):
    """An output layer that trains apart from the embedding, or two FSDP2 groups that share one."""
    column = Column("qwen3", attention, "parity_tied")
    run = parity.run(tmp_path, column, layout)
    assert_same_training(run, parity.one_rank(column), layout.budget)


@pytest.mark.parametrize(
    "layout",
    [
        Layout("FSDP2 x TP2", shard=2, tensor=2),
        pytest.param(
            Layout("FSDP2 x EP2", ("--parallelism.expert_parallel_degree=2",), shard=2),
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="in Triton"),
        ),
    ],
    ids=str,
)
def test_experts(parity, tmp_path, layout):
    """A router that trains on one rank's part of its gradient (#2387)."""
    column = Column("qwen3", "path_fox", "parity_experts")
    run = parity.run(tmp_path, column, layout)
    assert_same_training(run, parity.one_rank(column), layout.budget)


@pytest.mark.parametrize(
    "layout",
    [
        Layout("TP2", tensor=2),
        Layout("CP2", context=2),
        # statistics are those of the last micro-batch, here the only one, which 1F1B refuses
        Layout("PP2, GPipe", ONE_MICRO_BATCH, pipeline=2),
    ],
    ids=str,
)
def test_statistics(parity, tmp_path, layout):
    """Statistics or FLOPs of one rank's tokens, heads or layers logged as those of all."""
    column = Column("llama3", "path_fox")
    run, expected = parity.run(tmp_path, column, layout), parity.one_rank(column)
    names = [name for name in expected.scalars if name.startswith("path/")]
    assert len(names) == 4 * 4
    for name in names:
        assert run.scalars[name] == pytest.approx(expected.scalars[name], rel=1e-4, abs=1e-6), name
    flops = [r.scalars["tflops"][1] / r.scalars["throughput(tps)"][1] for r in (run, expected)]
    assert flops[0] == pytest.approx(flops[1], rel=1e-5)


@pytest.mark.parametrize(
    "attention, layout",
    [
        ("nope", Layout("FSDP2 x TP2", shard=2, tensor=2)),
        ("stick_breaking", Layout("FSDP2 x TP2", shard=2, tensor=2)),
        ("fox", Layout("CP2, ring, documents", (*RING, *DOCUMENTS), context=2)),
        ("nope", Layout("CP2", context=2)),
        ("default", Layout("DDP, gradient accumulation", replicate=2, accumulate=2)),
        ("default", Layout("PP2", pipeline=2)),
    ],
    ids=str,
)
def test_attentions_outside_the_table(parity, tmp_path, attention, layout):
    """An attention with a gate or nothing cut as if it had all; repairs that `default` lacks."""
    column = Column("llama3", attention)
    run = parity.run(tmp_path, column, layout)
    assert_same_training(run, parity.one_rank(column, *masks(layout)), layout.budget)


@pytest.mark.parametrize("refusal, column", list(in_columns(REFUSALS)))
def test_refusal(tmp_path, cell, refusal, column):
    """A job that cannot run failing after its start, or without a word on what to change."""
    cell(refusal.layout, column, f"refused: {refusal.reason}")
    layout = refusal.layout
    with pytest.raises(TrainerError, match=refusal.message) as error:
        train(tmp_path, *column.job, *layout.overrides, ranks=layout.ranks)
    assert "Trainer is initialized" not in str(error.value)
