"""Floating-point operations of the operator, for MFU and for torch's FlopCounterMode.

A multiply-add is two operations. Attention counts as torch counts causal attention: as if every
query met every key.
"""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import register_flop_formula

from path_backend.kernels.constants import CHUNK


def transform_flops(n_heads: int, n_kv_heads: int, head_dim: int, seq_len: int) -> int:
    """Returns the operations per token and layer that reflections add to attention, forward.

    Triangles count as squares. With C tokens a chunk and D = head_dim:

        query head      Q W^T, (low X^T) W          4 C D
                        low X^T, its product with up^T      4 C^2
                        one P per level, half of the tokens     D^2 levels
        key/value head  W W^T, K W^T, (up X) W, X W     8 C D
                        up X                        2 C^2
                        W^T (X W)                   2 D^2
                        one P per level, half of the tokens     D^2 levels
                        P P per block of each level     2 D^3 / C (1 - 2^-levels)

    The triangular solve for X, C^2 / 3, is left out.
    """
    C, D = CHUNK, head_dim
    chunks = -(-seq_len // C)
    levels = (chunks - 1).bit_length()
    query_head = 4 * C * D + 4 * C**2 + D**2 * levels
    products = 2 * D**3 * (2**levels - 1) // (C * 2**levels)
    key_head = 8 * C * D + 2 * C**2 + 2 * D**2 + D**2 * levels + products
    return n_heads * query_head + n_kv_heads * key_head


def forward_flops(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], reflections: bool, seq_len: int
) -> int:
    """Returns the operations of a forward call on shapes of q [B, T, HQ, D], k, v, whose tokens
    meet the keys of a sequence of seq_len.
    """
    B, T, HQ, D = q
    attention = 2 * HQ * seq_len * (D + v[3])
    return B * T * (attention + (transform_flops(HQ, k[2], D, seq_len) if reflections else 0))


def register(ops: Any) -> None:
    """Registers the operator's formulas. The backward is two and a half times the attention (its
    logits are computed again) and twice the transform, as torch counts its own.
    """

    @register_flop_formula(ops.attention)
    def forward(q: Any, k: Any, v: Any, w: Any, *args: Any, **kwargs: Any) -> int:
        return forward_flops(q, k, v, w is not None, q[1])

    @register_flop_formula(ops.attention_backward)
    def backward(d_out: Any, q: Any, k: Any, v: Any, w: Any, *args: Any, **kwargs: Any) -> int:
        return backward_flops(q, k, v, w is not None, q[1])

    @register_flop_formula(ops.context_parallel_attention)
    def shared(q: Any, k: Any, v: Any, w: Any, *args: Any, **kwargs: Any) -> int:
        return forward_flops(q, k, v, w is not None, _whole_length(args))

    @register_flop_formula(ops.context_parallel_attention_backward)
    def shared_backward(d: Any, q: Any, k: Any, v: Any, w: Any, *args: Any, **kwargs: Any) -> int:
        return backward_flops(q, k, v, w is not None, _whole_length(args[2:]))


def backward_flops(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], reflections: bool, seq_len: int
) -> int:
    """Returns the operations of a backward call: see `register`."""
    attention = forward_flops(q, k, v, False, seq_len)
    transform = forward_flops(q, k, v, reflections, seq_len) - attention
    return attention * 5 // 2 + 2 * transform


def _whole_length(args: tuple) -> int:
    """Returns the tokens of the whole sequence; args are beta, log_gate and what follows them."""
    starts, length = args[3:5]
    return len(starts) * length
