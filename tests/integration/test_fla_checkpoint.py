"""The layout of flash-linear-attention, held against a forward pass written from it."""

import copy
import json
import subprocess
import sys
from dataclasses import replace

import parity_data  # noqa: F401 (adds the flavor)
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torchtitan.models.llama3 import llama3_args
from torchtitan.protocols.train_spec import get_train_spec
from trainer import ROOT, TESTS, TINY

from path_backend.integration.commands import fla_checkpoint
from path_backend.reference import path_attention_reference

# Heads of 64 for the library's kernels.
llama3_args["fla"] = replace(llama3_args["parity"], dim=256, n_layers=2)
JOB = (
    f"--job.config_file={TINY}",
    *("--experimental.custom_import=parity_data", "--model.flavor=parity"),
    "--model.hf_assets_path=" + str(ROOT / "integration/assets/tokenizer"),
)
GATED = ("--model.attention=path_fox", "--model.path.gate_scale=0.25")  # heads of 16


def load_folder(folder):
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def make_model(args, folder, std=0.3):
    """A model with random parameters, and its export in Hugging Face's layout in two files."""
    spec = get_train_spec("llama3")
    torch.manual_seed(0)
    model = spec.model_cls(args).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=std).add_(float(parameter.ndim == 1))
    tensors = spec.state_dict_adapter(args, None).to_hf(model.state_dict())
    folder.mkdir()
    for file, odd in (("a.safetensors", False), ("b.safetensors", True)):
        part = {k: v.contiguous() for k, v in tensors.items() if ("1" in k) == odd}
        save_file(part, folder / file)
    return model


