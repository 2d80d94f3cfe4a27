"""The tokens that a short causal convolution needs from other segments, and their gradient.

Under context parallelism a sequence lies on the ranks of a group in segments (layout.py). The last
rows of each segment go to all ranks, a few kilobytes, and a rank takes those that precede its own
segments. Gradients return the same way: a reduce-scatter sums them where the rows came from.

    halo           x, rows, starts, length, group_name -> out
    halo_backward  d_out, the same but x -> dx

are dispatcher ops, as attention is (ops.py); all ranks of the group must call them. `starts` has
the first token of each segment, those of rank 0 first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from path_backend.context_parallel.collectives import GroupTransport, Transport
from path_backend.context_parallel.layout import Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_options = "int rows, int[] starts, int length, str group_name"
_library = torch.library.Library("path_backend", "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define(f"halo(Tensor x, {_options}) -> Tensor", tags=_tags)
_library.define(f"halo_backward(Tensor d_out, {_options}) -> Tensor", tags=_tags)


def halo(x: Tensor, rows: int, layout: Layout, group: ProcessGroup) -> Tensor:
    """The `rows` >= 1 tokens before each segment of this rank, zeros before the sequence begins.

    x [B, layout.tokens, C] -> [B, segments of this rank, rows, C]. Segments may be shorter than
    `rows`. All ranks of the group must call, and differentiate, in the same order.
    """
    out: Tensor = torch.ops.path_backend.halo(x, rows, layout.flat, layout.length, group.group_name)
    return out


def take(x: Tensor, rows: int, layout: Layout, transport: Transport) -> Tensor:
    """halo over a transport."""
    tails = x.unflatten(1, (-1, layout.length))[:, :, -rows:]  # [B, segments, min(rows, length), C]
    tails_of = transport.all_gather(tails)()
    nothing = torch.zeros_like(tails[:, 0])
    halos = []
    for sources in _sources(rows, layout, transport.rank):
        parts = [nothing if s is None else tails_of[s[0], :, s[1]] for s in sources]
        halos.append(torch.cat(parts, dim=1)[:, -rows:])
    return torch.stack(halos, dim=1)


def give_back(d_halos: Tensor, rows: int, layout: Layout, transport: Transport) -> Tensor:
    """Gradient of x from that of its halos, d_halos [B, segments, rows, C]."""
    B, segments, _, C = d_halos.shape
    given = min(rows, layout.length)
    d_tails_of = d_halos.new_zeros(layout.ranks, B, segments, given, C)
    sources_of = _sources(rows, layout, transport.rank)
    for d_halo, sources in zip(d_halos.unbind(1), sources_of, strict=True):
        cut = len(sources) * given - rows  # rows of the first source that are not in the halo
        parts = F.pad(d_halo, (0, 0, cut, 0)).split(given, dim=1)
        for source, part in zip(sources, parts, strict=True):
            if source is not None:
                d_tails_of[source[0], :, source[1]] += part
    d_tails = transport.reduce_scatter(d_tails_of)()
    return F.pad(d_tails, (0, 0, layout.length - given, 0)).flatten(1, 2)


def _sources(rows: int, layout: Layout, rank: int) -> list[list[tuple[int, int] | None]]:
    """Returns, for each segment of the rank, the places of those that the `rows` tokens before it
    touch.
    """
    reach = range(-(-rows // layout.length), 0, -1)
    return [
        [layout.home[segment - back] if segment >= back else None for back in reach]
        for segment in layout.held_by(rank)
    ]


def _halo(x: Tensor, rows: int, starts: list[int], length: int, group_name: str) -> Tensor:
    transport = GroupTransport(group_name)
    return take(x, rows, Layout.from_flat(tuple(starts), length, transport.ranks), transport)


def _halo_backward(
    d_out: Tensor, rows: int, starts: list[int], length: int, group_name: str
) -> Tensor:
    transport = GroupTransport(group_name)
    layout = Layout.from_flat(tuple(starts), length, transport.ranks)
    return give_back(d_out, rows, layout, transport)


def _halo_fake(x: Tensor, rows: int, starts: list[int], length: int, group_name: str) -> Tensor:
    segments = len(starts) // GroupTransport(group_name).ranks
    return x.new_empty(x.shape[0], segments, rows, x.shape[2])


def _halo_backward_fake(
    d_out: Tensor, rows: int, starts: list[int], length: int, group_name: str
) -> Tensor:
    B, segments, _, C = d_out.shape
    return d_out.new_empty(B, segments * length, C)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.options = inputs


def _differentiate(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.path_backend.halo_backward(d_out, *ctx.options), None, None, None, None


def _differentiate_backward(ctx: Any, d_dx: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.path_backend.halo(d_dx, *ctx.options), None, None, None, None


_library.impl("halo", _halo, "CompositeExplicitAutograd")
_library.impl("halo_backward", _halo_backward, "CompositeExplicitAutograd")
torch.library.register_fake("path_backend::halo", _halo_fake, lib=_library)
torch.library.register_fake("path_backend::halo_backward", _halo_backward_fake, lib=_library)
torch.library.register_autograd(
    "path_backend::halo", _differentiate, setup_context=_save, lib=_library
)
torch.library.register_autograd(
    "path_backend::halo_backward", _differentiate_backward, setup_context=_save, lib=_library
)
