"""What the configuration accepts, what it refuses and how, and what `default` leaves alone."""

import ast
import copy
import difflib
import inspect
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.models import deepseek_v3, llama3, qwen3
from torchtitan.protocols import train_spec as registry
from torchtitan.tools import utils

from path_backend.flops import transform_flops
from path_backend.integration import job_config
from path_backend.integration.data.text import TOKENIZER_DIR
from path_backend.integration.repairs import cpu
from path_backend.integration.torchtitan import train_spec
from path_backend.layers.variants import VARIANTS

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
DEBUG = ROOT / "configs" / "llama3_debug_path.toml"


@pytest.fixture(autouse=True)
def start_from_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)  # TOML files name the tokenizer relative to it


def parse(*arguments, config=DEBUG):
    return ConfigManager().parse_args([f"--job.config_file={config}", *arguments])


def parse_toml(tmp_path, model, table=""):
    """Parse a file with these lines under [model] and [model.path]."""
    config = tmp_path / "job.toml"
    config.write_text(
        '[job]\ncustom_config_module = "path_backend.integration.job_config"\n'
        f"[model]\n{model}\n[model.path]\n{table}\n"
    )
    return parse(config=config)


def configured_args(job, flavor="debugmodel"):
    """Arguments of a fresh wrapped spec after the trainer's call."""
    stock = {"llama3": llama3, "qwen3": qwen3}[job.model.name].get_train_spec()
    args = train_spec.wrap_train_spec(stock).model_args[flavor]
    args.update_from_config(job)
    return args


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_configs_parse(config):
    """A shipped file with a key or a value that torchtitan or this package does not take."""
    job = parse(config=config)
    if config.stem.startswith((job.model.name, "convert_")):
        assert config.stem.endswith(f"_{job.model.attention}")
    else:  # of an experiment, which overrides it
        assert job.model.attention == "path"
    args = copy.deepcopy(registry.get_train_spec(job.model.name).model_args[job.model.flavor])
    args.update_from_config(job)
    json.dumps(asdict(args))  # the trainer logs them so


def test_debug_configs_differ_by_few_lines():
    """Debug files that drift apart, so that a comparison of attentions compares something else."""
    base = DEBUG.read_text().splitlines()
    for config in CONFIGS:
        if "debug" in config.stem:
            lines = list(difflib.unified_diff(base, config.read_text().splitlines(), n=0))
            changed = [line for line in lines if line.startswith("+") and line[1:2] != "+"]
            assert len(changed) <= 5, config


@pytest.mark.parametrize("attention", ["path", "path_fox"])
def test_760m_is_the_setting_of_the_paper(attention):
    """A batch, schedule or size that is not the one whose results are compared."""
    job = parse(config=ROOT / "configs" / f"llama3_760m_{attention}.toml")
    step = job.training.global_batch_size * job.training.seq_len
    assert step == pytest.approx(2e6, rel=0.05) and job.training.seq_len == 4096
    assert step * job.training.steps == pytest.approx(50e9, rel=1e-3)
    assert step * job.lr_scheduler.warmup_steps == pytest.approx(1e9, rel=2e-3)
    assert job.optimizer.lr * job.lr_scheduler.min_lr_factor == pytest.approx(3e-5)
    spec = registry.get_train_spec("llama3")
    args = copy.deepcopy(spec.model_args["760M"])
    args.update_from_config(job)
    with torch.device("meta"):
        model = spec.model_cls(args)
    assert 740e6 < sum(p.numel() for p in model.parameters()) < 800e6


@pytest.mark.parametrize("path", ["hf://owner/name", "integration/assets/tokenizer"])
def test_tokenizer_of_the_hub(monkeypatch, path):
    """Weights downloaded with the tokenizer, or a folder looked for in the Hub."""
    calls = []

    def download(name, allow_patterns):
        calls.append((name, allow_patterns))
        return str(TOKENIZER_DIR)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    job = parse(f"--model.hf_assets_path={path}")
    tokenizer = registry.get_train_spec("llama3").build_tokenizer_fn(job)
    assert tokenizer.get_vocab_size() == 2048
    assert calls == ([("owner/name", ["tokenizer*"])] if "hf:" in path else [])


