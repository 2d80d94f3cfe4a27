"""What a TOML file names to use this package, and the keys it may then have.

    [job]
    custom_config_module = "path_backend.integration.job_config"

    [model]
    attention = "path"  # default, path, path_fox, fox

    [model.path]
    w_rank = 32

torchtitan imports this module while it parses the configuration and merges `JobConfig` into its
own. The import also does the rest: the train specs of llama3 and qwen3 are replaced by wrapped ones
(built when first used), the dataset `python_stdlib` is registered, and on a machine without an
accelerator the CPU takes its place.
"""

# No `from __future__ import annotations`: torchtitan merges dataclasses by their fields' types.
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from path_backend.beta import BETA_MAX
from path_backend.integration import cpu, dataset, train_spec

Attention = Literal["default", "path", "path_fox", "fox"]
Implementation = Literal["auto", "torch", "triton"]


class _NamedTable(type):
    """torchtitan reports an unknown key with the repr of the dataclass: make it list the keys."""

    def __repr__(cls) -> str:
        return f"[model.path] (keys: {', '.join(f.name for f in fields(cls))})"


@dataclass
class Path(metaclass=_NamedTable):
    w_rank: int = 32
    """
    Rank of the projection from the layer's input to w, the direction of each token's reflection.
    0 is full rank, usual in the paper's code for models with grouped key/value heads.
    """

    conv_width: int = 3
    """
    Tokens that the causal depthwise convolution on w sees, the current one included; 1 is none but
    a scale per channel. It never looks across the start of a document if documents are masked.
    """

    beta_max: float = BETA_MAX
    """
    Largest beta, in (0, 2]. beta = 2 sigmoid(logit) is clipped to it and to what keeps every
    I - beta w w^T a contraction for w as rounded. The default is the largest bf16 below 2.
    """

    gate_scale: float = 1.0
    """
    Factor on the sum of log forget gates in the logit (path_fox, fox). 1 is the Forgetting
    Transformer; head_dim**-0.5 reproduces a path_fox checkpoint of flash-linear-attention.
    """

    document_mask: bool = False
    """
    Whether attention stays inside documents, which end at the tokenizer's end-of-text token. Also
    on if the flavor's own mask is per document (attn_mask_type = "block_causal").
    """

    implementation: Implementation = "auto"
    """
    Which form of the operator runs: "triton" kernels, plain "torch", or "auto", which takes the
    kernels on CUDA wherever they cover the case.
    """

    def __post_init__(self):
        _require(type(self.w_rank) is int and self.w_rank >= 0, self, "w_rank", "an integer >= 0")
        _require(
            type(self.conv_width) is int and self.conv_width >= 1,
            self,
            "conv_width",
            "an integer >= 1",
        )
        _require(_is_number(self.beta_max, 0, 2), self, "beta_max", "a number in (0, 2]")
        _require(_is_number(self.gate_scale, 0, float("inf")), self, "gate_scale", "a number > 0")
        _require(type(self.document_mask) is bool, self, "document_mask", "true or false")
        _require(
            self.implementation in get_args(Implementation),
            self,
            "implementation",
            f"one of {', '.join(get_args(Implementation))}",
        )


@dataclass
class Model:
    attention: Attention = "default"
    """
    Attention of every layer: "default" is the model's own, untouched; "path" is PaTH; "path_fox" is
    PaTH with the forget gate of the Forgetting Transformer; "fox" is that gate alone.
    """

    path: Path = field(default_factory=Path)
    """Details of the attentions other than "default"."""


@dataclass
class JobConfig:
    model: Model = field(default_factory=Model)


def _require(valid: bool, table: Path, key: str, expected: str) -> None:
    if not valid:
        value: Any = getattr(table, key)
        raise ValueError(f"model.path.{key} must be {expected}, got {value!r}")


def _is_number(value: Any, above: float, up_to: float) -> bool:
    return type(value) in (int, float) and above < value <= up_to


cpu.activate_without_accelerator()
dataset.register()
train_spec.register()
