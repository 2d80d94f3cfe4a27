"""The attention layer of PaTH, PaTH-FoX, FoX and two baselines, for any host model (torch only).

    w    = l2norm(silu(conv(W_up W_down x)))    one unit vector per token and key/value head
    beta = 2 sigmoid(W_beta x + b_beta)         one scalar per token and key/value head
    g    = log sigmoid(W_gate x + b_gate)       one scalar per token and query head

Source: PaTH Attention (NeurIPS 2025), section 2.2, and its public code for the constants: rank 32,
depthwise causal convolution of width 3 without bias, eps 1e-6. No RoPE, no output gate.

B is batch, T tokens, HQ query heads, H key/value heads, D the head dimension. Under tensor
parallelism the parameters are DTensors and HQ and H are the heads of this rank.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from path_backend.attention import context_parallel_attention, path_attention
from path_backend.beta import BETA_MAX
from path_backend.context_parallel.halo import halo
from path_backend.context_parallel.layout import Layout
from path_backend.layers import elementwise
from path_backend.layers.baselines import stick_breaking_attention
from path_backend.layers.elementwise import BETA_STATS, GATE_STATS, at_least_float32, causal_conv

INIT_STD = 0.02


@dataclass
class Shards:
    """Sequences that lie on several ranks (context parallelism).

    Args:
        group: the ranks.
        exchange: how keys and values travel, as in `context_parallel_attention`.
        layout: which tokens each rank has. To be set before a forward.
    """

    group: dist.ProcessGroup
    exchange: str = "allgather"
    layout: Layout | None = None


class PathAttention(nn.Module):
    """Attention over projections of a host model: PaTH, PaTH-FoX, FoX, NoPE or stick-breaking.

    `wq`, `wk`, `wv`, `wo` are linear layers to HQ*D, H*D, H*D features and back to those of x;
    `q_norm` and `k_norm`, if the host has them, act on [B, T, heads, D] before the reflections.

    Args:
        reflections: multiply the reflections H_s = I - beta_s w_s w_s^T between query and key.
        forget_gate: add the sum of log forget gates between them to the logit.
        stick_breaking: stick-breaking attention instead of a softmax; takes neither of the two.
        w_rank: rank of the projection to w; 0 is full rank.
        conv_width: tokens that the causal convolution on w sees, the current one included.
        beta_max, gate_scale, implementation: as in `beta_from_logits` and `path_attention`.
        gate_start: what a forget gate keeps before training, in (0, 1): the sigmoid of its bias.
        watch: keep statistics of the last training forward in `path.stats`.

    `reflections` without `forget_gate` is PaTH, both are PaTH-FoX, `forget_gate` alone is FoX, and
    none of the three is NoPE: causal attention that knows no positions. Raises ValueError if they
    or the head counts do not fit together, or a number is out of range.

    `shards`, None at first, is set where sequences lie on several ranks: x then holds this rank's
    tokens, in the order of the layout.
    """

    def __init__(
        self,
        wq: nn.Linear,
        wk: nn.Linear,
        wv: nn.Linear,
        wo: nn.Linear,
        *,
        head_dim: int,
        reflections: bool = True,
        forget_gate: bool = False,
        stick_breaking: bool = False,
        w_rank: int = 32,
        conv_width: int = 3,
        beta_max: float = BETA_MAX,
        gate_scale: float = 1.0,
        gate_start: float = 0.5,
        implementation: str = "auto",
        q_norm: nn.RMSNorm | None = None,
        k_norm: nn.RMSNorm | None = None,
        watch: bool = False,
    ):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = wq, wk, wv, wo
        self.q_norm, self.k_norm = q_norm, k_norm
        if not math.isfinite(gate_scale):
            raise ValueError(f"gate_scale must be finite, got {gate_scale}")
        if stick_breaking and (reflections or forget_gate):
            raise ValueError(
                "stick_breaking takes neither reflections nor a forget gate, got "
                f"reflections = {reflections}, forget_gate = {forget_gate}"
            )
        self.head_dim = head_dim
        self.path = PathInputs(
            wq.in_features,
            _heads(wq.out_features, head_dim, "wq"),
            _heads(wk.out_features, head_dim, "wk"),
            head_dim,
            reflections=reflections,
            forget_gate=forget_gate,
            w_rank=w_rank,
            conv_width=conv_width,
            beta_max=beta_max,
            gate_start=gate_start,
            watch=watch,
        )
        self.inner_attention: nn.Module = (
            StickBreakingOperator() if stick_breaking else PathOperator(gate_scale, implementation)
        )
        self.shards: Shards | None = None

    def init_weights(self, init_std: float = INIT_STD) -> None:
        """Draw every parameter: N(0, 0.02), `wo` N(0, init_std), biases 0, the gate's its start."""
        for linear in (self.wq, self.wk, self.wv):
            nn.init.normal_(linear.weight, std=INIT_STD)
        nn.init.normal_(self.wo.weight, std=init_std)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()
        self.path.init_weights()

    def forward(self, x: torch.Tensor, document_start: torch.Tensor | None = None) -> torch.Tensor:
        """x [B, T, dim], document_start [B, T] int32 or None -> [B, T, dim].

        document_start counts from the first token of the sequence, also where x is a part of it.
        """
        batch, length, _ = x.shape
        if document_start is not None and document_start.shape != (batch, length):
            raise ValueError(
                f"document_start must have shape [B, T] = {[batch, length]}, "
                f"got {list(document_start.shape)}"
            )
        q, k, v = (
            linear(x).view(batch, length, -1, self.head_dim)
            for linear in (self.wq, self.wk, self.wv)
        )
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        q, k, v = _local(q), _local(k), _local(v)
        # Under autocast a norm returns fp32, and the operator takes one dtype.
        q, k = q.to(v.dtype), k.to(v.dtype)
        w, beta, log_gate = self.path(x, document_start, v.dtype, self.shards)
        out = self.inner_attention(
            q,
            k,
            v,
            w=w,
            beta=beta,
            log_gate=log_gate,
            document_start=document_start,
            shards=self.shards,
        )
        return self.wo(out.reshape(batch, length, -1))


