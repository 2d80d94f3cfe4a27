"""path-backend convert: the start of a PaTH job from a checkpoint of its base model."""

import json

import parity_data  # noqa: F401 (adds the flavors, before a train spec is built)
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torchtitan.models import llama3, qwen3
from trainer import ROOT, TINY, train

from path_backend.integration.commands import convert, evaluate
from path_backend.integration.torchtitan.job import load_job, model_args
from path_backend.integration.torchtitan.state_dict import OURS, build_adapter

STOCK = {"llama3": llama3, "qwen3": qwen3}
DATA = (  # every step sees the same eight sequences
    *("--experimental.custom_import=parity_data", "--model.flavor=parity"),
    *("--training.dataset=parity", "--training.dataset_path=8 x 96", "--training.seq_len=96"),
    *("--training.local_batch_size=8", "--checkpoint.enable", "--checkpoint.keep_latest_k=0"),
)
CLOSED = ("--model.path.rope", "--model.path.beta_start=1e-7", "--model.path.gate_start=0.9999999")


@pytest.fixture(autouse=True)
def start_from_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)  # TOML files name the tokenizer relative to it


def make_job(*arguments, attention="path_fox"):
    return load_job([f"--job.config_file={TINY}", f"--model.attention={attention}", *arguments])


@pytest.fixture(scope="module", params=STOCK)
def base(request, tmp_path_factory):
    """Name of a tiny model (qwen3's is tied), the model, and a folder with both formats of it."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    spec = STOCK[name].get_train_spec()
    args = spec.model_args["tiny"]
    args = args.stock() if hasattr(args, "stock") else args
    torch.manual_seed(1)
    model = spec.model_cls(args)
    with torch.no_grad():
        model.init_weights(torch.device("cpu"))
        for parameter in model.parameters():  # attention and norms that matter
            parameter.mul_(4) if parameter.ndim == 2 else parameter.add_(torch.rand_like(parameter))
    trainer_state = {"optimizer.state.output.weight.step": torch.ones(1), "train_state.step": 2}
    dcp.save({**model.state_dict(), **trainer_state}, checkpoint_id=folder / "dcp" / "step-2")
    (folder / "hf").mkdir()
    tensors = spec.state_dict_adapter(args, None).to_hf(model.state_dict())
    tensors = {key: value.detach().clone() for key, value in tensors.items()}
    for part in (0, 1):
        names = sorted(tensors)[part::2]
        save_file({key: tensors[key] for key in names}, folder / "hf" / f"model-{part}.safetensors")
    return name, model.eval(), folder


def load(job, folder):
    return evaluate.load_subject(job, evaluate.find_checkpoint(folder, None), longest=64)


def test_finds_the_source(tmp_path):
    """The wrong step, one that was cut off in writing, or a last step in another format missed."""
    for step, file in ((9, ".metadata"), (10, ".metadata"), (11, "model.safetensors"), (12, "x")):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / file).touch()
    assert convert.find_source(tmp_path) == (tmp_path / "step-11", True)
    assert convert.find_source(tmp_path / "step-9") == (tmp_path / "step-9", False)
    (tmp_path / "step-11").rename(tmp_path / "mine")
    assert convert.find_source(tmp_path) == (tmp_path / "step-10", False)
    assert convert.find_source(tmp_path / "mine") == (tmp_path / "mine", True)


@pytest.mark.parametrize("attention", ["path", "path_fox", "fox"])
@pytest.mark.parametrize("source", ["dcp", "hf"])
def test_logits_stay(base, tmp_path, source, attention):
    """A weight lost or permuted on the way in or out, or one format that holds another model."""
    name, model, folder = base
    job = make_job(f"--model.name={name}", *CLOSED, attention=attention)
    target = tmp_path / "start" / "step-0"
    done = convert.convert(job, folder / source, target)
    subject = load(job, target)
    tokens = torch.randint(2048, (2, 64), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(subject.device)
    with torch.no_grad():
        expected, actual = model.to(subject.device)(tokens), subject.logits(tokens)
    assert (actual - expected).norm() / expected.norm() < 1e-5
    state, plain = subject.model.state_dict(), model.state_dict()
    assert set(done.kept) == plain.keys()
    assert done.new.keys() == {key for key in state if OURS.fullmatch(key)}
    for key, value in plain.items():
        assert torch.equal(state[key], value), key

    exported = tmp_path / "exported"
    convert.convert(job, folder / source, exported, output_format="hf")
    tensors = {}
    for path in exported.glob("*.safetensors"):
        tensors |= load_file(path, device=subject.device.type)
    assert ("lm_head.weight" in tensors) == (name == "llama3")
    adapter = build_adapter(STOCK[name].get_train_spec().state_dict_adapter, model_args(job), None)
    back = adapter.from_hf(tensors)
    assert back.keys() == state.keys()
    for key, value in state.items():
        assert torch.equal(back[key], value), key


def test_without_rope(base, tmp_path):
    """Rows of q and k moved where nothing pairs them, or new parameters that no seed repeats."""
    name, model, folder = base
    job = make_job(f"--model.name={name}", attention="path")
    states = []
    for seed in (0, 0, 1):
        target = tmp_path / str(len(states)) / "step-0"
        convert.convert(job, folder / "dcp" / "step-2", target, seed=seed)
        states.append(load(job, target).model.state_dict())
    for key, value in model.state_dict().items():
        assert torch.equal(states[0][key], value.to(states[0][key].device)), key
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    w_up = "layers.0.attention.path.w_up.weight"
    assert not torch.equal(states[0][w_up], states[2][w_up])


@pytest.mark.parametrize("output_format", convert.FORMATS)
def test_trainer_goes_on(trained, tmp_path, capsys, output_format):
    """A start that the trainer refuses, does not load, or whose first loss is another model's."""
    run, job = trained
    target = tmp_path / "start"
    arguments = ["--config", str(TINY), "--from", str(run.folder / "checkpoint" / "step-2")]
    convert.main([*arguments, "--to", str(target), "--format", output_format, *job])
    printed = capsys.readouterr().out
    assert f"Kept, 39 tensors of {run.folder / 'checkpoint' / 'step-2'}:" in printed
    assert "New, 28 tensors:" in printed
    assert "  layers.{0-3}.attention.wq.weight\n" in printed
    assert "layers.{0-3}.attention.path.beta.bias: beta starts at 1e-07 (model.path." in printed
    assert "layers.{0-3}.attention.path.gate.bias: gates start at 1 (model.path." in printed
    assert "layers.{0-3}.attention.path.conv.weight: random, standard deviation 0.02" in printed
    on = train(
        *(tmp_path / "on", *job, f"--checkpoint.initial_load_path={target}"),
        *(["--checkpoint.initial_load_in_hf"] if output_format == "hf" else []),
        "--training.steps=1",
    )
    assert on.loss[0] == pytest.approx(run.loss[2], abs=1e-4)
    assert abs(on.loss[0] - run.loss[1]) > 1e-3


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three steps of the base model with a checkpoint after the second, and arguments to go on."""
    folder = tmp_path_factory.mktemp("trained")
    run = train(folder, *DATA, "--checkpoint.interval=2", "--training.steps=3")
    return run, (*DATA, *CLOSED, "--model.attention=path_fox")


def refused(job, source, target, message):
    with pytest.raises(ValueError, match=message):
        convert.convert(job, source, target)
    assert not target.exists() and not any(target.parent.glob(f".{target.name}*"))


def change(base, folder, edit=lambda tensors: None):
    """A Hugging Face folder of the base model with its tensors edited."""
    tensors = {}
    for path in (base[2] / "hf").glob("*.safetensors"):
        tensors |= load_file(path)
    edit(tensors)
    folder.mkdir()
    save_file({key: value.clone() for key, value in tensors.items()}, folder / "m.safetensors")
    return folder


def test_refuses_other_tensors(base, tmp_path):
    """Another model, a missing or foreign weight taken, or left to an error of a reader."""
    name, model, folder = base
    job = make_job(f"--model.name={name}")
    target = tmp_path / "to"
    state = model.state_dict()
    norm = "layers.1.ffn_norm.weight"
    saved = tmp_path / "saved" / "step-1"
    dcp.save({**state, norm: torch.ones(32)}, checkpoint_id=saved)
    message = rf"shapes of {name} tiny, got layers.\{{1\}}.ffn_norm.weight of \[32\] .* is \[64\]"
    refused(job, saved.parent, target, message)
    saved = tmp_path / "saved" / "step-2"
    lacking = {key: value for key, value in state.items() if key != norm}
    dcp.save({**lacking, "layers.0.attention.sink": torch.ones(4)}, checkpoint_id=saved)
    message = r"missing: layers.\{1\}.ffn_norm.weight; not expected: layers.\{0\}.attention.sink"
    refused(job, saved.parent, target, message)

    def edit(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)  # is left out
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)

    changed = change(base, tmp_path / "bias", edit)
    message = r"missing: none; not expected: model.layers.\{0\}.self_attn.q_proj.bias$"
    refused(job, changed, target, message)
    changed = change(
        base, tmp_path / "cut", lambda x: x.update({"model.norm.weight": torch.ones(3)})
    )
    refused(job, changed, target, r"model.norm.weight of \[3\] where the job's is \[64\]")
    converted = tmp_path / "done"
    convert.convert(job, folder / "hf", converted)
    refused(job, converted, target, r"not expected: layers.\{0-1\}.attention.path.beta.bias")


def test_refuses_other_ties(base, tmp_path):
    """An output layer that stays random, or one of its own that is lost in a tied model."""
    name, model, _ = base
    job = make_job(f"--model.name={name}")
    target = tmp_path / "to"
    if name == "llama3":
        changed = change(base, tmp_path / "tied", lambda x: x.pop("lm_head.weight"))
        message = "must have lm_head.weight: without one it is tied to model.embed_tokens.weight"
        refused(job, changed, target, message)
        return
    changed = change(
        *(base, tmp_path / "own"),
        lambda x: x.update({"lm_head.weight": x["model.embed_tokens.weight"] + 1}),
    )
    message = "equal lm_head.weight and model.embed_tokens.weight, which are tied in qwen3 tiny"
    refused(job, changed, target, message)
    state = dict(model.state_dict())
    state["output.weight"] = state["output.weight"] + 1
    dcp.save(state, checkpoint_id=tmp_path / "d")
    message = "equal output.weight and tok_embeddings.weight, which are tied in qwen3 tiny"
    refused(job, tmp_path / "d", target, message)
    same = change(
        *(base, tmp_path / "same"),
        lambda x: x.update({"lm_head.weight": x["model.embed_tokens.weight"]}),
    )
    assert "output.weight" in convert.convert(job, same, target).kept


SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONFIG = {
    "llama3": {"num_attention_heads": 4, "rope_theta": 10000.0, "rope_scaling": SCALING},
    "qwen3": {"num_key_value_heads": 2, "rope_parameters": {"rope_theta": 1e6}},
}


def test_refuses_another_config(base, tmp_path):
    """Other heads, or a rotation that the weights do not show and the job does not have."""
    name, _, _ = base
    job = make_job(f"--model.name={name}", "--model.path.rope")
    folder = change(base, tmp_path / "hf")
    target = tmp_path / "to"
    yarn = {"rope_theta": CONFIG[name].get("rope_theta", 1e6), "rope_type": "yarn", "factor": 4.0}
    for changed, message in (
        ({"num_attention_heads": 8}, "num_attention_heads must be 4, that of .* tiny, got 8"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps must be .*, got 0.001"),
        ({"rope_parameters": {**SCALING, "rope_theta": 7.0}}, "rope_theta must be .*, got 7.0"),
        ({"rope_parameters": yarn}, "rope_type must be '(llama3|default)', .* got 'yarn'"),
    ):
        (folder / "config.json").write_text(json.dumps(CONFIG[name] | changed))
        refused(job, folder, target, message)
    plain = make_job(f"--model.name={name}")  # whose positions are PaTH's alone
    convert.convert(plain, folder, tmp_path / "plain")
    (folder / "config.json").write_text(json.dumps(CONFIG[name]))
    convert.convert(job, folder, target)


def test_refuses_folders_and_attentions(tmp_path):
    """A folder overwritten, half of one left behind, or a checkpoint that is its base's alone."""
    source = tmp_path / "source" / "step-1"
    source.mkdir(parents=True)
    job = make_job()
    message = "--from must be a checkpoint folder of the trainer, a step-<number> .* got .*source"
    refused(job, source.parent, tmp_path / "to", message)
    for attention in ("default", "nope", "stick_breaking"):
        message = f"model.attention must be one of path, path_fox, fox, got '{attention}'"
        refused(make_job(attention=attention), source, tmp_path / "to", message)
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    for target in (full, full / "file"):
        with pytest.raises(ValueError, match="--to must be a new or empty folder, got .*full"):
            convert.convert(job, source, target)
    with pytest.raises(ValueError, match="--format must be one of dcp, hf, got 'pt'"):
        convert.convert(job, source, tmp_path / "to", output_format="pt")


@pytest.mark.parametrize("output_format", convert.FORMATS)
def test_nothing_half_written(base, tmp_path, monkeypatch, output_format):
    """A folder that looks like a checkpoint after a write that failed."""
    name, _, folder = base
    job = make_job(f"--model.name={name}")
    save = dcp.save

    def cut_off(*args, **kwargs):
        save(*args, **kwargs)
        raise OSError("disk full")

    target = tmp_path / "to"
    monkeypatch.setattr(dcp, "save", cut_off)
    with pytest.raises(OSError, match="disk full"):
        convert.convert(job, folder / "dcp", target, output_format=output_format)
    assert not any(tmp_path.iterdir())
    monkeypatch.undo()
    monkeypatch.chdir(ROOT)
    target.mkdir()  # an empty one is taken
    convert.convert(job, folder / "dcp", target, output_format=output_format)
    assert any(target.iterdir()) and [path.name for path in tmp_path.iterdir()] == ["to"]