def test_command_line_wins():
    """Flags that argue with the file in vain."""
    job = parse("--model.attention=path_fox", "--model.path.w_rank=0", "--model.path.document_mask")
    assert job.model.attention == "path_fox"
    assert job.model.path.w_rank == 0
    assert job.model.path.document_mask is True


def test_every_key_has_a_docstring():
    """A key that nobody explained."""
    for table in (*job_config._TABLES, job_config.Model):
        body = ast.parse(inspect.getsource(table)).body[0].body
        for statement, following in zip(body, [*body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign):
                assert isinstance(following, ast.Expr), statement.target.id


def test_choices_are_listed_once():
    """A value that the command line takes and the model does not, or the reverse."""
    assert job_config.Attention.__args__ == tuple(VARIANTS)


@pytest.mark.parametrize(
    "line, message",
    [
        ("w_rank = -1", "model.path.w_rank must be an integer >= 0, got -1"),
        ('w_rank = "32"', "model.path.w_rank must be an integer >= 0, got '32'"),
        ("conv_width = 0", "model.path.conv_width must be an integer from 1 to 16, got 0"),
        ("conv_width = 17", "model.path.conv_width must be an integer from 1 to 16, got 17"),
        ("beta_max = 2.5", r"model.path.beta_max must be a number in \(0, 2\], got 2.5"),
        ("gate_scale = 0", "model.path.gate_scale must be a finite number > 0, got 0"),
        ("gate_scale = inf", "model.path.gate_scale must be a finite number > 0, got inf"),
        ("gate_scale = nan", "model.path.gate_scale must be a finite number > 0, got nan"),
        ("gate_start = 0", r"model.path.gate_start must be a number in \(0, 1\), got 0"),
        ("gate_start = 1", r"model.path.gate_start must be a number in \(0, 1\), got 1"),
        ("document_mask = 1", "model.path.document_mask must be true or false, got 1"),
        ('implementation = "c"', "model.path.implementation must be one of auto, torch, triton"),
        ('context_parallel = "head"', "context_parallel must be one of pieces, heads, got 'head'"),
        ("w_rnk = 1", r"\[model.path\] takes the keys w_rank, .*, got model.path.w_rnk = 1"),
    ],
)
def test_wrong_table(tmp_path, line, message):
    """A wrong key or value accepted, or refused without its name, value and choices."""
    with pytest.raises(ValueError, match=message):
        parse_toml(tmp_path, 'attention = "path"', line)


@pytest.mark.parametrize(
    "lines, message",
    [
        ("path = 1", r"model.path must be a table \(keys w_rank, conv_width, .*\), got 1"),
        ('path = "x"', r"model.path must be a table \(keys w_rank, .*\), got 'x'"),
        ("[[model.path]]\nw_rank = 1", r"model.path must be a table \(.*\), got \[{'w_rank': 1}\]"),
        ('atention = "fox"', r"\[model\] takes the keys name, .*attention.*atention = 'fox'"),
    ],
)
def test_wrong_model_table(tmp_path, lines, message):
    """A value where a table belongs trained with defaults, or an error that names no key."""
    config = tmp_path / "job.toml"
    config.write_text(
        f'[job]\ncustom_config_module = "path_backend.integration.job_config"\n[model]\n{lines}\n'
    )
    with pytest.raises(ValueError, match=message):
        parse(config=config)


def test_wrong_attention(tmp_path):
    """An unknown attention trained as another one: TOML values pass torchtitan unchecked."""
    with pytest.raises((ValueError, SystemExit)) as error:
        configured_args(parse_toml(tmp_path, 'attention = "pth"'))
    assert "default, path, path_fox, fox, nope, stick_breaking, got 'pth'" in str(error.value)


def test_wrong_flavor():
    """A bare KeyError: torchtitan looks the flavor up in a dict."""
    message = "model.flavor must be one of .*debugmodel, .*8B.*, got 'debug'"
    with pytest.raises(ValueError, match=message):
        registry.get_train_spec("llama3").model_args["debug"]


def test_refuses_other_attentions():
    """A model of another kind failing at an attribute instead of saying what is needed."""
    spec = train_spec.wrap_train_spec(deepseek_v3.get_train_spec())
    args = spec.model_args["debugmodel"]
    args.update_from_config(parse())
    with torch.device("meta"), pytest.raises(TypeError, match="must have wq, .* lacks wk, wv"):
        spec.model_cls(args)


@pytest.mark.parametrize("name", ["deepseek_v3", "llama4"])
def test_refuses_models_that_are_not_wrapped(name, monkeypatch):
    """Stock attention trained where another was asked for, since nobody reads the key."""
    calls = []
    stock = registry.get_train_spec(name)
    monkeypatch.setattr(stock.parallelize_fn, "stock", lambda *arguments: calls.append(arguments))
    job = parse(f"--model.name={name}")
    with pytest.raises(
        ValueError,
        match=f'"path" needs model.name .* llama3, qwen3 .*wrap_train_spec, got {name!r}',
    ):
        stock.parallelize_fn("model", "dims", job)
    assert not calls
    job.model.attention = "default"
    stock.parallelize_fn("model", "dims", job)
    assert calls == [("model", "dims", job)]


def test_own_spec_is_wrapped_after_a_look_up(monkeypatch):
    """A spec wrapped by its user refused as if it were not, or hidden from our repairs of it."""
    spec = llama3.get_train_spec()
    monkeypatch.setitem(registry._extra_train_specs, "own", spec)
    found = registry.get_train_spec("own")
    assert found.parallelize_fn is not spec.parallelize_fn
    wrapped = train_spec.wrap_train_spec(found)
    monkeypatch.setitem(registry._extra_train_specs, "own", wrapped)
    assert registry.get_train_spec("own") is wrapped
    assert wrapped.parallelize_fn.args == (spec.parallelize_fn,)


def test_document_mask_follows_the_flavor():
    """A flavor with a mask per document trained without it, or a mask where none was asked for."""
    tokenizer = SimpleNamespace(eos_id=5)
    tokens = torch.tensor([[1, 5, 2, 3]])
    spec = train_spec.wrap_train_spec(llama3.get_train_spec())
    for flavor, flag, masked in (
        ("debugmodel", "--model.path.no_document_mask", False),
        ("debugmodel", "--model.path.document_mask", True),
        ("debugmodel_varlen_attn", "--model.path.no_document_mask", True),
    ):
        args = configured_args(parse(flag), flavor)
        assert (args.attn_type in ("flex", "varlen")) == masked  # the trainer asks for masks
        with torch.device("meta"):
            model = spec.model_cls(args)
        if masked:
            assert model.get_attention_masks(tokens, tokenizer).tolist() == [[0, 0, 2, 2]]
            with pytest.raises(ValueError, match="end-of-text token, got none"):
                model.get_attention_masks(tokens, SimpleNamespace(eos_id=None))
        else:
            with pytest.raises(TypeError, match="document_mask is false"):
                model.get_attention_masks(tokens, tokenizer)


def test_accelerator_is_left_alone(monkeypatch):
    """The CPU put in place of a GPU that is there."""
    monkeypatch.setattr(cpu, "_get_available_device_type", lambda: "cuda")
    monkeypatch.setattr(utils, "device_type", "cuda")
    monkeypatch.setattr(utils, "device_module", torch.cuda)
    cpu.activate_without_accelerator()
    assert (utils.device_type, utils.device_module) == ("cuda", torch.cuda)


@pytest.mark.parametrize("stock", [llama3, qwen3], ids=["llama3", "qwen3"])
def test_default_builds_the_stock_model(stock):
    """`default` training a subclass, or arguments that differ from stock ones."""
    spec = stock.get_train_spec()
    job = parse("--model.attention=default", f"--model.name={stock.__name__.split('.')[-1]}")
    args = configured_args(job)
    with torch.device("meta"):
        model = train_spec.wrap_train_spec(spec).model_cls(args)
    expected = copy.deepcopy(spec.model_args["debugmodel"])
    expected.update_from_config(job)
    assert type(model) is spec.model_cls
    assert type(model.model_args) is type(expected)
    assert model.model_args == expected


def test_flavors_are_copies():
    """A job's values written into the flavors that stock code shares."""
    configured_args(parse("--training.seq_len=77"))
    assert llama3.llama3_args["debugmodel"].max_seq_len != 77


def test_registered_lazily():
    """The wrapped spec missing, or a stock model imported by a job that does not use it."""
    spec = registry.get_train_spec("qwen3")
    assert isinstance(spec, train_spec._LazyTrainSpec)
    assert spec.build_lr_schedulers_fn is qwen3.get_train_spec().build_lr_schedulers_fn
    assert spec.model_args["debugmodel"].attention == "default"


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_model_keeps_names_and_norms(name):
    """Parameters renamed, so that checkpoints, TP plans and float8 filters miss them."""
    spec = train_spec.wrap_train_spec({"llama3": llama3, "qwen3": qwen3}[name].get_train_spec())
    args = configured_args(parse(f"--model.name={name}", "--model.attention=path_fox"))
    with torch.device("meta"):
        model = spec.model_cls(args)
        stock = args.stock()
        stock.attn_type = "sdpa"
        stock_names = set(spec.model_cls.args[0](stock).state_dict())
    names = set(model.state_dict())
    new = {"w_down.weight", "w_up.weight", "conv.weight"}
    new |= {f"{part}.{kind}" for part in ("beta", "gate") for kind in ("weight", "bias")}
    expected_new = {f"layers.{i}.attention.path.{n}" for i in range(args.n_layers) for n in new}
    assert names - stock_names == expected_new
    assert stock_names <= names


def test_float8_leaves_small_projections_alone():
    """w, beta or gate in float8, where a norm and an exponential magnify the rounding."""
    job = parse("--quantize.linear.float8.filter_fqns=output")
    args = configured_args(job)
    filters = job.quantize.linear.float8.filter_fqns
    with torch.device("meta"):
        model = train_spec.wrap_train_spec(llama3.get_train_spec()).model_cls(args)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            filtered = any(fragment in name for fragment in filters)
            assert filtered == (".path." in name or name == "output"), name


def test_flops_by_hand():
    """MFU that leaves the reflections out, or counts them per wrong head or level."""
    # 256 tokens are 4 chunks of 64: 2 levels. D = 16, 4 query heads on 2 key/value heads.
    query = 2 * 64 * 16 + 2 * 64 * 64 + 2 * 64 * 16 + 2 * 64 * 64  # QW, low X, (low X) W, .. up
    query += 2 * (2 * 16 * 16) / 2  # two levels, half of the tokens each
    key = 2 * 64 * 16 * 4 + 2 * 64 * 64 + 2 * 16 * 16  # WW, KW, (up X) W, XW; up X; P
    key += 2 * (2 * 16 * 16) / 2
    key += (2 * 2 * 16**3 + 1 * 2 * 16**3) / 256  # two products of P below, one on top
    assert transform_flops(4, 2, 16, 256) == (4 * query + 2 * key)

    job = parse("--training.seq_len=256", "--model.attention=fox")
    totals = {}
    for attention in ("fox", "path_fox"):
        job.model.attention = attention
        args = configured_args(job)
        with torch.device("meta"):
            model = train_spec.wrap_train_spec(llama3.get_train_spec()).model_cls(args)
        totals[attention] = args.get_nparams_and_flops(model, 256)
    # Llama 3 debug: width 256, 6 layers, 16 heads of 16. Weights cost 6 FLOPs each.
    parameters = 6 * (256 * 32 + 32 * 256 + 256 * 3 + 256 * 16 + 16)
    assert totals["path_fox"][0] - totals["fox"][0] == parameters
    extra = 6 * parameters + 18 * transform_flops(16, 16, 16, 256)
    assert totals["path_fox"][1] - totals["fox"][1] == extra

    # All of it: feed-forward width 768, vocabulary 2048, squares of 256 x 256 scores per head.
    block = (
        4 * 256 * 256 + 3 * 256 * 768 + 2 * 256 + 256 * 16 + 16
    )  # with the gate, without w, beta
    weights = parameters + 6 * block + 256 + 256 * 2048
    scores = 6 * 16 * 3 * (2 * 2 * 16 * 256)  # q k^T and p v; the backward is two forwards
    transforms = 18 * transform_flops(16, 16, 16, 256)
    assert totals["path_fox"] == (weights + 2048 * 256, 6 * weights + scores + transforms)


SINGLE = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)


