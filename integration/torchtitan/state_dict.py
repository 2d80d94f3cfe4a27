"""Hugging Face checkpoints of models with PaTH, PaTH-FoX or FoX attention, both ways.

A plain Llama or Qwen3 checkpoint loads into such a model: what it lacks, the parameters of
`attention.path`, keeps its initial values and is listed in the log. An export has them beside the
stock ones, as `model.layers.<i>.self_attn.path.<name>`, and they load again by that name.

torchtitan permutes the rows of Llama's wq and wk on the way, because it pairs RoPE's channels in
another order than Hugging Face does. Without RoPE nothing pairs channels: rows stay as they are.
With `[model.path] rope` they are permuted as by torchtitan, and so are those of w.
"""

import functools
import re
from collections.abc import Iterable
from typing import Any

from torch.distributed.checkpoint.metadata import STORAGE_TYPES
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.tools.logging import logger

OURS = re.compile(r"layers\.(\d+)\.attention\.path\.(.+)")
_OURS_IN_HF = re.compile(r"model\.layers\.(\d+)\.self_attn\.path\.(.+)")
# A buffer that balances experts while they train; Qwen3's layout has no place for it.
_BALANCE = re.compile(r"layers\.\d+\.moe\.expert_bias")


def build_adapter(
    stock_cls: type[BaseStateDictAdapter], model_args: BaseModelArgs, hf_assets_path: str | None
) -> BaseStateDictAdapter:
    """The stock adapter if `attention = "default"`, else one that knows our parameters."""
    if model_args.attention == "default":
        return stock_cls(model_args, hf_assets_path)
    return _adapter_class(stock_cls)(model_args, hf_assets_path)


@functools.cache
def _adapter_class(stock_cls: type[BaseStateDictAdapter]) -> type[BaseStateDictAdapter]:
    class PathAdapter(stock_cls):
        _exported: dict[str, Any]  # what to_hf returned, until it is loaded

        @property
        def _rope(self) -> bool:
            path = self.model_args.path  # None before the job's configuration is read
            return path is not None and path.rope

        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            """Raises ValueError for a parameter without a name there (Qwen3's would drop it)."""
            ours, stock = _split(state_dict, OURS)
            known = self.from_hf_map.values()
            lost = [name for name in stock if re.sub(r"\d+", "{}", name, count=1) not in known]
            unknown = [name for name in lost if not _BALANCE.fullmatch(name)]
            if unknown:
                raise ValueError(
                    f"{stock_cls.__name__} must know every parameter, got {', '.join(unknown)}"
                )
            if lost:
                logger.warning(f"Not in Hugging Face's layout, left out: {', '.join(lost)}")
            exported = super().to_hf(stock)
            for name, value in ours.items():
                if _rotated(name):
                    value = self._permute(value, self.model_args.kv_heads)
                exported[OURS.sub(r"model.layers.\1.self_attn.path.\2", name)] = value
            self._place_in_files(exported)
            self._exported = exported
            return exported

        def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
            ours, stock = _split(hf_state_dict, _OURS_IN_HF)
            state_dict = super().from_hf(stock)
            for name, value in ours.items():
                if _rotated(name):
                    value = self._reverse_permute(value, self.model_args.kv_heads)
                state_dict[_OURS_IN_HF.sub(r"layers.\1.attention.path.\2", name)] = value
            return state_dict

        def get_hf_storage_reader(self, path: str, from_quantized: bool = False):
            """The stock reader; what it does not find of our parameters is no longer asked for.

            torchtitan calls to_hf, this, and then a strict load of what to_hf returned.
            """
            reader = super().get_hf_storage_reader(path, from_quantized)
            found = reader.read_metadata().state_dict_metadata
            exported, self._exported = self._exported, {}
            ours, stock = _split(exported, _OURS_IN_HF)
            refuse_other_sizes(path, ours, found)
            missing = [name for name in ours if name not in found]
            for name in missing:
                del exported[name]
            if missing:
                logger.warning(
                    f"Not in {path}, initial values stay: {', '.join(_by_layer(missing))}"
                )
            # by name in the layer: other layers may be those of other stages of a pipeline
            used = names_in_layers(ours, _OURS_IN_HF)
            unused = [
                name
                for name in found
                if (match := _OURS_IN_HF.fullmatch(name)) and match[2] not in used
            ]
            if unused and any(name.startswith("model.layers.") for name in stock):
                logger.warning(
                    f'In {path}, not used by model.attention = "{self.model_args.attention}": '
                    f"{', '.join(_by_layer(unused))}"
                )
            return reader

        # Llama's adapter calls them for wq and wk; Qwen3's has none.
        def _permute(self, weight, *shape):
            permute = getattr(super(), "_permute", None)
            return permute(weight, *shape) if permute and self._rope else weight

        def _reverse_permute(self, weight, *shape):
            permute = getattr(super(), "_reverse_permute", None)
            return permute(weight, *shape) if permute and self._rope else weight

        def _place_in_files(self, exported: dict[str, Any]) -> None:
            """Put each new parameter into the file of its layer's q_proj, if there are files."""
            files = self.fqn_to_index_mapping
            if not files:
                return
            for name in exported:
                if match := _OURS_IN_HF.match(name):
                    files[name] = files[f"model.layers.{match[1]}.self_attn.q_proj.weight"]

    PathAdapter.__name__ = PathAdapter.__qualname__ = f"Path{stock_cls.__name__}"
    return PathAdapter


def _rotated(name: str) -> bool:
    """Whether the rows of a parameter are channels of w, which RoPE pairs as those of k."""
    return name.endswith(("path.w_up.weight", "path.conv.weight"))


def names_in_layers(parameters: Iterable[str], pattern: re.Pattern = OURS) -> set[str]:
    """Returns what follows `attention.path.` in the names that match, whichever the layer."""
    return {match[2] for match in map(pattern.fullmatch, parameters) if match}


def refuse_other_sizes(
    folder: str, parameters: dict[str, Any], saved: dict[str, STORAGE_TYPES]
) -> None:
    """Raises ValueError if one of these parameters has another shape in a checkpoint."""
    for name, parameter in parameters.items():
        size = getattr(saved.get(name), "size", parameter.shape)
        if tuple(size) != tuple(parameter.shape):
            raise ValueError(
                f"{folder} must be of the same model, with the same w_rank and conv_width in "
                f"[model.path], and of the same tokenizer or task, got {name} of {list(size)}, "
                f"the job's is {list(parameter.shape)}"
            )


def _split(state_dict: dict[str, Any], pattern: re.Pattern) -> tuple[dict, dict]:
    """Entries whose name matches, and the others."""
    ours = {name: value for name, value in state_dict.items() if pattern.fullmatch(name)}
    return ours, {name: value for name, value in state_dict.items() if name not in ours}


def _by_layer(names: list[str]) -> list[str]:
    """Names that differ in the layer alone, as one: `model.layers.{0,1}.self_attn.path.conv`."""
    layers: dict[str, list[str]] = {}
    for match in map(_OURS_IN_HF.fullmatch, names):
        assert match
        layers.setdefault(match[2], []).append(match[1])
    return [
        f"model.layers.{{{','.join(sorted(held, key=int))}}}.self_attn.path.{parameter}"
        for parameter, held in layers.items()
    ]
