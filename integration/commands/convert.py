"""Make the starting checkpoint of a PaTH, PaTH-FoX or FoX job from a checkpoint of its base model.

    path-backend convert --config job.toml --from outputs/base/checkpoint --to outputs/start

The base model is the job's own flavor with `model.attention = "default"`. Its checkpoint is one of
the trainer, of which the latest step is taken, a `step-<number>` folder of it, or a Hugging Face
folder of Llama's or Qwen3's safetensors. Every weight of it is kept, and the parameters of
`attention.path` get the initial values that the job asks for. With `rope = true`, a small
`beta_start` and a `gate_start` near 1 in `[model.path]`, the logits hardly change.

A job starts from the result with

    [checkpoint]
    initial_load_path = "outputs/start"
    initial_load_model_only = true
    initial_load_in_hf = false  # true after --format hf

Further arguments override keys of the TOML file, as the trainer's do. The result appears as a whole
or not at all.
"""

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools import utils
from torchtitan.tools.logging import init_logger

from path_backend.integration.commands import evaluate
from path_backend.integration.torchtitan.job import load_job, model_args
from path_backend.integration.torchtitan.model import PathArgs
from path_backend.integration.torchtitan.state_dict import OURS
from path_backend.layers.variants import VARIANTS

FORMATS = ("dcp", "hf")
_LAYER = re.compile(r"((?:model\.)?layers)\.(\d+)\.(.+)")
_TIED = {"output.weight": "tok_embeddings.weight", "lm_head.weight": "model.embed_tokens.weight"}
_COMPUTED = ".rotary_emb.inv_freq"  # old Hugging Face folders of Llama hold RoPE's frequencies
# Keys of a Hugging Face config.json that the shapes of the weights do not tell, and ours for them.
_SAME = {
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "kv_heads",
    "rms_norm_eps": "norm_eps",
}
_SCALING = {
    "factor": "scaling_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}


@dataclass(frozen=True)
class Conversion:
    """Says what a conversion did: names of weights it kept, and new parameters by name.

    `source` is the folder that held the weights.
    """

    source: Path
    kept: list[str]
    new: dict[str, Tensor]

    def lines(self) -> Iterator[str]:
        """The report, a name for all layers on a line, with what new parameters start as."""
        yield f"Kept, {len(self.kept)} tensors of {self.source}:"
        yield from (f"  {name}" for name in by_layer(self.kept))
        yield f"New, {len(self.new)} tensors:"
        for name, members in by_layer(self.new).items():
            values = torch.cat([self.new[member].flatten() for member in members])
            yield f"  {name}: {_initial(name, values.float())}"


def convert(
    job: JobConfig, source: Path, target: Path, *, output_format: str = "dcp", seed: int = 0
) -> Conversion:
    """Write the starting checkpoint of a job to the folder `target`, from its base model's.

    New parameters are drawn after `seed`. Raises ValueError if the job's attention has no such
    start, if `source` is not a checkpoint of the base model, or if `target` exists and is not an
    empty folder.
    """
    if output_format not in FORMATS:
        raise ValueError(f"--format must be one of {', '.join(FORMATS)}, got {output_format!r}")
    attention = getattr(job.model, "attention", "default")
    if not VARIANTS[attention].takes_rope:
        known = ", ".join(name for name, variant in VARIANTS.items() if variant.takes_rope)
        raise ValueError(f"model.attention must be one of {known}, got {attention!r}")
    target = target.resolve()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"--to must be a new or empty folder, got {target}")
    folder, in_hf = find_source(source)

    args = model_args(job)
    assert isinstance(args, PathArgs)
    spec = get_train_spec(job.model.name)
    assert spec.state_dict_adapter is not None
    adapter = spec.state_dict_adapter(args, None)
    state = _initial_model(spec.model_cls, args, job, seed).state_dict()
    base = {name: value for name, value in state.items() if not OURS.fullmatch(name)}
    what = f"{job.model.name} {job.model.flavor}"
    if in_hf:
        _check_config(folder / "config.json", args, what)
        loaded = _read_hf(folder, base, adapter, what)
    else:
        loaded = _read_dcp(folder, base, what)
    with torch.no_grad():
        for name, value in loaded.items():
            state[name].copy_(value)

    with _whole(target) as unfinished:
        if output_format == "hf":
            writer = HuggingFaceStorageWriter(str(unfinished))
            dcp.save(adapter.to_hf(state), storage_writer=writer, no_dist=True)
        else:
            dcp.save(state, checkpoint_id=str(unfinished), no_dist=True)
    new = {name: value for name, value in state.items() if name not in loaded}
    return Conversion(folder, [name for name in state if name in loaded], new)


