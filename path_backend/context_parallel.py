"""The public function of context parallelism: checks a call and hands it to the op."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from path_backend.attention import prepare
from path_backend.exchange import METHODS
from path_backend.layout import Layout, layout_from_positions
from path_backend.sharded import Inputs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ROTATE_METHODS = (*METHODS, "ulysses")

__all__ = ["Layout", "context_parallel_attention", "layout_from_positions"]


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
    rotate_method: str = "allgather",
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
        rotate_method: how keys and values of other ranks arrive. "allgather": all at once, memory
            grows with the sequence. "ring": rank by rank, while attention on those before runs;
            memory per rank does not grow with the number of ranks. "ulysses": the ranks, which
            must divide H, exchange tokens for heads, and each attends with its own heads.

    Returns:
        [B, T, HQ, DV] in q's dtype, of this rank's tokens.

    Raises:
        ValueError, TypeError: as path_attention. On every rank, if shapes, dtypes, options or the
            layout differ between ranks, or the tensors have not the length that the layout says.
            On a GPU ranks are compared in the first call of its kind only, since the host waits.
        RuntimeError: from the process group, within its timeout, if another rank failed.
    """
    if rotate_method not in ROTATE_METHODS:
        raise ValueError(f"rotate_method must be one of {ROTATE_METHODS}, got {rotate_method!r}")
    if layout.ranks != group.size():
        raise ValueError(f"the layout is for {layout.ranks} ranks, the group has {group.size()}")
    inputs = Inputs(q, k, v, w, beta, log_gate, document_start)
    inputs, scale = prepare(inputs, scale, gate_scale, implementation)
    H = k.shape[2]
    if rotate_method == "ulysses" and H % layout.ranks:
        raise ValueError(
            "rotate_method 'ulysses' needs a number of key/value heads that the ranks divide, "
            f"got H = {H} and {layout.ranks} ranks"
        )
    plan = (layout.flat, layout.length, group.group_name, rotate_method, scale, implementation)
    out, _ = torch.ops.path_backend.context_parallel_attention(*inputs, *plan)
    return out
