"""Checkpoints of flash-linear-attention's `PaTHAttentionForCausalLM`, out and in.

    path-backend fla export job.toml HF_FOLDER FLA_FOLDER
    path-backend fla import job.toml FLA_FOLDER HF_FOLDER

HF_FOLDER holds what `checkpoint.last_save_in_hf` writes and `checkpoint.initial_load_in_hf` reads.
The job (further arguments override its keys) says what tensors do not: head size, eps, gate scale.

That library's model has Llama's blocks without q and k norms, w of rank 32 or full, a convolution
of width 3, and a gate whose sum is multiplied by the scale: a job that differs is refused. Its beta
is not clipped, so that logits differ where a trained beta lies above the job's beta_max.
Its own `generate` fails on an exported folder with current transformers, whose calls without a mask
its layer takes for training.
Source of names and constants: fla/layers/path_attn.py and fla/models/path_attn, version 0.6.0.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torchtitan.models.llama3.model.model import FeedForward

from path_backend.integration.commands.arguments import check_job_file
from path_backend.integration.torchtitan.job import load_job, model_args
from path_backend.integration.torchtitan.model import PathArgs

INDEX = "model.safetensors.index.json"
_OUTER = {
    "model.embed_tokens.weight": "model.embeddings.weight",
    "model.norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "mlp_norm.weight",
    **{f"mlp.{name}_proj.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    **{f"self_attn.{name}_proj.weight": f"attn.{name}_proj.weight" for name in "qkvo"},
    "self_attn.path.conv.weight": "attn.w_conv1d.weight",
    "self_attn.path.beta.weight": "attn.bt_proj.weight",
    "self_attn.path.beta.bias": "attn.bt_proj.bias",
}
_LOW_RANK = {
    "self_attn.path.w_down.weight": "attn.w_proj.0.weight",
    "self_attn.path.w_up.weight": "attn.w_proj.1.weight",
}
_FULL_RANK = {"self_attn.path.w_up.weight": "attn.w_proj.weight"}
_GATE = {
    "self_attn.path.gate.weight": "attn.g_proj.weight",
    "self_attn.path.gate.bias": "attn.g_proj.bias",
}


_DEFAULTS = {  # of the library's configuration, where a config.json names no value
    "hidden_act": "swish",
    "norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_forget_gate": False,
    "use_low_rank_w": True,
    "use_w_shortconv": True,
}


def export_folder(args: PathArgs, source: Path, target: Path) -> None:
    """Write the library's folder, config.json included, from an exported one."""
    config = fla_config(args)
    _convert(_names(args), _shapes(args), source, target, lambda conv: conv.unsqueeze(1))
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def import_folder(args: PathArgs, source: Path, target: Path) -> None:
    """Write a folder that `checkpoint.initial_load_in_hf` reads from one of the library."""
    expected = fla_config(args)
    config = source / "config.json"
    if not config.is_file():
        raise ValueError(f"{source} must be a folder with the library's config.json, got none")
    given = json.loads(config.read_text())
    found = _DEFAULTS | {key: value for key, value in given.items() if value is not None}
    found["num_kv_heads"] = found.get("num_kv_heads") or found.get("num_heads")
    for key, value in expected.items():
        if found.get(key, value) != value:
            raise ValueError(f"{config}: {key} must be {value!r}, got {found[key]!r}")
    names = _names(args)
    shapes = {names[ours]: shape for ours, shape in _shapes(args).items()}
    back = {theirs: ours for ours, theirs in names.items()}
    _convert(back, shapes, source, target, lambda conv: conv.squeeze(1))


def fla_config(args: PathArgs) -> dict[str, Any]:
    """The library's configuration of a job's model; ValueError if it has no such model."""
    head_dim = args.dim // args.n_heads
    path = args.path
    for fits, key, expected, value in (
        (args.attention in ("path", "path_fox"), "attention", "path or path_fox", args.attention),
        (not getattr(args, "qk_norm", False), "name", "one without q and k norms", "one with them"),
        (not getattr(args, "moe_enabled", False), "flavor", "one without experts", "one with them"),
        (
            getattr(args, "head_dim", head_dim) * args.n_heads == args.dim,
            "flavor",
            f"one whose head size is width / heads = {head_dim}",
            getattr(args, "head_dim", head_dim),
        ),
        (path is None or path.w_rank in (0, 32), "path.w_rank", "32 or 0", path and path.w_rank),
        (path is None or path.conv_width == 3, "path.conv_width", "3", path and path.conv_width),
        (
            args.attention != "path_fox" or math.isclose(path.gate_scale, head_dim**-0.5),
            "path.gate_scale",
            f"head_dim**-0.5 = {head_dim**-0.5}",
            path and path.gate_scale,
        ),
    ):
        if not fits:
            raise ValueError(
                f"flash-linear-attention has no such model: model.{key} must be {expected}, "
                f"got {value}"
            )
    return {
        "architectures": ["PaTHAttentionForCausalLM"],
        "model_type": "path_attn",
        "hidden_size": args.dim,
        "intermediate_size": _mlp_width(args),
        "num_hidden_layers": args.n_layers,
        "num_heads": args.n_heads,
        "num_kv_heads": args.n_kv_heads or args.n_heads,
        "hidden_act": "swish",
        "norm_eps": args.norm_eps,
        "vocab_size": args.vocab_size,
        "tie_word_embeddings": False,
        "use_forget_gate": args.attention == "path_fox",
        "use_low_rank_w": args.path.w_rank != 0,
        "use_w_shortconv": True,
    }