def find_source(folder: Path) -> tuple[Path, bool]:
    """The folder that holds the weights, and whether it is one of Hugging Face."""
    if (folder / ".metadata").is_file():
        return folder, False
    if any(folder.glob("*.safetensors")):
        return folder, True
    files = [
        path for name in (".metadata", "*.safetensors") for path in folder.glob(f"step-*/{name}")
    ]
    if files:
        return find_source(max((path.parent for path in files), key=evaluate.step_of))
    raise ValueError(
        "--from must be a checkpoint folder of the trainer, a step-<number> folder of it, or a "
        f"Hugging Face folder with *.safetensors, got {folder}"
    )


def by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    """The names of each name in a layer, under one for all: `layers.{0-7}.attention.wq.weight`."""
    groups: dict[tuple[str, str], dict[int, str]] = {}
    for name in names:
        match = _LAYER.fullmatch(name)
        prefix, layer, rest = (match[1], int(match[2]), match[3]) if match else (name, 0, "")
        groups.setdefault((prefix, rest), {})[layer] = name
    result = {}
    for (prefix, rest), members in groups.items():
        layers = sorted(members)
        if len(layers) > 1 and layers[-1] - layers[0] == len(layers) - 1:
            held = f"{layers[0]}-{layers[-1]}"
        else:
            held = ",".join(map(str, layers))
        result[f"{prefix}.{{{held}}}.{rest}" if rest else prefix] = list(members.values())
    return result


def _initial_model(model_cls: Any, args: PathArgs, job: JobConfig, seed: int) -> nn.Module:
    """The job's model on the CPU with its initial weights."""
    with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[job.training.dtype]):
        model = model_cls(args)
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_weights()
    return model


def _read_dcp(folder: Path, base: dict[str, Tensor], what: str) -> dict[str, Tensor]:
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {
        name: list(getattr(entry, "size", []))
        for name, entry in saved.items()
        if not name.startswith(evaluate.TRAINER_STATE)
    }
    _refuse_others(folder, base, found, what)
    # new memory for each: tied weights share theirs, and those of the checkpoint may differ
    loaded = {name: torch.empty_like(value) for name, value in base.items()}
    dcp.load(loaded, checkpoint_id=str(folder), no_dist=True)
    tied = base["output.weight"].data_ptr() == base["tok_embeddings.weight"].data_ptr()
    if tied:
        _refuse_untied(folder, loaded, "output.weight", what)
    return loaded


def _read_hf(
    folder: Path, base: dict[str, Tensor], adapter: BaseStateDictAdapter, what: str
) -> dict[str, Tensor]:
    expected = adapter.to_hf({name: value.to("meta") for name, value in base.items()})
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {
                name: file.get_tensor(name) for name in file.keys() if not name.endswith(_COMPUTED)
            }
    if "lm_head.weight" not in expected and "lm_head.weight" in tensors:
        _refuse_untied(folder, tensors, "lm_head.weight", what)
        del tensors["lm_head.weight"]
    _refuse_others(folder, expected, {name: list(x.shape) for name, x in tensors.items()}, what)
    return adapter.from_hf(tensors)


