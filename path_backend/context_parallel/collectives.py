"""Exchanges that bring keys and values of other ranks, and return their gradients.

AllGather holds the segments of all ranks at once. Ring holds its own, those that it works on, and
those that arrive meanwhile: memory does not grow with the number of ranks, but for the D x D
products of the segments. Both start with the rank's own segments, so that the first transfer
overlaps attention on these.

Ring sums gradients in the order rank, rank + 1, ...; AllGather in the order of the backend's
reduce-scatter.

Bytes that each of R ranks sends, and receives, in either method. It holds n = B T tokens in P
segments; b is the size of an element of k. Terms of HQ need a gate, those of D^2 reflections.

    a = n (H (D + DV) b + 4 HQ)     keys, values, gates after a key
    g = n (H (D + DV) + HQ) 4       their gradients
    m = B P (4 H D^2 + 8 HQ)        products and gate sums
    forward                         (R - 1) (a + m)
    backward                        (R - 1) (a + g + 2 m)

Ring attention, as in torch.distributed.tensor.experimental: (R - 1) a and (R - 1) a + R g.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# The ops that functional collectives trace to. Unlike torch.distributed's functions they take the
# group by name, and their names are the same from torch 2.10 to 2.13.
_collectives = torch.ops._c10d_functional

Wait = Callable[[], Tensor]


class Transport(Protocol):
    """The communication of one rank. All ranks make the same calls in the same order.

    A call that returns a Wait has started; calling that returns the result. On CUDA it makes the
    current stream wait, not the host.
    """

    rank: int
    ranks: int

    def all_gather(self, x: Tensor) -> Wait:
        """x of every rank, [ranks, *x.shape]."""

    def reduce_scatter(self, x: Tensor) -> Wait:
        """x [ranks, ...]: the sum over all ranks of x[self.rank]."""

    def shift(self, x: Tensor, distance: int) -> Wait:
        """Sends x to rank + distance and returns what rank - distance sent, of the same shape."""

    def all_to_all(self, x: Tensor) -> Wait:
        """Sends x[rank] to every rank and returns what each sent, [ranks, ...]."""


class GroupTransport:
    """The transport of a process group.

    On a CPU every call waits: with gloo, collectives in flight through torch's functional ops end
    in a crash once in some ten thousand calls (torch 2.13).
    """

    sent: ClassVar[int] = 0
    """Bytes that this process has sent in all its groups, without what `compare` sends."""

    _agreed: ClassVar[set[tuple[str, str]]] = set()
    _NOTE = 512  # bytes

    def __init__(self, group_name: str):
        from torch._C._distributed_c10d import _resolve_process_group  # not in every build

        group = _resolve_process_group(group_name)  # type: ignore[arg-type]
        self.group, self.name, self.rank, self.ranks = group, group_name, group.rank(), group.size()

    def all_gather(self, x: Tensor) -> Wait:
        GroupTransport.sent += x.nbytes * (self.ranks - 1)
        return self._gather(x)

    def _gather(self, x: Tensor) -> Wait:
        if x.device.type == "cpu":
            gathered = x.new_empty(self.ranks * x.numel())
            dist.all_gather_into_tensor(gathered, x.contiguous().flatten(), group=self.group)
            return lambda: gathered.view(self.ranks, *x.shape)
        y = _collectives.all_gather_into_tensor(x.contiguous(), self.ranks, self.name)
        return lambda: _collectives.wait_tensor(y).view(self.ranks, *x.shape)

    def reduce_scatter(self, x: Tensor) -> Wait:
        if x.device.type == "cpu":
            shares = self.all_to_all(x)
            return lambda: shares().sum(0)
        GroupTransport.sent += x[0].nbytes * (self.ranks - 1)
        y = _collectives.reduce_scatter_tensor(
            x.contiguous().flatten(0, 1), "sum", self.ranks, self.name
        )
        return lambda: _collectives.wait_tensor(y).view(x.shape[1:])

    def shift(self, x: Tensor, distance: int) -> Wait:
        sent, received = [0] * self.ranks, [0] * self.ranks
        sent[(self.rank + distance) % self.ranks] = x.numel()
        received[(self.rank - distance) % self.ranks] = x.numel()
        return self._exchange(x, received, sent)

    def all_to_all(self, x: Tensor) -> Wait:
        sizes = [x[0].numel()] * self.ranks
        return self._exchange(x, sizes, sizes)

    def _exchange(self, x: Tensor, received: list[int], sent: list[int]) -> Wait:
        """Sends parts of x of these sizes to the ranks; what came has x's shape."""
        GroupTransport.sent += (sum(sent) - sent[self.rank]) * x.element_size()
        flat = x.contiguous().flatten()
        if x.device.type == "cpu":
            arrived = torch.empty_like(flat)
            dist.all_to_all_single(arrived, flat, received, sent, group=self.group)
            return lambda: arrived.view(x.shape)
        y = _collectives.all_to_all_single(flat, received, sent, self.name)
        return lambda: _collectives.wait_tensor(y).view(x.shape)

    def agree(self, description: str, device: torch.device) -> None:
        """Compares descriptions, on a GPU once for each, since the host waits for the answer."""
        key = (self.name, description)
        if device.type == "cpu" or key not in self._agreed:
            self.compare(description, device)
            self._agreed.add(key)

    def compare(self, description: str, device: torch.device) -> None:
        """Raises ValueError on every rank if the ranks do not describe their calls alike.

        device: one that the group works on.
        """
        note = description.encode()[: self._NOTE].ljust(self._NOTE)
        notes = self._gather(torch.tensor(list(note), dtype=torch.uint8, device=device))()
        texts = [bytes(x).decode(errors="replace").strip() for x in notes.tolist()]
        for rank, text in enumerate(texts):
            if text != texts[0]:
                raise ValueError(
                    f"all ranks must make the same call, but rank 0 has {texts[0]}, "
                    f"and rank {rank} has {text}"
                )