def _names(args: PathArgs) -> dict[str, str]:
    """The library's name of every tensor that an exported folder has."""
    layer = {**_LAYER, **(_LOW_RANK if args.path.w_rank else _FULL_RANK)}
    if args.attention == "path_fox":
        layer |= _GATE
    names = dict(_OUTER)
    for i in range(args.n_layers):
        names |= {f"model.layers.{i}.{a}": f"model.layers.{i}.{b}" for a, b in layer.items()}
    return names


def _shapes(args: PathArgs) -> dict[str, tuple[int, int]]:
    """Shapes in an exported folder that tell the vocabulary, widths and heads of a model."""
    kv_heads = args.n_kv_heads or args.n_heads
    layer = "model.layers.0.self_attn."
    return {
        "model.embed_tokens.weight": (args.vocab_size, args.dim),
        layer + "k_proj.weight": (kv_heads * args.dim // args.n_heads, args.dim),
        layer + "path.beta.weight": (kv_heads, args.dim),
        "model.layers.0.mlp.gate_proj.weight": (_mlp_width(args), args.dim),
    }


def _mlp_width(args: PathArgs) -> int:
    """Width of the job's feed-forward layers, which Llama's arguments name indirectly."""
    if hasattr(args, "hidden_dim"):
        return args.hidden_dim
    with torch.device("meta"):
        mlp = FeedForward(args.dim, 4 * args.dim, args.multiple_of, args.ffn_dim_multiplier)
    return mlp.w1.out_features


def _convert(
    names: dict[str, str],
    known: dict[str, tuple[int, int]],
    source: Path,
    target: Path,
    convert_conv: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Renames the tensors of every file, one file in memory at a time.

    Names, and the shapes in `known`, are compared before anything is written. Raises ValueError.
    """
    if source.resolve() == target.resolve():
        raise ValueError(f"the folder to write must be another than the one to read, got {target}")
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{source} must hold .safetensors files (checkpoint.last_save_in_hf writes them), "
            "got none"
        )
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    if found.keys() != names.keys():
        raise ValueError(
            f"{source} must hold the tensors of the job's model; missing: "
            f"{', '.join(sorted(names.keys() - found.keys())) or 'none'}; not expected: "
            f"{', '.join(sorted(found.keys() - names.keys())) or 'none'}"
        )
    for name, shape in known.items():
        if name in found and found[name] != shape:
            raise ValueError(
                f"{source}: {name} must have the shape {shape} of the job's model, "
                f"got {found[name]}"
            )
    target.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total_size = 0
    for file in files:
        renamed = {
            names[name]: convert_conv(tensor) if "conv" in name else tensor
            for name, tensor in load_file(file).items()
        }
        save_file(renamed, target / file.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(renamed, file.name)
        total_size += sum(tensor.numel() * tensor.element_size() for tensor in renamed.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (target / INDEX).write_text(json.dumps(index) + "\n")


def job_args(arguments: list[str]) -> PathArgs:
    """Model arguments of a job, as the trainer would make them; ValueError if it is not ours."""
    job = load_job(arguments)
    args = model_args(job)
    if not isinstance(args, PathArgs):
        raise ValueError(
            'job.custom_config_module must be "path_backend.integration.job_config", or model.name '
            f"that of a wrapped spec, got {job.job.custom_config_module!r} and {job.model.name!r}"
        )
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="path-backend fla",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("direction", choices=["export", "import"])
    parser.add_argument("job", type=Path, help="TOML file that the model trains with")
    parser.add_argument("source", type=Path, help="folder to read")
    parser.add_argument("target", type=Path, help="folder to write, made if it is not there")
    options, overrides = parser.parse_known_args(arguments)
    check_job_file("job", options.job)
    args = job_args([f"--job.config_file={options.job}", *overrides])
    convert = export_folder if options.direction == "export" else import_folder
    convert(args, options.source, options.target)


if __name__ == "__main__":
    main()