class PathOperator(nn.Module):
    """`path_attention`, or `context_parallel_attention` of shards, as a module."""

    def __init__(self, gate_scale: float, implementation: str):
        super().__init__()
        self.gate_scale = gate_scale
        self.implementation = implementation

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        w: torch.Tensor | None,
        beta: torch.Tensor | None,
        log_gate: torch.Tensor | None,
        document_start: torch.Tensor | None,
        shards: Shards | None = None,
    ) -> torch.Tensor:
        attend: Callable[..., torch.Tensor] = path_attention
        if shards is not None:
            attend = partial(
                context_parallel_attention,
                layout=_layout(shards),
                group=shards.group,
                exchange=shards.exchange,
            )
        return attend(
            q,
            k,
            v,
            w,
            beta,
            log_gate,
            document_start=document_start,
            gate_scale=1.0 if log_gate is None else self.gate_scale,
            implementation=self.implementation,
        )


class StickBreakingOperator(nn.Module):
    """`stick_breaking_attention` in the place of `PathOperator`; w, beta and log_gate are None."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        w: None,
        beta: None,
        log_gate: None,
        document_start: torch.Tensor | None,
        shards: Shards | None = None,
    ) -> torch.Tensor:
        if shards is not None:
            raise NotImplementedError("stick_breaking_attention does not take shards of sequences")
        return stick_breaking_attention(q, k, v, document_start=document_start)


class PathInputs(nn.Module):
    """What the operator needs besides q, k, v: w, beta and log_gate of every token."""

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
        watch: bool = False,
    ):
        super().__init__()
        if n_heads % n_kv_heads:
            raise ValueError(
                f"query heads must be a multiple of key/value heads, got {n_heads} and {n_kv_heads}"
            )
        _whole("w_rank", w_rank, 0)
        if not 0 < beta_max <= 2:
            raise ValueError(f"beta_max must be in (0, 2], got {beta_max}")
        if not 0 < gate_start < 1:
            raise ValueError(f"gate_start must be in (0, 1), got {gate_start}")
        self.head_dim = head_dim
        self.beta_max = beta_max
        self.gate_start = gate_start
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
        """N(0, 0.02) for weights, 0 for the bias of beta and statistics, `gate_start` for gates."""
        for module in (self.w_down, self.w_up, self.conv, self.beta, self.gate):
            if module is not None:
                nn.init.normal_(module.weight, std=INIT_STD)
        if self.beta is not None:
            nn.init.zeros_(self.beta.bias)
        if self.gate is not None:
            nn.init.constant_(self.gate.bias, math.log(self.gate_start / (1 - self.gate_start)))
        if self.stat_names:
            self.stats.zero_()

    def forward(
        self,
        x: torch.Tensor,
        document_start: torch.Tensor | None,
        dtype: torch.dtype,
        shards: Shards | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """x [B, T, dim] -> w [B, T, H, D] in `dtype`, beta [B, T, H] and log_gate [B, T, HQ] fp32.

        Absent parts are None. fp64 inputs stay fp64.
        """
        w = taps = None
        if self.w_up is not None:
            w = self.w_up(x if self.w_down is None else self.w_down(x))
        with torch.autocast(x.device.type, enabled=False):
            if self.conv is not None and w is not None:
                if shards is None and _is_plain(self.conv):
                    taps = _local(self.conv.weight)
                else:
                    w = self.conv(w, document_start, shards)
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
            )
        if stats is not None:  # the same again if a checkpointed layer is computed again
            self.stats.copy_(stats)
        return w, beta, log_gate


class ShortConv(nn.Module):
    """Depthwise causal convolution over tokens, weight [channels, width], no bias."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        _whole("conv_width", width, 1)
        self.weight = nn.Parameter(torch.empty(channels, width))

    def forward(
        self,
        x: torch.Tensor,
        document_start: torch.Tensor | None = None,
        shards: Shards | None = None,
    ) -> torch.Tensor:
        weight = _local(self.weight)
        if shards is None:
            return causal_conv(x, weight, document_start)
        return _conv_of_shards(x, weight, document_start, shards)


