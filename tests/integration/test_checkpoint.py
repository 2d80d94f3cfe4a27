"""Hugging Face checkpoints in and out, and checkpoints that change their layout."""

import json
import re
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from parity import FP32, ONE_RANK, Budget, Column, Layout, Parity, assert_same_state
from safetensors.torch import load_file, save_file
from test_config import parse
from torchtitan.models import llama3, qwen3
from trainer import TrainerError, train

from path_backend.integration.data.text import TOKENIZER_DIR
from path_backend.integration.torchtitan import resume, train_spec

STOCK = {"llama3": llama3, "qwen3": qwen3}
PARALLEL = {
    "1 rank": (),
    "FSDP2": ("--parallelism.data_parallel_shard_degree=2",),
    "TP2": ("--parallelism.tensor_parallel_degree=2",),
    "PP2": ("--parallelism.pipeline_parallel_degree=2",),
}
JOB = (
    *("--experimental.custom_import=parity_data", "--model.flavor=parity"),
    *("--training.dataset=parity", "--training.seq_len=96", "--training.global_batch_size=4"),
    *("--checkpoint.enable", "--checkpoint.keep_latest_k=0", "--checkpoint.interval=100"),
    *("--validation.enable", "--validation.dataset=parity_validation", "--validation.steps=1"),
    *("--validation.seq_len=96", "--validation.freq=100", "--lr_scheduler.warmup_steps=0"),
)
EXPORT = ("--checkpoint.last_save_in_hf",)
UNCHANGED = ("--training.steps=1", "--optimizer.lr=0.0")  # one step that changes nothing


def start(folder, model, attention, layout, *arguments):
    """A run on as many ranks as the layout has; 4 sequences a step."""
    local_batch = 2 if layout == "FSDP2" else 4
    return train(
        folder,
        *(*JOB, f"--model.name={model}", f"--model.attention={attention}"),
        f"--training.local_batch_size={local_batch}",
        f"--validation.local_batch_size={local_batch}",
        *(*PARALLEL[layout], *arguments),
        ranks=1 if layout == "1 rank" else 2,
    )


def load_hf(folder):
    return ("--checkpoint.initial_load_in_hf", f"--checkpoint.initial_load_path={folder}")


def exported(run, step=1):
    """All tensors of the Hugging Face checkpoint that a run has left."""
    tensors = {}
    for path in sorted((run.folder / "checkpoint" / f"step-{step}").glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=0, msg=name)


