"""The public functions: each checks a call, fills in its defaults, and hands it to its op."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from path_backend import ops  # noqa: F401 (registers the ops)
from path_backend.arguments import Inputs, prepare
from path_backend.context_parallel.collectives import METHODS
from path_backend.context_parallel.layout import Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

EXCHANGES = (*METHODS, "heads")


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
    Lin et al., Forgetting Transformer (ICLR 2025). path_backend/eager describes the algorithm.
    """
    inputs = Inputs(q, k, v, w, beta, log_gate, document_start)
    inputs, scale = prepare(inputs, scale, gate_scale, implementation)
    out, _ = torch.ops.path_backend.attention(*inputs, scale, implementation)
    return out


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None = None,
    beta: Tensor | None = None,
    log_gate: Tensor | None = None,
    *,
    layout: Layout,
    group: ProcessGroup,
    exchange: str = "allgather",
    scale: float | None = None,
    document_start: Tensor | None = None,
    gate_scale: float = 1.0,
    implementation: str = "auto",
) -> Tensor:
    """path_attention of a sequence whose tokens are spread over the ranks of a group.

    All ranks of the group must call, and differentiate, in the same order.

    Args:
        q, k, v, w, beta, log_gate, scale, gate_scale, implementation: as path_attention, of this
            rank's T = layout.tokens tokens.
        layout: the tokens of every rank; the same on all of them.
        document_start: int32 [B, T], this rank's part of the whole sequence's: it holds numbers of
            tokens in the whole sequence.
        group: the process group.
        exchange: what ranks send each other. "allgather": keys and values, all at once; memory
            grows with the sequence. "ring": keys and values, rank by rank, while attention on
            those before runs; memory per rank does not grow with the number of ranks. "heads": the
            ranks, which must divide H, exchange tokens for heads (Ulysses), and each attends with
            its own heads.

    Returns:
        [B, T, HQ, DV] in q's dtype, of this rank's tokens.

    Raises:
        ValueError, TypeError: as path_attention. On every rank, if shapes, dtypes, options or the
            layout differ between ranks, or the tensors have not the length that the layout says.
            On a GPU ranks are compared in the first call of its kind only, since the host waits.
        RuntimeError: from the process group, within its timeout, if another rank failed.
    """
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange must be one of {EXCHANGES}, got {exchange!r}")
    if layout.ranks != group.size():
        raise ValueError(f"the layout is for {layout.ranks} ranks, the group has {group.size()}")
    inputs = Inputs(q, k, v, w, beta, log_gate, document_start)
    inputs, scale = prepare(inputs, scale, gate_scale, implementation)
    H = k.shape[2]
    if exchange == "heads" and H % layout.ranks:
        raise ValueError(
            "exchange 'heads' needs a number of key/value heads that the ranks divide, "
            f"got H = {H} and {layout.ranks} ranks"
        )
    plan = (layout.flat, layout.length, group.group_name, exchange, scale, implementation)
    out, _ = torch.ops.path_backend.context_parallel_attention(*inputs, *plan)
    return out
