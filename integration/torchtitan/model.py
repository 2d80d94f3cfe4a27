"""A torchtitan model with its attention replaced, and the arguments that say how.

`args_with_attention` gives a flavor's arguments the values of `[model] attention` and
`[model.path]`, checked, and honest FLOPs.
`build_model` builds from them the stock model itself (`default`) or a subclass of it.
"""

import copy
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, make_dataclass
from typing import Any

import torch
from torchtitan.protocols.model import BaseModelArgs, ModelProtocol

from path_backend.flops import transform_flops
from path_backend.integration.data.tasks import training_task
from path_backend.integration.repairs import cpu
from path_backend.integration.torchtitan import refusals
from path_backend.layers.attention import PathAttention, document_start_from_eos
from path_backend.layers.projections import to_local
from path_backend.layers.variants import VARIANTS, Variant


def args_with_attention(stock: BaseModelArgs) -> "PathArgs":
    """A copy of a flavor's arguments that also takes `[model] attention` and `[model.path]`."""
    return _args_class(type(stock))(**copy.deepcopy(_values(stock, type(stock))))


def build_model(stock_cls: type[ModelProtocol], args: "PathArgs") -> ModelProtocol:
    """The stock model with stock arguments if `attention = "default"`, else one with our layers."""
    stock = args.attention == "default"
    cls = stock_cls if stock else _model_class(stock_cls)
    if args.weight_std is not None:
        cls = _normal_class(cls, args.weight_std)
    return cls(args.stock() if stock else args)


