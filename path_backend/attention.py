"""The public function: checks a call, fills in its defaults, and hands it to the op."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad

from path_backend import ops
from path_backend.sharded import Inputs

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def path_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None = None,
    beta: Tensor | None = None,
    log_gate: Tensor | None = None,
    *,
    scale: float | None = None,
    document_start: Tensor | None = None,
    gate_scale: float = 1.0,
    implementation: str = "auto",
) -> Tensor:
    """Causal attention whose positions are products of Householder-like reflections.

        H_s      = I - beta_s w_s w_s^T
        logit_ij = scale * k_j^T H_{j+1} ... H_i q_i + gate_scale * (G_i - G_j),   j <= i
        o_i      = sum_j softmax_j(logit_ij) v_j,                 G = cumsum(log_gate)

    Args:
        q: [B, T, HQ, D], any T >= 1 and D >= 1.
        k: [B, T, H, D]. H divides HQ; query head h reads key/value head h // (HQ // H).
        v: [B, T, H, DV].
        w: [B, T, H, D], used as given: PaTH wants unit vectors (normalised in fp32, then cast).
            None, together with beta: no reflections.
        beta: [B, T, H], any floating dtype, taken as fp32 (fp64 if q is fp64). Used as given:
            `beta_from_logits` gives one in [0, 2) that keeps the products contractive. The kernels
            need that of 16-bit inputs, |1 - beta |w|^2| <= 1: they hold products in fp16.
        log_gate: [B, T, HQ], natural logarithm of the forget gate, finite and <= 0, in any floating
            dtype, taken as fp32 (fp64 if q is fp64). Less than -354 (2^-512) is taken for that.
            None: no gate.
        scale: of the dot products, default D^-0.5. The gate is added after it.
        document_start: int32 [B, T], index of the first token of each token's document. Keys before
            it are masked; the reflections need no reset. None: one document.
        gate_scale: factor on the gate. flash-linear-attention's PaTH also multiplies its gate by
            `scale`: pass that value for its checkpoints.
        implementation: "auto" (Triton kernels on CUDA where they cover the case, else torch),
            "torch" or "triton". The kernels multiply fp32 in terms of 16 bits.

    Returns:
        [B, T, HQ, DV] in q's dtype. Memory is linear in T up to a logarithmic factor, in both
        directions. Gradients have the dtypes of the inputs; there are no second derivatives, no
        forward-mode ones, and none through torch.func (grad, vjp, jacrev; vmap works).

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came. Values of
            document_start and infinite gates are found on CPU only.
        RuntimeError: a derivative that does not exist was asked for.
        NotImplementedError: "triton" was asked for a case that the kernels do not cover.

    Source: Yang et al., PaTH Attention (NeurIPS 2025), sections 2 and 3; the gate is that of
    Lin et al., Forgetting Transformer (ICLR 2025). path_backend/dyadic.py describes the algorithm.
    """
    inputs = Inputs(q, k, v, w, beta, log_gate, document_start)
    inputs, scale = prepare(inputs, scale, gate_scale, implementation)
    out, _ = torch.ops.path_backend.attention(*inputs, scale, implementation)
    return out


def prepare(
    inputs: Inputs, scale: float | None, gate_scale: float, implementation: str
) -> tuple[Inputs, float]:
    """Checks the arguments of path_attention; returns tensors and scale as the op takes them."""
    q, k, v, w, beta, log_gate, document_start = inputs
    _check(q, k, v, w, beta, log_gate, document_start, implementation)
    _check_number("scale", scale)
    _check_number("gate_scale", gate_scale)
    if log_gate is None and gate_scale != 1.0:
        raise ValueError(f"gate_scale needs a log_gate, got gate_scale = {gate_scale} without one")
    _refuse_forward_mode(q, k, v, w, beta, log_gate)
    precise = torch.promote_types(q.dtype, torch.float32)
    if beta is not None:
        beta = beta.to(precise)
    if log_gate is not None:
        log_gate = log_gate.to(precise)
        if gate_scale != 1.0:
            log_gate = log_gate * gate_scale
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return inputs._replace(beta=beta, log_gate=log_gate), scale


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_gate: Tensor | None,
    document_start: Tensor | None,
    implementation: str,
) -> None:
    if implementation not in ops.IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be one of {ops.IMPLEMENTATIONS}, got {implementation!r}"
        )
    if (w is None) != (beta is None):
        given, missing = ("w", "beta") if beta is None else ("beta", "w")
        raise ValueError(f"w and beta must come together, got {given} without {missing}")
    values: dict[str, object] = {"q": q, "k": k, "v": v, "w": w, "beta": beta}
    values |= {"log_gate": log_gate, "document_start": document_start}
    for name, value in values.items():
        if not isinstance(value, Tensor) and (value is not None or name in ("q", "k", "v")):
            raise TypeError(f"{name} must be a Tensor, got {type(value).__name__}")
    for name, qkv in (("q", q), ("k", k), ("v", v)):
        if qkv.ndim != 4:
            raise ValueError(
                f"{name} must have 4 dimensions [B, T, heads, D], got {list(qkv.shape)}"
            )
    B, T, HQ, D = q.shape
    H, DV = v.shape[2:]
    for name, size in (("T", T), ("B", B), ("HQ", HQ), ("D", D), ("H", H), ("DV", DV)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got q {list(q.shape)}, v {list(v.shape)}")
    if HQ % H != 0:
        raise ValueError(f"the heads of k must divide those of q, got HQ = {HQ} and H = {H}")
    _check_shape("k", k, "[B, T, H, D]", (B, T, H, D))
    _check_shape("v", v, "[B, T, H, DV]", (B, T, H, DV))
    _check_shape("w", w, "[B, T, H, D]", (B, T, H, D))
    _check_shape("beta", beta, "[B, T, H]", (B, T, H))
    _check_shape("log_gate", log_gate, "[B, T, HQ]", (B, T, HQ))
    _check_shape("document_start", document_start, "[B, T]", (B, T))

    if q.dtype not in _DTYPES:
        raise TypeError(f"q must have a dtype of {list(_DTYPES)}, got {q.dtype}")
    optional: dict[str, Tensor | None] = {"k": k, "v": v, "w": w}
    for name, x in optional.items():
        if x is not None and x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
    for name, x in (("beta", beta), ("log_gate", log_gate)):
        if x is not None and not x.dtype.is_floating_point:
            raise TypeError(f"{name} must have a floating dtype, got {x.dtype}")
    if document_start is not None and document_start.dtype != torch.int32:
        raise TypeError(f"document_start must have dtype torch.int32, got {document_start.dtype}")

    optional |= {"beta": beta, "log_gate": log_gate, "document_start": document_start}
    for name, x in optional.items():
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")


def _check_shape(name: str, x: Tensor | None, symbols: str, shape: tuple[int, ...]) -> None:
    if x is not None and x.shape != shape:
        raise ValueError(f"{name} must have shape {symbols} = {list(shape)}, got {list(x.shape)}")


def _check_number(name: str, x: float | None) -> None:
    if x is None and name == "scale":
        return
    if not isinstance(x, (int, float, torch.SymFloat)):
        raise TypeError(f"{name} must be a number, got {type(x).__name__}")
    if not -math.inf < x < math.inf:
        raise ValueError(f"{name} must be finite, got {x}")


def _refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Without it torch takes the missing formula for a derivative of zero."""
    if forward_ad._current_level < 0:
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError("path_attention has no forward-mode derivative")
