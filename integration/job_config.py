"""The module that a TOML file names to use this package, and the keys it may then have.

    [job]
    custom_config_module = "path_backend.integration.job_config"

    [model]
    attention = "path"  # default, path, path_fox, fox, nope, stick_breaking

    [model.path]
    w_rank = 32

    [task]  # for the datasets flip_flop, a5_word_problem, s5_swaps, mqrar
    seed = 0

torchtitan imports this module while it parses the configuration and merges `JobConfig` into its
own. The import also does the rest: the train specs of llama3 and qwen3 are replaced by wrapped ones
(built when first used), the dataset `python_stdlib` is registered, and on a machine without an
accelerator the CPU takes its place. Tables of a TOML file with our keys are checked as a whole.
"""

# No `from __future__ import annotations`: torchtitan merges dataclasses by their fields' types.
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from torchtitan.config import ConfigManager

from path_backend.beta import BETA_MAX
from path_backend.integration.data import text
from path_backend.integration.data.tasks import TaskConfig
from path_backend.integration.repairs import cpu
from path_backend.integration.torchtitan import train_spec
from path_backend.layers.variants import VARIANTS
from path_backend.tasks import FlipFlop, Mqrar

if TYPE_CHECKING:
    Attention = str
else:
    Attention = Literal.__getitem__(tuple(VARIANTS))
Implementation = Literal["auto", "torch", "triton"]
Sharing = Literal["pieces", "heads"]
MAX_CONV_WIDTH = 16  # every tap is one more pass over w; the paper uses 3


@dataclass
class Path:
    w_rank: int = 32
    """
    Rank of the projection from the layer's input to w, the direction of each token's reflection.
    0 is full rank, usual in the paper's code for models with grouped key/value heads. At most the
    model's dim.
    """

    conv_width: int = 3
    """
    Tokens that the causal depthwise convolution on w sees, the current one included, 16 at most;
    1 is none but a scale per channel. It never looks across the start of a document if documents
    are masked.
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

    gate_start: float = 0.5
    """
    What a forget gate keeps before training, in (0, 1): the sigmoid of its bias (path_fox, fox).
    0.5 hides what lies ten tokens back, so that a task whose first step needs more may not start.
    """

    beta_start: float = 1.0
    """
    What beta is before training, in (0, 2): twice the sigmoid of its bias (path, path_fox). Small
    values let a converted model begin where it was.
    """

    rope: bool = False
    """
    Whether the model's own rotation is multiplied in as well (path, path_fox, fox): q, k and w are
    rotated by their positions, so that transitions are R H_s. With beta near 0 and gates near 1
    this is the model's own attention, which is how a RoPE checkpoint becomes a PaTH model.
    """

    document_mask: bool = False
    """
    Whether attention stays inside documents, which end at the tokenizer's end-of-text token. Also
    on if the flavor's own mask is per document (attn_mask_type = "block_causal"), which is all that
    "default" looks at.
    """

    implementation: Implementation = "auto"
    """
    Which form of the operator runs: "triton" kernels, plain "torch", or "auto", which takes the
    kernels on CUDA wherever they cover the case.
    """

    context_parallel: Sharing = "pieces"
    """
    What each rank of context parallelism attends for. "pieces": its own tokens; keys and values of
    others come as parallelism.context_parallel_rotate_method says. "heads": its share of the heads,
    on whole sequences, for which tokens are exchanged before and after (Ulysses); the degree must
    divide the key/value heads of a tensor parallel rank, and a sequence must fit on one rank.
    """

    def __post_init__(self):
        _require(type(self.w_rank) is int and self.w_rank >= 0, self, "w_rank", "an integer >= 0")
        _require(
            type(self.conv_width) is int and 1 <= self.conv_width <= MAX_CONV_WIDTH,
            self,
            "conv_width",
            f"an integer from 1 to {MAX_CONV_WIDTH}",
        )
        _require(_is_number(self.beta_max, 0, 2), self, "beta_max", "a number in (0, 2]")
        _require(
            _is_number(self.gate_scale, 0, math.inf) and math.isfinite(self.gate_scale),
            self,
            "gate_scale",
            "a finite number > 0",
        )
        _require(
            _is_number(self.gate_start, 0, 1) and self.gate_start < 1,
            self,
            "gate_start",
            "a number in (0, 1)",
        )
        _require(
            _is_number(self.beta_start, 0, 2) and self.beta_start < 2,
            self,
            "beta_start",
            "a number in (0, 2)",
        )
        for key in ("rope", "document_mask"):
            _require(type(getattr(self, key)) is bool, self, key, "true or false")
        for key, choices in (("implementation", Implementation), ("context_parallel", Sharing)):
            names = get_args(choices)
            _require(getattr(self, key) in names, self, key, f"one of {', '.join(names)}")


@dataclass
class Model:
    attention: Attention = "default"
    """
    Attention of every layer: "default" is the model's own; "path" is PaTH; "path_fox" is
    PaTH with the forget gate of the Forgetting Transformer; "fox" is that gate alone. Baselines:
    "nope" has no positions at all, "stick_breaking" replaces the softmax (plain torch, T^2 memory).
    """

    path: Path = field(default_factory=Path)
    """Details of the attentions other than "default"."""


@dataclass
class JobConfig:
    model: Model = field(default_factory=Model)

    task: TaskConfig = field(default_factory=TaskConfig)
    """Seed and difficulty of the datasets flip_flop, a5_word_problem, s5_swaps and mqrar."""


_TABLES = {
    Path: "model.path",
    TaskConfig: "task",
    FlipFlop: "task.flip_flop",
    Mqrar: "task.mqrar",
}


def _require(valid: bool, table: Path, key: str, expected: str) -> None:
    if not valid:
        value: Any = getattr(table, key)
        raise ValueError(f"model.path.{key} must be {expected}, got {value!r}")


def _is_number(value: Any, above: float, up_to: float) -> bool:
    return type(value) in (int, float) and above < value <= up_to


def _check_tables() -> None:
    """Check our tables and [model] of a TOML file before torchtitan makes dataclasses of them.

    torchtitan 0.2.2 takes a plain value for a table and names unknown keys without their values.
    It reads tables with this method after it has imported this module.
    """
    stock: Callable = ConfigManager._dict_to_dataclass

    @functools.wraps(stock)
    def checked(self: ConfigManager, cls: type, data: dict[str, Any]) -> Any:
        if cls in _TABLES:
            _refuse_unknown(_TABLES[cls], cls, data)
        elif is_dataclass(cls) and any(f.type is Path for f in fields(cls)):
            _refuse_unknown("model", cls, data)
        for f in fields(cls) if is_dataclass(cls) else ():
            table = data.get(f.name, {})
            if f.type in _TABLES and not isinstance(table, dict):
                raise ValueError(
                    f"{_TABLES[f.type]} must be a table ({_keys(f.type)}), got {table!r}"
                )
        return stock(self, cls, data)

    ConfigManager._dict_to_dataclass = checked


def _refuse_unknown(name: str, cls: type, table: dict[str, Any]) -> None:
    known = {f.name for f in fields(cls)}
    unknown = [f"{name}.{key} = {value!r}" for key, value in table.items() if key not in known]
    if unknown:
        raise ValueError(f"[{name}] takes the {_keys(cls)}, got {', '.join(unknown)}")


def _keys(cls: type) -> str:
    return f"keys {', '.join(f.name for f in fields(cls))}"


_check_tables()
cpu.activate_without_accelerator()
text.register()
train_spec.register()