def own_parallelize(model, parallel_dims, job_config):
    """A parallelize_fn of someone's model, without torchtitan's names beside it."""
    return model


@pytest.mark.parametrize("mode, option", [("none", "op"), ("selective", "2"), ("full", "op")])
def test_needs_a_save_list_only_per_op(mode, option):
    """An attention computed twice in silence, or a job refused over a list that it does not use."""
    spec = replace(llama3.get_train_spec(), parallelize_fn=own_parallelize)
    spec = train_spec.wrap_train_spec(spec)
    job = parse(
        f"--activation_checkpoint.mode={mode}",
        f"--activation_checkpoint.selective_ac_option={option}",
    )
    model = SimpleNamespace(model_args=configured_args(job))
    assert spec.parallelize_fn(model, SINGLE, job) is model
    job.activation_checkpoint.mode, job.activation_checkpoint.selective_ac_option = (
        "selective",
        "op",
    )
    with pytest.raises(ValueError, match=f"_op_sac_save_list .* none in {__name__}"):
        spec.parallelize_fn(model, SINGLE, job)


def test_warns_of_tied_embeddings_that_it_cannot_repair(caplog):
    """FSDP2 of a tied embedding failing on torch 2.13 without a word of the repair that missed."""
    spec = replace(qwen3.get_train_spec(), parallelize_fn=own_parallelize)
    spec = train_spec.wrap_train_spec(spec)
    job = parse("--model.name=qwen3", "--model.attention=default")
    for tied, sharded in ((True, False), (False, True), (True, True)):
        model = SimpleNamespace(model_args=SimpleNamespace(enable_weight_tying=tied))
        dims = replace(SINGLE, dp_shard=2, world_size=2) if sharded else SINGLE
        assert not caplog.records
        spec.parallelize_fn(model, dims, job)
    (record,) = caplog.records
    assert "expected an apply_fsdp that calls fully_shard" in record.message
    assert record.message.endswith(f"found none in {__name__}")


class CountOp(TorchDispatchMode):
    """Counts the runs of the attention op."""

    runs = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.runs += func is torch.ops.path_backend.attention.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
@pytest.mark.parametrize("mode, runs_per_layer", [("none", 1), ("selective", 1), ("full", 2)])
def test_selective_checkpointing_keeps_the_attention(name, mode, runs_per_layer):
    """The op missing from a save list: attention would run twice under selective checkpointing."""
    job = parse(
        f"--model.name={name}",
        f"--activation_checkpoint.mode={mode}",
        "--activation_checkpoint.selective_ac_option=op",
        "--training.seq_len=32",
    )
    spec = train_spec.wrap_train_spec({"llama3": llama3, "qwen3": qwen3}[name].get_train_spec())
    args = spec.model_args["debugmodel"]
    args.n_layers, args.dim = 2, 64
    args.update_from_config(job)
    model = spec.model_cls(args)
    model = spec.parallelize_fn(model, SINGLE, job)
    with torch.no_grad():
        model.init_weights()
    with CountOp() as count:
        model(torch.randint(0, args.vocab_size, (1, 32))).sum().backward()
    assert count.runs == 2 * runs_per_layer