@dataclass
class PathArgs:
    """Mixed into the stock arguments of a flavor; what stock code reads there stays in place."""

    attention: str = "default"
    path: Any = None  # job_config.Path; None for "default"
    watch: bool = False  # keep statistics for the metrics logger
    weight_std: float | None = None  # of every linear and embedding weight; None is the model's own

    def update_from_config(self, job_config, **kwargs) -> None:
        self.attention = getattr(job_config.model, "attention", "default")
        if self.attention not in VARIANTS:
            raise ValueError(
                f"model.attention must be one of {', '.join(VARIANTS)}, got {self.attention!r}"
            )
        cpu.use_native_precision(job_config)
        if not self.variant.is_stock:
            self.attn_type = "sdpa"  # the flavor's own may refuse context parallelism
        super().update_from_config(job_config, **kwargs)
        task = training_task(job_config)
        if task is not None:
            self.vocab_size = len(task.vocabulary)
        if self.attention != "default":
            self.path = job_config.model.path
            self.watch = job_config.metrics.enable_tensorboard or job_config.metrics.enable_wandb
            # The trainer asks the model for masks only if it reads "flex" here.
            self.attn_type = "flex" if self.document_mask else "sdpa"
        refusals.check_job(self, job_config)
        if self.attention == "default":
            return
        for quantized in (job_config.quantize.linear.float8, job_config.quantize.linear.mx):
            quantized.filter_fqns = [*quantized.filter_fqns, "attention.path."]

    def get_nparams_and_flops(self, model: torch.nn.Module, seq_len: int) -> tuple[int, int]:
        n_params, flops = super().get_nparams_and_flops(model, seq_len)
        if self.reflections:
            # backward is two forwards, as torchtitan counts
            flops += (
                3
                * self.n_layers
                * transform_flops(self.n_heads, self.kv_heads, self.head_size, seq_len)
            )
        return n_params, flops

    def stock(self) -> BaseModelArgs:
        """These arguments as an instance of the stock class."""
        stock_cls = next(c for c in type(self).__mro__ if not issubclass(c, PathArgs))
        return stock_cls(**_values(self, stock_cls))

    @property
    def variant(self) -> Variant:
        return VARIANTS[self.attention]

    @property
    def document_mask(self) -> bool:
        flavor_mask = getattr(self, "attn_mask_type", "causal")
        return self.path.document_mask or flavor_mask == "block_causal"

    @property
    def reflections(self) -> bool:
        return self.variant.reflections

    @property
    def kv_heads(self):
        return getattr(self, "n_kv_heads", None) or self.n_heads

    @property
    def head_size(self):
        return getattr(self, "head_dim", self.dim // self.n_heads)


class TitanAttention(PathAttention):
    """`PathAttention` with the signature and the initialisation of a torchtitan attention."""

    def __init__(self, stock: torch.nn.Module, **options):
        missing = [
            name for name in ("wq", "wk", "wv", "wo", "head_dim") if not hasattr(stock, name)
        ]
        if missing:
            raise TypeError(
                "block.attention must have wq, wk, wv, wo and head_dim to be replaced: "
                f"{type(stock).__module__}.{type(stock).__name__} lacks {', '.join(missing)}"
            )
        super().__init__(
            stock.wq,
            stock.wk,
            stock.wv,
            stock.wo,
            head_dim=stock.head_dim,
            q_norm=getattr(stock, "q_norm", None),
            k_norm=getattr(stock, "k_norm", None),
            **options,
        )
        self._init_stock_weights = type(stock).init_weights
        self._rotary = _rotary_function(stock) if self.rope else None

    def init_weights(self, init_std: float) -> None:
        self._init_stock_weights(self, init_std)
        self.path.init_weights()

    def forward(self, x, freqs_cis, attention_masks, positions=None) -> torch.Tensor:
        """`attention_masks` is document_start [B, T] int32 or None. RoPE's table and positions are
        used with `rope` alone.
        """
        if self._rotary is None:
            return super().forward(x, attention_masks)
        rotate = functools.partial(self._rotate, to_local(freqs_cis), positions)
        return super().forward(x, attention_masks, rotate=rotate)

    def _rotate(self, table, positions, x, y):
        return self._rotary(x, y, table, positions)


def _rotary_function(stock: torch.nn.Module) -> Callable:
    """Returns the host's own rotation of two tensors by a table and positions.

    The attention of torchtitan's models calls it by one name, whatever its scaling and the order of
    its channels are.
    """
    name = "apply_rotary_emb"
    module = sys.modules[type(stock).__module__]
    if not hasattr(module, name):
        raise ValueError(
            f"model.path.rope = true needs an attention whose module has {name}, "
            f"got none in {module.__name__}"
        )
    return getattr(module, name)


@functools.cache
def _args_class(stock_cls: type[BaseModelArgs]) -> type:
    return make_dataclass(f"Path{stock_cls.__name__}", (), bases=(PathArgs, stock_cls))


def _values(args: BaseModelArgs, cls: type) -> dict[str, Any]:
    return {f.name: getattr(args, f.name) for f in fields(cls)}


@functools.cache
def _model_class(stock_cls: type[ModelProtocol]) -> type[ModelProtocol]:
    """Subclass of a stock model that has `TitanAttention` in every block."""

    class PathModel(stock_cls):
        def __init__(self, args: PathArgs):
            stock_args = copy.copy(args)
            stock_args.attn_type = "sdpa"  # stock code meets no mask but ours
            super().__init__(stock_args)
            self.document_mask = args.document_mask
            options = {
                name: getattr(args.path, name)
                for name in (
                    *("w_rank", "conv_width", "beta_max", "beta_start"),
                    *("gate_scale", "gate_start", "rope", "implementation"),
                )
            }
            for block in self.layers.values():
                block.attention = TitanAttention(
                    block.attention, watch=args.watch, **args.variant.options, **options
                )

        def init_weights(self, buffer_device: torch.device | None = None) -> None:
            super().init_weights(buffer_device=buffer_device)
            if buffer_device is not None:  # parameters are offloaded, buffers are not
                for block in self.layers.values():
                    for name, buffer in block.attention.path.named_buffers():
                        setattr(block.attention.path, name, buffer.to(buffer_device))

        def get_attention_masks(self, input_batch, tokenizer, extra_inputs=None) -> torch.Tensor:
            """document_start [B, T] int32 from tokens [B, T].

            Raises TypeError without document masks: the validator always asks and takes that as no.
            """
            if not self.document_mask:
                raise TypeError("model.path.document_mask is false")
            if tokenizer.eos_id is None:
                raise ValueError(
                    "model.path.document_mask needs a tokenizer with an end-of-text token, got none"
                )
            return document_start_from_eos(input_batch, tokenizer.eos_id)

    PathModel.__name__ = PathModel.__qualname__ = f"Path{stock_cls.__name__}"
    return PathModel


@functools.cache
def _normal_class(cls: type[ModelProtocol], std: float) -> type[ModelProtocol]:
    """Subclass of a model whose linear and embedding weights start as N(0, std)."""

    class NormalModel(cls):
        def init_weights(self, buffer_device: torch.device | None = None) -> None:
            super().init_weights(buffer_device=buffer_device)
            for module in self.modules():
                if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                    torch.nn.init.normal_(module.weight, std=std)

    NormalModel.__name__ = NormalModel.__qualname__ = cls.__name__
    return NormalModel
