"""Sequences that lie on several ranks, as the layers see them."""

from dataclasses import dataclass

import torch.distributed as dist

from path_backend.context_parallel.layout import Layout


@dataclass
class Segmented:
    """Tells a layer that its input holds this rank's segments of each sequence.

    Args:
        group: the ranks.
        exchange: what ranks send each other, as in `context_parallel_attention`.
        layout: the tokens of each rank. It must be set before a forward.
    """

    group: dist.ProcessGroup
    exchange: str = "allgather"
    layout: Layout | None = None

    def known_layout(self) -> Layout:
        """Returns the layout. Raises ValueError if none was set."""
        if self.layout is None:
            raise ValueError("segmented.layout must be set before a forward, got None")
        return self.layout