def write_plain(folder, model, flavor="parity"):
    """A checkpoint of the stock model, random tensors in Hugging Face's layout; returns them."""
    import parity_data  # noqa: F401 (adds the flavors)

    spec = STOCK[model].get_train_spec()
    args = spec.model_args[flavor]
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in spec.model_cls(args).state_dict().items()}
    draw = torch.Generator().manual_seed(0)
    state = {name: 0.02 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    tensors = spec.state_dict_adapter(args, None).to_hf(state)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


@pytest.fixture(scope="module", params=["llama3", "qwen3"])
def plain(request, tmp_path_factory):
    """Name of a model, and a folder with a checkpoint of it in Hugging Face's layout."""
    folder = tmp_path_factory.mktemp(request.param)
    write_plain(folder, request.param)
    return request.param, folder


@pytest.mark.parametrize("layout", PARALLEL)
def test_plain_checkpoint(plain, tmp_path, layout):
    """A tensor of either side lost on the way, changed, or loaded over an initial value."""
    model, folder = plain
    attention = "path_fox" if layout in ("1 rank", "PP2") else "path"
    run = start(tmp_path, model, attention, layout, *load_hf(folder), *UNCHANGED, *EXPORT)
    saved = exported(run)
    new = {name: tensor for name, tensor in saved.items() if ".self_attn.path." in name}
    assert_equal({k: v for k, v in saved.items() if k not in new}, load_file(*folder.iterdir()))

    parts = ["w_down.weight", "w_up.weight", "conv.weight", "beta.weight", "beta.bias"]
    parts += ["gate.weight", "gate.bias"] if attention == "path_fox" else []
    expected = {f"model.layers.{i}.self_attn.path.{part}" for i in range(4) for part in parts}
    assert new.keys() == expected
    layers = "{0,1}" if layout == "PP2" else "{0,1,2,3}"  # rank 0 lists what it holds
    for part in parts:
        assert f"model.layers.{layers}.self_attn.path.{part}" in run.output
        for i in range(4):
            initial = new[f"model.layers.{i}.self_attn.path.{part}"]
            if part.endswith("bias"):
                assert not initial.any()
            else:
                assert 0.01 < initial.std() < 0.03


def test_tied_checkpoint(tmp_path):
    """An output layer that stays random, or that is exported beside the embedding it shares."""
    plain = tmp_path / "plain"
    plain.mkdir()
    tensors = write_plain(plain, "qwen3", "parity_tied")
    assert "lm_head.weight" not in tensors
    tied = "--model.flavor=parity_tied"
    job = ("qwen3", "path_fox", "FSDP2", tied, *UNCHANGED, *EXPORT)
    run = start(tmp_path / "run", *job, *load_hf(plain))
    saved = exported(run)
    assert_equal({k: v for k, v in saved.items() if ".self_attn.path." not in k}, tensors)
    folder = run.folder / "checkpoint" / "step-1"
    back = start(tmp_path / "back", *job, *load_hf(folder), "--debug.seed=1")
    assert back.validation_loss[0] == pytest.approx(run.validation_loss[0], rel=1e-6)


@pytest.mark.parametrize(
    "model, attention, layout",
    [
        ("llama3", "path_fox", "FSDP2"),
        ("llama3", "path", "TP2"),
        ("qwen3", "path_fox", "TP2"),
        ("qwen3", "fox", "PP2"),
    ],
)
def test_round_trip(tmp_path, model, attention, layout):
    """An export that does not bring the trained model back, on one rank from any layout."""
    steps = ("--training.steps=2", "--validation.freq=2")
    first = start(tmp_path / "first", model, attention, layout, *steps, *EXPORT)
    folder = first.folder / "checkpoint" / "step-2"
    back = start(
        *(tmp_path / "back", model, attention, "1 rank", *load_hf(folder), *UNCHANGED, *EXPORT),
        "--debug.seed=1",
    )
    assert_equal(exported(back), exported(first, step=2))
    assert "initial values stay" not in back.output
    assert back.validation_loss[0] == pytest.approx(first.validation_loss[-1], rel=1e-6)


def test_other_attention(tmp_path):
    """Gates that only the checkpoint or only the model has, passed over in silence."""
    first = start(tmp_path / "first", "llama3", "path", "1 rank", *UNCHANGED, *EXPORT)
    folder = first.folder / "checkpoint" / "step-1"
    gated = start(
        *(tmp_path / "gated", "llama3", "path_fox", "1 rank", *load_hf(folder), *UNCHANGED, *EXPORT)
    )
    listed = re.search(r"initial values stay: (.*)", gated.output)[1]
    names = "model.layers.{0,1,2,3}.self_attn.path"
    assert sorted(listed.split(", ")) == [f"{names}.gate.bias", f"{names}.gate.weight"]

    folder = gated.folder / "checkpoint" / "step-1"
    back = start(
        tmp_path / "back", "llama3", "path", "1 rank", *load_hf(folder), *UNCHANGED, *EXPORT
    )
    listed = re.search(r'not used by model.attention = "path": (.*)', back.output)[1]
    assert sorted(listed.split(", ")) == [f"{names}.gate.bias", f"{names}.gate.weight"]
    assert_equal(exported(back), exported(first))

    stages = start(
        tmp_path / "stages", "llama3", "path_fox", "PP2", *load_hf(folder), *UNCHANGED, *EXPORT
    )
    assert "not used" not in stages.output
    with pytest.raises(
        TrainerError, match=r"conv_width .*conv.weight of \[32, 3\], .* is \[32, 2\]"
    ):
        start(
            *(tmp_path / "wider", "llama3", "path", "1 rank", *load_hf(folder), *UNCHANGED),
            "--model.path.conv_width=2",
        )


def test_files_of_the_base_model(plain, tmp_path):
    """New parameters without a file, where the base model's index spreads tensors over several."""
    model, folder = plain
    assets = tmp_path / "assets"
    shutil.copytree(TOKENIZER_DIR, assets)
    names = load_file(*folder.iterdir())
    files = {name: f"model-{1 + ('layers.0' in name):05}-of-00002.safetensors" for name in names}
    (assets / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    run = start(
        *(tmp_path / "run", model, "path", "FSDP2", *load_hf(folder), *UNCHANGED, *EXPORT),
        f"--model.hf_assets_path={assets}",
    )
    saved = run.folder / "checkpoint" / "step-1"
    second = load_file(saved / "model-00002-of-00002.safetensors")
    assert {name for name in second if ".path." in name} >= {
        f"model.layers.0.self_attn.path.{part}.weight" for part in ("w_up", "conv", "beta")
    }
    assert all("layers.0" in name for name in second)
    index = json.loads((saved / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == exported(run).keys() > names.keys()


@pytest.mark.parametrize(
    "column, masks",
    [
        (Column("llama3", "path_fox"), ()),
        (Column("qwen3", "path"), ("--model.path.document_mask",)),
    ],
    ids=["llama3 path_fox", "qwen3 path, documents"],
)
def test_layouts_take_turns(tmp_path, column, masks):
    """Parameters or optimizer states lost or mixed up where the next layout splits them otherwise.

    Two key/value heads over four ranks leave some of beta's shards empty. Eight documents in all:
    every step sees the same, so that the place in the data, which torchtitan restores only for the
    same number of data parallel ranks, does not matter.
    """
    layouts = [
        Layout("FSDP2", shard=2),
        Layout("TP2", tensor=2),
        Layout("PP2", pipeline=2),
        Layout("CP2", context=2),
        Layout("FSDP2 x TP2", shard=2, tensor=2),
        Layout("FSDP2", shard=2),
        ONE_RANK,
    ]
    parity = Parity(tmp_path / "parity")
    full = ("--training.dataset_path=8 x 96", "--checkpoint.no_last_save_model_only", *masks)
    whole = parity.one_rank(column, *full, f"--training.steps={len(layouts)}")
    loss, grad_norm = [], []
    for steps, layout in enumerate(layouts, 1):
        run = parity.run(
            *(tmp_path / "turns", column, layout, *full, f"--training.steps={steps}"),
            "--checkpoint.exclude_from_loading=dataloader",
        )
        loss += run.loss
        grad_norm += run.grad_norm
    # what rounding has grown to in the end
    budget = Budget(FP32.loss, 10 * FP32.tensor, 10 * FP32.bias)
    assert loss == pytest.approx(whole.loss, rel=budget.loss)
    assert grad_norm == pytest.approx(whole.grad_norm, rel=budget.tensor)
    assert_same_state(run, whole, budget, step=len(layouts))


def test_refuses_to_resume(tmp_path):
    """A key of torchtitan's files, or an assertion, where a user asks what to change."""
    arguments = ("--training.steps=2", "--checkpoint.no_last_save_model_only")
    two = start(tmp_path, "llama3", "path", "FSDP2", *arguments)
    folder = re.escape(str(two.folder / "checkpoint" / "step-2"))
    longer = ("--training.steps=3", *arguments[1:])
    message = f"{folder} must be of the same model.attention .* without gate.bias, gate.weight in"
    with pytest.raises(TrainerError, match=message):
        start(tmp_path, "llama3", "path_fox", "FSDP2", *longer)
    message = f"{folder} must be of the same model.attention .* with beta.bias, beta.weight, conv"
    with pytest.raises(TrainerError, match=message):
        start(tmp_path, "llama3", "nope", "FSDP2", *longer)
    message = r"w_rank and conv_width .*path.w_down.weight of \[32, 64\], .* is \[3, 64\]"
    with pytest.raises(TrainerError, match=message):
        start(tmp_path, "llama3", "path", "FSDP2", *longer, "--model.path.w_rank=3")
    message = "places in the data of {} data parallel ranks, got {}: checkpoint.exclude_from_load"
    with pytest.raises(TrainerError, match=message.format(1, 2)):
        start(tmp_path, "llama3", "path", "TP2", *longer)
    again = ("--checkpoint.exclude_from_loading=dataloader",)
    start(tmp_path, "llama3", "path", "PP2", *longer, *again)
    with pytest.raises(TrainerError, match=message.format(2, 1)):
        start(tmp_path, "llama3", "path", "FSDP2", "--training.steps=4", *arguments[1:])


@pytest.mark.parametrize("model", STOCK)
def test_rows_keep_their_order(tmp_path, model):
    """Rows permuted for a RoPE that is not there; on the way back they would be again."""
    tensors = write_plain(tmp_path, model)
    spec = train_spec.wrap_train_spec(STOCK[model].get_train_spec())
    args = spec.model_args["parity"]
    args.attention = "path"
    state = spec.state_dict_adapter(args, None).from_hf(tensors)
    for theirs, ours in (("q", "wq"), ("k", "wk"), ("v", "wv")):
        loaded = state[f"layers.0.attention.{ours}.weight"]
        assert torch.equal(loaded, tensors[f"model.layers.0.self_attn.{theirs}_proj.weight"])


@pytest.mark.parametrize("model", STOCK)
def test_unknown_parameters(model):
    """A parameter that the layout does not name dropped from the export (stock Qwen3 does)."""
    stock = STOCK[model].get_train_spec()
    spec = train_spec.wrap_train_spec(stock)
    args = spec.model_args["debugmodel"]
    assert type(spec.state_dict_adapter(args, None)) is stock.state_dict_adapter
    args.attention = "path"
    adapter = spec.state_dict_adapter(args, None)
    with pytest.raises(ValueError, match="must know every parameter, got layers.0.attention.sink"):
        adapter.to_hf({"layers.0.attention.sink": torch.zeros(1)})


def test_experts(caplog):
    """A job with experts that fails at its last step, where it exports: Qwen3 names no balance."""
    spec = train_spec.wrap_train_spec(qwen3.get_train_spec())
    args = spec.model_args["debugmodel_moe"]
    args.n_layers = 2
    args.update_from_config(parse("--model.name=qwen3", "--model.flavor=debugmodel_moe"))
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in spec.model_cls(args).state_dict().items()}
    state = {name: torch.rand(shape) for name, shape in shapes.items()}
    adapter = spec.state_dict_adapter(args, None)
    back = adapter.from_hf(adapter.to_hf(state))
    balance = {name for name in state if name.endswith("moe.expert_bias")}
    assert len(balance) == 2
    (record,) = caplog.records
    assert record.message.endswith(f"left out: {', '.join(sorted(balance))}")
    assert_equal(back, {name: value for name, value in state.items() if name not in balance})


def test_another_vocabulary_is_refused(tmp_path):
    """Catches a job that goes on from one of another task, told in sizes of optimizer states."""
    dcp.save({"tok_embeddings.weight": torch.zeros(8, 4)}, checkpoint_id=tmp_path, no_dist=True)
    message = r"same tokenizer or task, got tok_embeddings.weight of \[8, 4\], .* is \[6, 4\]"
    with pytest.raises(ValueError, match=message):
        resume.check({"tok_embeddings.weight": torch.zeros(6, 4)}, str(tmp_path))
