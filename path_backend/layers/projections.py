"""Projections of a layer's input to what the operator needs besides q, k, v: w, beta, gates.

    w    = l2norm(silu(conv(W_up W_down x)))    one unit vector per token and key/value head
    beta = 2 sigmoid(W_beta x + b_beta)         one scalar per token and key/value head
    g    = log sigmoid(W_gate x + b_gate)       one scalar per token and query head

Source: PaTH Attention (NeurIPS 2025), section 2.2, and its public code for the constants: rank 32,
depthwise causal convolution of width 3 without bias, eps 1e-6.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from path_backend.beta import BETA_MAX, check_beta_max
from path_backend.context_parallel.halo import halo
from path_backend.layers import elementwise
from path_backend.layers.elementwise import BETA_STATS, GATE_STATS, Rotate, causal_conv
from path_backend.layers.segmented import Segmented
from path_backend.precision import at_least_float32, without_autocast

INIT_STD = 0.02


class PathInputs(nn.Module):
    """Computes w, beta and log_gate of every token, which the operator needs besides q, k, v."""

    stats: torch.Tensor  # of the last training forward, named by stat_names

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        *,
        reflections: bool,
        forget_gate: bool,
        w_rank: int = 32,
        conv_width: int = 3,
        beta_max: float = BETA_MAX,
        gate_start: float = 0.5,
        beta_start: float = 1.0,
        watch: bool = False,
    ):
        super().__init__()
        if n_heads % n_kv_heads:
            raise ValueError(
                f"query heads must be a multiple of key/value heads, got {n_heads} and {n_kv_heads}"
            )
        check_integer("w_rank", w_rank, 0)
        if reflections and w_rank > dim:
            raise ValueError(f"w_rank must be at most {dim}, the features of x, got {w_rank}")
        check_beta_max(beta_max)
        if not 0 < gate_start < 1:
            raise ValueError(f"gate_start must be in (0, 1), got {gate_start}")
        if not 0 < beta_start < 2:
            raise ValueError(f"beta_start must be in (0, 2), got {beta_start}")
        self.head_dim = head_dim
        self.beta_max = beta_max
        self.gate_start = gate_start
        self.beta_start = beta_start
        self.w_down: nn.Linear | None = None
        self.w_up: nn.Linear | None = None
        self.conv: ShortConv | None = None
        self.beta: Float32Linear | None = None
        self.gate: Float32Linear | None = None
        if reflections:
            if w_rank:
                self.w_down = nn.Linear(dim, w_rank, bias=False)
            self.w_up = nn.Linear(w_rank or dim, n_kv_heads * head_dim, bias=False)
            self.conv = ShortConv(n_kv_heads * head_dim, conv_width)
            self.beta = Float32Linear(dim, n_kv_heads)
        if forget_gate:
            self.gate = Float32Linear(dim, n_heads)
        self.stat_names: tuple[str, ...] = ()
        if watch:
            self.stat_names += BETA_STATS if reflections else ()
            self.stat_names += GATE_STATS if forget_gate else ()
            stats = torch.zeros(len(self.stat_names), dtype=torch.float32)
            self.register_buffer("stats", stats, persistent=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Draws weights from N(0, 0.02); biases give beta and gates their starts."""
        for module in (self.w_down, self.w_up, self.conv, self.beta, self.gate):
            if module is not None:
                nn.init.normal_(module.weight, std=INIT_STD)
        if self.beta is not None:
            nn.init.constant_(self.beta.bias, _logit(self.beta_start / 2))
        if self.gate is not None:
            nn.init.constant_(self.gate.bias, _logit(self.gate_start))
        if self.stat_names:
            self.stats.zero_()

    def forward(
        self,
        x: torch.Tensor,
        document_start: torch.Tensor | None,
        dtype: torch.dtype,
        segmented: Segmented | None = None,
        rotate: Rotate | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """x [B, T, dim] -> w [B, T, H, D] in `dtype`, beta [B, T, H] and log_gate [B, T, HQ] fp32.

        Absent parts are None. fp64 inputs stay fp64. rotate is applied to the unit vectors w.
        """
        w = taps = None
        if self.w_up is not None:
            w = self.w_up(x if self.w_down is None else self.w_down(x))
        with without_autocast(x):
            if self.conv is not None and w is not None:
                if segmented is None and _is_plain(self.conv):
                    taps = to_local(self.conv.weight)
                else:
                    w = self.conv(w, document_start, segmented)
            layers = [layer for layer in (self.beta, self.gate) if layer is not None]
            logits = _float32_linears(x, layers)
            w, beta, log_gate, stats = elementwise.run(
                w,
                taps,
                logits[0] if self.beta is not None else None,
                logits[-1] if self.gate is not None else None,
                document_start,
                head_dim=self.head_dim,
                beta_max=self.beta_max,
                dtype=dtype,
                watch=bool(self.stat_names) and self.training,
                rotate=rotate,
            )
        if stats is not None:  # the same again if a checkpointed layer is computed again
            self.stats.copy_(stats)
        return w, beta, log_gate


class ShortConv(nn.Module):
    """Depthwise causal convolution over tokens, weight [channels, width], no bias."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        check_integer("conv_width", width, 1)
        self.weight = nn.Parameter(torch.empty(channels, width))

    def forward(
        self,
        x: torch.Tensor,
        document_start: torch.Tensor | None = None,
        segmented: Segmented | None = None,
    ) -> torch.Tensor:
        weight = to_local(self.weight)
        if segmented is None:
            return causal_conv(x, weight, document_start)
        return _conv_of_segments(x, weight, document_start, segmented)


def _conv_of_segments(
    x: torch.Tensor, weight: torch.Tensor, document_start: torch.Tensor | None, segmented: Segmented
) -> torch.Tensor:
    """`causal_conv` of sequences of which x and document_start [B, T] are this rank's tokens."""
    layout, rows = segmented.known_layout(), weight.shape[1] - 1
    cut = (-1, layout.length)
    history = None
    if rows:
        history = halo(x, rows, layout, segmented.group).flatten(0, 1)
    if document_start is not None:
        segments = document_start.unflatten(1, cut).unbind(1)
        starts = layout.starts[segmented.group.rank()]
        relative = [segment - start for segment, start in zip(segments, starts, strict=True)]
        document_start = torch.stack(relative, dim=1).flatten(0, 1)
    out = causal_conv(x.unflatten(1, cut).flatten(0, 1), weight, document_start, history)
    return out.view(x.shape)


class Float32Linear(nn.Linear):
    """A small linear layer computed in fp32 (fp64 for fp64 inputs) whatever dtype its weight has.

    beta and the gate act through sums over thousands of tokens, where bf16 logits would show.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with without_autocast(x):
            x = at_least_float32(x)
            return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


def _float32_linears(x: torch.Tensor, layers: list[Float32Linear]) -> Sequence[torch.Tensor]:
    """Returns each layer's output, by one product: x is read once, and so is its gradient.

    Layers cut by heads (DTensors), and those that a host wraps, works on with hooks or replaced,
    are called one by one.
    """
    if not layers:
        return []
    x = at_least_float32(x)
    whole = (_is_plain(layer) and not isinstance(layer.weight, DTensor) for layer in layers)
    if len(layers) < 2 or not all(whole):
        return [layer(x) for layer in layers]
    weight = torch.cat([layer.weight for layer in layers]).to(x.dtype)
    bias = torch.cat([layer.bias for layer in layers]).to(x.dtype)
    return F.linear(x, weight, bias).split([layer.out_features for layer in layers], dim=-1)


def _is_plain(layer: nn.Module) -> bool:
    """Whether a call of the layer is its own forward and no more."""
    hooks = (
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or nn.modules.module._has_any_global_hook()
    )
    own = type(layer) in (Float32Linear, ShortConv) and "forward" not in vars(layer)
    return own and not hooks


def check_integer(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _logit(share: float) -> float:
    """Returns the number whose sigmoid is `share`."""
    return math.log(share / (1 - share))
