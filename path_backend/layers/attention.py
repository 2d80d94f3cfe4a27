"""The attention layer of PaTH, PaTH-FoX, FoX and two baselines, for any host model (torch only).

B is batch, T tokens, HQ query heads, H key/value heads, D the head dimension. Under tensor
parallelism the parameters are DTensors and HQ and H are the heads of this rank. projections.py has
the parameters that PaTH adds. There is no output gate.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from path_backend.arguments import IMPLEMENTATIONS
from path_backend.attention import context_parallel_attention, path_attention
from path_backend.beta import BETA_MAX
from path_backend.layers.baselines import stick_breaking_attention
from path_backend.layers.elementwise import Rotate
from path_backend.layers.projections import INIT_STD, PathInputs, check_integer, to_local
from path_backend.layers.segmented import Segmented


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
        beta_start: beta before training, in (0, 2), by its bias. Small values leave the logits of a
            converted model as they were.
        rope: the transitions are R H_s with the host's rotation R, which `forward` is given: RoPE
            and reflections together. With beta = 0 and no gate this is the host's own attention.
        watch: keep statistics of the last training forward in `path.stats`.

    `reflections` without `forget_gate` is PaTH, both are PaTH-FoX, `forget_gate` alone is FoX, and
    none of the three is NoPE: causal attention that knows no positions. Raises ValueError if they
    or the head counts do not fit together, or a number is out of range.

    `segmented`, None at first, is set where sequences lie on several ranks: x then holds this
    rank's tokens, in the order of the layout.
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
        beta_start: float = 1.0,
        rope: bool = False,
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
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}"
            )
        if wv.out_features != wk.out_features:
            raise ValueError(
                f"wv.out_features must be those of wk, {wk.out_features}, got {wv.out_features}"
            )
        if rope and not (reflections or forget_gate):
            raise ValueError("rope = True needs reflections, a forget gate or both, got neither")
        if stick_breaking and (reflections or forget_gate):
            raise ValueError(
                "stick_breaking takes neither reflections nor a forget gate, got "
                f"reflections = {reflections}, forget_gate = {forget_gate}"
            )
        self.head_dim = head_dim
        self.rope = rope
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
            beta_start=beta_start,
            watch=watch,
        )
        self.inner_attention: nn.Module = (
            StickBreakingOperator() if stick_breaking else PathOperator(gate_scale, implementation)
        )
        self.segmented: Segmented | None = None

    @classmethod
    def from_sizes(
        cls,
        dim: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        qk_norm: bool = False,
        **options: Any,
    ) -> Self:
        """Returns a layer with projections of its own, without biases.

        n_kv_heads is n_heads and head_dim is dim // n_heads by default; qk_norm adds an RMSNorm of
        each head of q and k. options are those of the constructor. Weights are drawn.
        """
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        sizes = {"dim": dim, "n_heads": n_heads, "n_kv_heads": n_kv_heads}
        for name, value in sizes.items():
            check_integer(name, value, 1)
        if head_dim is None and dim % n_heads:
            raise ValueError(f"n_heads must divide dim = {dim} without a head_dim, got {n_heads}")
        head_dim = dim // n_heads if head_dim is None else head_dim
        check_integer("head_dim", head_dim, 1)
        layer = cls(
            nn.Linear(dim, n_heads * head_dim, bias=False),
            nn.Linear(dim, n_kv_heads * head_dim, bias=False),
            nn.Linear(dim, n_kv_heads * head_dim, bias=False),
            nn.Linear(n_heads * head_dim, dim, bias=False),
            head_dim=head_dim,
            q_norm=nn.RMSNorm(head_dim) if qk_norm else None,
            k_norm=nn.RMSNorm(head_dim) if qk_norm else None,
            **options,
        )
        layer.init_weights()
        return layer

    def init_weights(self, init_std: float = INIT_STD) -> None:
        """Draw every parameter: N(0, 0.02), `wo` N(0, init_std), biases 0, the gate's its start."""
        for linear in (self.wq, self.wk, self.wv):
            nn.init.normal_(linear.weight, std=INIT_STD)
        nn.init.normal_(self.wo.weight, std=init_std)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()
        self.path.init_weights()

    def forward(
        self,
        x: torch.Tensor,
        document_start: torch.Tensor | None = None,
        *,
        rotate: Rotate | None = None,
    ) -> torch.Tensor:
        """Returns attention [B, T, dim] of x [B, T, dim], T >= 1.

        document_start: [B, T] int32 or None; it counts from the first token of the sequence, also
            where x is a part of it.
        rotate: the host's rotation of two tensors [B, T, heads, D] by the positions of x's tokens,
            which keeps their dtypes; with `rope` only.
        """
        features = self.wq.in_features
        if x.ndim != 3 or x.shape[1] < 1 or x.shape[2] != features:
            raise ValueError(
                f"x must have shape [B, T, {features}] with T >= 1, got {list(x.shape)}"
            )
        if self.rope != (rotate is not None):
            expected = "the host's rotation" if self.rope else "None"
            raise ValueError(f"rotate must be {expected} with rope = {self.rope}, got {rotate}")
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
        q, k, v = to_local(q), to_local(k), to_local(v)
        # Under autocast a norm returns fp32, and the operator takes one dtype.
        q, k = q.to(v.dtype), k.to(v.dtype)
        if rotate is not None:
            q, k = rotate(q, k)
        w, beta, log_gate = self.path(x, document_start, v.dtype, self.segmented, rotate)
        out = self.inner_attention(
            q,
            k,
            v,
            w=w,
            beta=beta,
            log_gate=log_gate,
            document_start=document_start,
            segmented=self.segmented,
        )
        return self.wo(out.reshape(batch, length, -1))


class PathOperator(nn.Module):
    """`path_attention`, or `context_parallel_attention` of segmented, as a module."""

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
        segmented: Segmented | None = None,
    ) -> torch.Tensor:
        attend: Callable[..., torch.Tensor] = path_attention
        if segmented is not None:
            attend = partial(
                context_parallel_attention,
                layout=segmented.known_layout(),
                group=segmented.group,
                exchange=segmented.exchange,
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
        segmented: Segmented | None = None,
    ) -> torch.Tensor:
        if segmented is not None:
            raise NotImplementedError(
                "stick_breaking_attention does not take segmented of sequences"
            )
        return stick_breaking_attention(q, k, v, document_start=document_start)


def document_start_from_eos(tokens: torch.Tensor, eos_id: int) -> torch.Tensor:
    """Index of the first token of every token's document, [B, T] int32, from tokens [B, T].

    An end-of-text token is the last of its document.
    """
    position = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    first = torch.zeros_like(tokens, dtype=torch.bool)
    first[:, 1:] = tokens[:, :-1] == eos_id
    return torch.where(first, position, 0).cummax(dim=1).values.to(torch.int32)


def _heads(features: int, head_dim: int, name: str) -> int:
    check_integer("head_dim", head_dim, 1)
    if features % head_dim:
        raise ValueError(
            f"{name}.out_features must be a multiple of head_dim = {head_dim}, got {features}"
        )
    return features // head_dim