class AllGather:
    """mine: tensors of this rank's segments, of the same shapes on every rank."""

    def __init__(self, transport: Transport, mine: Sequence[Tensor]):
        self.transport, self.mine = transport, mine
        self.waits = [transport.all_gather(x) for x in mine] if transport.ranks > 1 else []
        self.returned: list[Tensor] = []

    def visit(self) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """(rank, its tensors): this rank, rank - 1, rank - 2, ..."""
        rank, ranks = self.transport.rank, self.transport.ranks
        yield rank, self.mine
        gathered = [wait() for wait in self.waits]
        for step in range(1, ranks):
            source = (rank - step) % ranks
            yield source, [x[source] for x in gathered]

    def give_back(self, source: int, grads: Sequence[Tensor]) -> None:
        """Gradients of the tensors of `source`, once for every rank."""
        if not self.returned:
            self.returned = [x.new_empty(self.transport.ranks, *x.shape) for x in grads]
        for x, grad in zip(self.returned, grads, strict=True):
            x[source] = grad

    def collect(self) -> list[Tensor]:
        """The sum of what all ranks gave back to this one."""
        waits = [self.transport.reduce_scatter(x) for x in self.returned]
        return [wait() for wait in waits]


class Ring:
    """Exchanges the segments of one rank at a time."""

    def __init__(self, transport: Transport, mine: Sequence[Tensor]):
        self.transport, self.mine = transport, mine
        self.sums: list[Tensor] = []
        self.waits: list[Wait] = []

    def visit(self) -> Iterator[tuple[int, Sequence[Tensor]]]:
        here = self.mine
        rank, ranks = self.transport.rank, self.transport.ranks
        for step in range(ranks):
            waits = [self.transport.shift(x, 1) for x in here] if step + 1 < ranks else []
            yield (rank - step) % ranks, here
            here = [wait() for wait in waits]

    def give_back(self, source: int, grads: Sequence[Tensor]) -> None:
        """Straight to the owner, while attention on the next segments runs."""
        if source == self.transport.rank:
            self.sums = list(grads)
            return
        self._add()
        distance = source - self.transport.rank
        self.waits = [self.transport.shift(x, distance) for x in grads]

    def collect(self) -> list[Tensor]:
        self._add()
        return self.sums

    def _add(self) -> None:
        """Adds what has come in since the last call."""
        for total, wait in zip(self.sums, self.waits, strict=False):  # none at first
            total += wait()
        self.waits = []


METHODS: dict[str, type[AllGather] | type[Ring]] = {"allgather": AllGather, "ring": Ring}