def _conv_of_shards(
    x: torch.Tensor, weight: torch.Tensor, document_start: torch.Tensor | None, shards: Shards
) -> torch.Tensor:
    """`causal_conv` of sequences of which x and document_start [B, T] are this rank's tokens."""
    layout, rows = _layout(shards), weight.shape[1] - 1
    cut = (-1, layout.length)
    history = None
    if rows:
        history = halo(x, rows, layout, shards.group).flatten(0, 1)
    if document_start is not None:
        pieces = document_start.unflatten(1, cut).unbind(1)
        starts = layout.starts[shards.group.rank()]
        relative = [piece - start for piece, start in zip(pieces, starts, strict=True)]
        document_start = torch.stack(relative, dim=1).flatten(0, 1)
    out = causal_conv(x.unflatten(1, cut).flatten(0, 1), weight, document_start, history)
    return out.view(x.shape)


class Float32Linear(nn.Linear):
    """A small linear layer computed in fp32 (fp64 for fp64 inputs) whatever dtype its weight has.

    beta and the gate act through sums over thousands of tokens, where bf16 logits would show.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x = at_least_float32(x)
            return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


def _float32_linears(x: torch.Tensor, layers: list[Float32Linear]) -> Sequence[torch.Tensor]:
    """What each layer makes of x, in one product: x is read once, and so is its gradient.

    Layers cut into shards of heads (DTensors), and those that a host wraps, works on with hooks or
    replaced, are called one by one.
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


def document_start_from_eos(tokens: torch.Tensor, eos_id: int) -> torch.Tensor:
    """Index of the first token of every token's document, [B, T] int32, from tokens [B, T].

    An end-of-text token is the last of its document.
    """
    position = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    first = torch.zeros_like(tokens, dtype=torch.bool)
    first[:, 1:] = tokens[:, :-1] == eos_id
    return torch.where(first, position, 0).cummax(dim=1).values.to(torch.int32)


def _layout(shards: Shards) -> Layout:
    if shards.layout is None:
        raise ValueError("shards.layout must be set before a forward, got None")
    return shards.layout


def _whole(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value}")


def _heads(features: int, head_dim: int, name: str) -> int:
    _whole("head_dim", head_dim, 1)
    if features % head_dim:
        raise ValueError(
            f"{name}.out_features must be a multiple of head_dim = {head_dim}, got {features}"
        )
    return features // head_dim


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
