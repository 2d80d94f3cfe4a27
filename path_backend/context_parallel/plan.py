"""A rank's part in a call that the ranks of a group share."""

from __future__ import annotations

from typing import NamedTuple

from path_backend.arguments import Backend
from path_backend.context_parallel.collectives import Transport
from path_backend.context_parallel.layout import Layout


class Plan(NamedTuple):
    """Holds what all ranks of a call agree on, and this rank's transport and backend.

    exchange is one of `collectives.METHODS`, or "heads".
    """

    layout: Layout
    transport: Transport
    exchange: str
    scale: float
    backend: Backend