def logits_from_layout(folder, tokens):
    """Logits of PaTHAttentionForCausalLM from its files, by the definition, in fp64."""
    p, config = load_folder(folder), json.loads((folder / "config.json").read_text())
    heads, kv_heads, eps = config["num_heads"], config["num_kv_heads"], config["norm_eps"]
    head_dim = config["hidden_size"] // heads

    def norm(x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * p[name]

    x = p["model.embeddings.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        a, m = f"model.layers.{i}.attn.", f"model.layers.{i}.mlp."
        y = norm(x, f"model.layers.{i}.attn_norm.weight")
        q, k, v = (
            F.linear(y, p[f"{a}{n}_proj.weight"]).unflatten(-1, (h, head_dim))
            for n, h in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if config["use_low_rank_w"]:
            w = F.linear(F.linear(y, p[a + "w_proj.0.weight"]), p[a + "w_proj.1.weight"])
        else:
            w = F.linear(y, p[a + "w_proj.weight"])
        conv = p[a + "w_conv1d.weight"]
        w = F.conv1d(F.pad(w.mT, (conv.shape[-1] - 1, 0)), conv, groups=conv.shape[0]).mT
        w = F.silu(w).unflatten(-1, (kv_heads, head_dim))
        w = w * torch.rsqrt(w.square().sum(-1, keepdim=True) + 1e-6)
        beta = 2 * F.linear(y, p[a + "bt_proj.weight"], p[a + "bt_proj.bias"]).sigmoid()
        gate = None
        if config["use_forget_gate"]:
            gate = F.logsigmoid(F.linear(y, p[a + "g_proj.weight"], p[a + "g_proj.bias"]))
        out = path_attention_reference(q, k, v, w, beta, gate, gate_scale=head_dim**-0.5)
        x = x + F.linear(out.flatten(-2), p[a + "o_proj.weight"])
        y = norm(x, f"model.layers.{i}.mlp_norm.weight")
        up = F.silu(F.linear(y, p[m + "gate_proj.weight"])) * F.linear(y, p[m + "up_proj.weight"])
        x = x + F.linear(up, p[m + "down_proj.weight"])
    return F.linear(norm(x, "model.norm.weight"), p["lm_head.weight"])


@pytest.mark.parametrize(
    "overrides", [GATED, ("--model.attention=path", "--model.path.w_rank=0")], ids=["gate", "full"]
)
def test_layout(tmp_path, overrides):
    """Tensors under each other's names, q and k rows permuted, a gate of another scale."""
    args = fla_checkpoint.job_args([*JOB, *overrides, "--model.path.beta_max=2.0"])
    model = make_model(args, tmp_path / "hf")
    fla_checkpoint.export_folder(args, tmp_path / "hf", tmp_path / "fla")
    tokens = torch.randint(0, args.vocab_size, (2, 70), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = logits_from_layout(tmp_path / "fla", tokens)
        error = (model(tokens) - expected).norm() / expected.norm()
    assert error < 1e-5  # the clip of beta keeps an eps of fp32 below the bound

    fla_checkpoint.import_folder(args, tmp_path / "fla", tmp_path / "back")
    before, after = load_folder(tmp_path / "hf"), load_folder(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    whole_index = json.loads((tmp_path / "fla" / fla_checkpoint.INDEX).read_text())
    index = whole_index["weight_map"]
    written = load_folder(tmp_path / "fla")
    assert index.keys() == written.keys()
    size = sum(tensor.nbytes for tensor in written.values())
    assert whole_index["metadata"] == {"total_size": size}


def test_one_file_is_in_memory_at_a_time(tmp_path, monkeypatch):
    """Catches a conversion that loads every shard before it writes the first."""
    args = fla_checkpoint.job_args([*JOB, "--model.attention=path"])
    make_model(args, tmp_path / "hf")
    order = []

    def load(file):
        order.append(("load", file.name))
        return load_file(file)

    def save(tensors, file, **options):
        order.append(("save", file.name))
        save_file(tensors, file, **options)

    monkeypatch.setattr(fla_checkpoint, "load_file", load)
    monkeypatch.setattr(fla_checkpoint, "save_file", save)
    fla_checkpoint.export_folder(args, tmp_path / "hf", tmp_path / "fla")
    files = ("a.safetensors", "b.safetensors")
    assert order == [(step, file) for file in files for step in ("load", "save")]


def test_folder_onto_itself(tmp_path):
    """Catches a source whose first file is overwritten before the second is read."""
    args = fla_checkpoint.job_args([*JOB, "--model.attention=path"])
    make_model(args, tmp_path / "hf")
    with pytest.raises(ValueError, match="must be another than the one to read, got .*hf"):
        fla_checkpoint.export_folder(args, tmp_path / "hf", tmp_path / "hf")


@pytest.fixture
def untuned(monkeypatch):
    """Kernels run with the first tiles of their lists: Triton's interpreter cannot time them."""
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner

    def run(self, *args, **kwargs):
        return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

    monkeypatch.setattr(autotuner, "run", run)


@(pytest.mark.gpu if torch.cuda.is_available() else pytest.mark.usefixtures("untuned"))
@pytest.mark.parametrize(
    "overrides",
    [
        ("--model.attention=path",),
        ("--model.attention=path", "--model.path.w_rank=0"),
        ("--model.attention=path_fox", "--model.path.gate_scale=0.125"),
    ],
    ids=["low rank", "full rank", "gate"],
)
def test_logits_of_the_library(tmp_path, overrides):
    """A layout that this file misread twice: here the library itself loads and runs the folder."""
    reason = "needs flash-linear-attention==0.6.0"
    library = pytest.importorskip("fla.models.path_attn", reason=reason)
    device, dtype, cast = "cpu", torch.float32, torch.nn.Module.float
    if torch.cuda.is_available():
        device, dtype, cast = "cuda", torch.bfloat16, torch.nn.Module.bfloat16
    args = fla_checkpoint.job_args([*JOB, "--model.flavor=fla", *overrides])
    model = make_model(args, tmp_path / "hf", std=0.05)
    fla_checkpoint.export_folder(args, tmp_path / "hf", tmp_path / "fla")
    loaded, report = library.PaTHAttentionForCausalLM.from_pretrained(
        tmp_path / "fla", dtype=dtype, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.randint(0, args.vocab_size, (2, 384), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(tokens)
        logits = loaded.to(device).eval()(tokens.to(device), use_cache=False).logits
        rounded = cast(model.to(device))(tokens.to(device))
    error, own = ((x.cpu() - expected).norm() / expected.norm() for x in (logits, rounded))
    assert error < 2 * own + 1e-3, (error, own)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (("--model.attention=fox",), "model.attention must be path or path_fox, got fox"),
        (("--model.attention=default",), "model.attention must be path or path_fox, got default"),
        (("--model.name=qwen3", "--model.attention=path"), "must be one without q and k norms"),
        (("--model.attention=path", "--model.path.w_rank=8"), "w_rank must be 32 or 0, got 8"),
        (("--model.attention=path", "--model.path.conv_width=4"), "conv_width must be 3, got 4"),
        (("--model.attention=path_fox",), r"gate_scale must be head_dim\*\*-0.5 = 0.25, got 1.0"),
    ],
)
def test_models_that_do_not_exist_there(overrides, message):
    """A model written as another one, whose logits differ."""
    with pytest.raises(ValueError, match=message):
        fla_checkpoint.fla_config(fla_checkpoint.job_args([*JOB, *overrides]))


def test_job_of_another_kind():
    """An attribute that torchtitan's own arguments lack, for a model that was not wrapped."""
    names = ("--model.name=deepseek_v3", "--model.flavor=debugmodel")
    message = r"custom_config_module must be .*, got '.*job_config' and 'deepseek_v3'"
    with pytest.raises(ValueError, match=message):
        fla_checkpoint.job_args([*JOB, *names])


def test_folder_of_another_model(tmp_path):
    """A checkpoint of another job read as this job's."""
    args = fla_checkpoint.job_args([*JOB, "--model.attention=path"])
    make_model(args, tmp_path / "hf")
    gated = fla_checkpoint.job_args([*JOB, *GATED])
    with pytest.raises(ValueError, match=r"missing: model.layers.0.self_attn.path.gate.bias, .*"):
        fla_checkpoint.export_folder(gated, tmp_path / "hf", tmp_path / "fla")
    fla_checkpoint.export_folder(
        fla_checkpoint.job_args([*JOB, "--model.attention=path"]), tmp_path / "hf", tmp_path / "fla"
    )
    gated = fla_checkpoint.job_args([*JOB, *GATED])
    with pytest.raises(ValueError, match="use_forget_gate must be True, got False"):
        fla_checkpoint.import_folder(gated, tmp_path / "fla", tmp_path / "back")
    with pytest.raises(ValueError, match=f"{tmp_path} must hold .safetensors files .*, got none"):
        fla_checkpoint.export_folder(args, tmp_path, tmp_path / "fla")


def test_heads_of_another_model(tmp_path):
    """Heads that the tensors do not have, or the library's eps, where none is named, for ours."""
    args = fla_checkpoint.job_args([*JOB, "--model.attention=path"])
    make_model(args, tmp_path / "hf")
    fla_checkpoint.export_folder(args, tmp_path / "hf", tmp_path / "fla")
    other = copy.copy(args)
    other.n_heads, other.n_kv_heads = 8, 4
    message = r"path.beta.weight must have the shape \(4, 64\) of the job's model, got \(2, 64\)"
    with pytest.raises(ValueError, match=message):
        fla_checkpoint.export_folder(other, tmp_path / "hf", tmp_path / "other")
    config = json.loads((tmp_path / "fla" / "config.json").read_text())
    config |= {"num_heads": 8, "num_kv_heads": 4}
    (tmp_path / "fla" / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"bt_proj.weight must have the shape \(4, 64\) .*\(2, 64\)"
    ):
        fla_checkpoint.import_folder(other, tmp_path / "fla", tmp_path / "back")
    del config["norm_eps"]
    (tmp_path / "fla" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="norm_eps must be 1e-05, got 1e-06"):
        fla_checkpoint.import_folder(other, tmp_path / "fla", tmp_path / "back")


def test_feed_forward_of_another_model(tmp_path):
    """A width that the tensors or config.json do not have, met only when the folder is loaded."""
    args = fla_checkpoint.job_args([*JOB, "--model.attention=path"])
    make_model(args, tmp_path / "hf")
    fla_checkpoint.export_folder(args, tmp_path / "hf", tmp_path / "fla")
    path = tmp_path / "fla" / "config.json"
    config = json.loads(path.read_text())
    width = load_folder(tmp_path / "fla")["model.layers.0.mlp.up_proj.weight"].shape[0]
    assert config["intermediate_size"] == width
    path.write_text(json.dumps(config | {"intermediate_size": 2 * width}))
    message = f"intermediate_size must be {width}, got {2 * width}"
    with pytest.raises(ValueError, match=message):
        fla_checkpoint.import_folder(args, tmp_path / "fla", tmp_path / "back")
    path.write_text(json.dumps(config | {"intermediate_size": None}))  # the library's default
    fla_checkpoint.import_folder(args, tmp_path / "fla", tmp_path / "back")
    other = copy.copy(args)
    other.ffn_dim_multiplier = 3.0
    with pytest.raises(ValueError, match=r"gate_proj.weight must have the shape \(.*, 64\) of the"):
        fla_checkpoint.import_folder(other, tmp_path / "fla", tmp_path / "other")


@pytest.mark.parametrize("made", [False, True], ids=["missing", "empty"])
def test_folder_without_a_configuration(tmp_path, made):
    """A bare FileNotFoundError for a folder that is not there or not the library's."""
    args = fla_checkpoint.job_args([*JOB, "--model.attention=path"])
    if made:
        (tmp_path / "fla").mkdir()
    with pytest.raises(ValueError, match="fla must be a folder with the library's config.json"):
        fla_checkpoint.import_folder(args, tmp_path / "fla", tmp_path / "back")


@pytest.mark.parametrize(
    "module",
    [("path_backend.integration", "fla"), ("path_backend.integration.commands.fla_checkpoint",)],
    ids=["command", "module"],
)
def test_command(tmp_path, module):
    """The command of GUIDE.md, and its module."""
    args = fla_checkpoint.job_args([*JOB, "--model.attention=path"])
    make_model(args, tmp_path / "hf")
    command = [sys.executable, "-m", *module, "export", str(TINY)]
    subprocess.run(
        [*command, str(tmp_path / "hf"), str(tmp_path / "fla"), *JOB[1:], "--model.attention=path"],
        cwd=TESTS,  # where custom_import finds its module
        check=True,
        timeout=240,
    )
    assert "model.layers.3.attn.bt_proj.bias" in load_folder(tmp_path / "fla")