def _refuse_others(
    folder: Path, expected: Mapping[str, Tensor], found: dict[str, list[int]], what: str
) -> None:
    """Raises ValueError if names or shapes of a checkpoint are not those of the base model."""
    missing, surplus = expected.keys() - found.keys(), found.keys() - expected.keys()
    if missing and missing <= _TIED.keys():
        (output,) = missing
        raise ValueError(
            f"{folder} must have {output}: without one it is tied to {_TIED[output]}, and the "
            f"output layer of {what} is not (enable_weight_tying of a qwen3 flavor)"
        )
    if missing or surplus:
        raise ValueError(
            f'{folder} must hold the weights of {what} with model.attention = "default" and no '
            f"others; missing: {_names(missing)}; not expected: {_names(surplus)}"
        )
    other = [name for name, value in expected.items() if found[name] != list(value.shape)]
    if other:
        shapes = ", ".join(
            f"{name} of {found[members[0]]} where the job's is {list(expected[members[0]].shape)}"
            for name, members in by_layer(other).items()
        )
        raise ValueError(f"{folder} must have the shapes of {what}, got {shapes}")


def _refuse_untied(folder: Path, tensors: dict[str, Tensor], output: str, what: str) -> None:
    embedding = _TIED[output]
    if embedding in tensors and not torch.equal(tensors[output], tensors[embedding]):
        raise ValueError(
            f"{folder} must have equal {output} and {embedding}, which are tied in {what} "
            "(enable_weight_tying), got tensors that differ"
        )


def _check_config(path: Path, args: PathArgs, what: str) -> None:
    """Raises ValueError if config.json, where there is one, names another model than the job's.

    Heads, the norms' epsilon, and with `rope` RoPE's theta and scaling do not show in the weights.
    """
    if not path.is_file():
        return
    config = json.loads(path.read_text())
    expected: dict[str, Any] = {key: getattr(args, ours) for key, ours in _SAME.items()}
    found = {key: config.get(key, value) for key, value in expected.items()}
    if args.path.rope:
        # one table since transformers 5
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        scaling = getattr(args, "rope_scaling_args", None)
        expected["rope_theta"] = args.rope_theta
        found["rope_theta"] = rope.get("rope_theta", config.get("rope_theta", 10000.0))
        expected["rope_type"] = "default" if scaling is None else "llama3"
        found["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
        if scaling is not None:
            expected |= {key: getattr(scaling, ours) for key, ours in _SCALING.items()}
            found |= {key: rope.get(key) for key in _SCALING}
    for key, value in expected.items():
        if found[key] != value:
            raise ValueError(f"{path}: {key} must be {value!r}, that of {what}, got {found[key]!r}")


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its name at the end, or goes if there is an error."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        unfinished.replace(target)
    except BaseException:
        shutil.rmtree(unfinished)
        raise


def _initial(name: str, values: Tensor) -> str:
    if name.endswith("path.beta.bias"):
        return f"beta starts at {2 * values.sigmoid().mean():.4g} (model.path.beta_start)"
    if name.endswith("path.gate.bias"):
        return f"gates start at {values.sigmoid().mean():.4g} (model.path.gate_start)"
    return f"random, standard deviation {values.std():.2g}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(by_layer(sorted(names))) or "none"


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="path-backend convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, required=True, help="TOML file of the new job")
    parser.add_argument(
        "--from", type=Path, required=True, dest="source", help="checkpoint of the base model"
    )
    parser.add_argument("--to", type=Path, required=True, help="folder to make")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="dcp",
        help="the trainer's own (default) or safetensors",
    )
    parser.add_argument(
        "--seed", type=int, help="of new parameters (default: debug.seed of the job, or 0)"
    )
    options, overrides = parser.parse_known_args(arguments)
    init_logger()
    job = load_job([f"--job.config_file={options.config}", *overrides])
    seed = options.seed if options.seed is not None else job.debug.seed or 0
    done = convert(job, options.source, options.to, output_format=options.format, seed=seed)
    print("\n".join(done.lines()))
    print(f"Written to {options.to}")


if __name__ == "__main__":
    main()
