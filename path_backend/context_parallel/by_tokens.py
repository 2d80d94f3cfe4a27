"""PaTH attention on the segments of one rank of a context-parallel group.

P_m is the product of segment m, s < c are two segments, q_start and k_end lie in the frames of
their own segments (path_backend/eager/segments.py):

    M(s, c)  = P_{s+1} ... P_{c-1}
    logit_ij = scale * (M(s, c)^T k_end_j) . q_start_i + gate_q_i + gate_k_j,   j in s, i in c
    gate_q_i = log gates from the start of c to i, and of the segments between s and c
    gate_k_j = log gates after j to the end of s

so that across segments PaTH is dense attention of queries that stay on keys that are moved, since
they have fewer heads. Products and gate sums of all segments are gathered first; keys, values and
gate_k travel (collectives.py); a rank merges what its queries see of them.

Backward, from dq, dk', dv, d(gate_q), d(gate_k) of each pair:

    dq_start += dq,   dk_end += dk' M(s, c)^T,   dM(s, c) = k_end^T dk'
    E_s = dM(s, c) + P_s^T E_{s-1},   dP_{s+1} += E_s M(s+1, c)^T     for s = 0, 1, ..., c - 2
    d(log gate) at t: d(gate_q) from t on, d(gate_k) before t, all of it between the segments

dk_end, dv, d(gate_k), dP and the last term are summed over ranks and return to the segment's owner,
who differentiates its interior.

Precision: every term of a gate is formed in fp64 and rounded once. M is a product in fp64 of fp32
factors. Moved keys are accumulated in fp32 and rounded once to the dtype of k.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from path_backend.arguments import CrossSegment, Gradients, Inputs, SegmentEnds
from path_backend.context_parallel.collectives import METHODS
from path_backend.context_parallel.plan import Plan
from path_backend.eager.softmax import cumulative_gate


@torch.no_grad()
def forward(x: Inputs, plan: Plan) -> tuple[Tensor, Tensor]:
    """out [B, T, HQ, DV] in q's dtype and lse [B, HQ, T] of this rank's T tokens."""
    segments = _split(x, plan)
    inside = [plan.backend.segment_forward(segment, plan.scale) for segment in segments]
    outs, lses = [y.out for y in inside], [y.lse for y in inside]
    scan = _Scan(x, segments, [y.ends for y in inside], plan)
    for source, theirs in scan.exchange.visit():
        for r in scan.pairs(source, theirs):
            plan.backend.cross_segment_forward(r.operands, plan.scale, outs[r.row], lses[r.row])
    total = x.q.new_empty(*x.q.shape[:3], x.v.shape[3])
    for i, out in enumerate(outs):
        _segment(total, i, plan).copy_(out)
    return total, torch.cat(lses, 2)


@torch.no_grad()
def backward(d_out: Tensor, x: Inputs, out: Tensor, lse: Tensor, plan: Plan) -> Gradients:
    """Gradients of q, k, v, w, beta, log_gate, each in its input's dtype (None for None)."""
    segments, length = _split(x, plan), plan.layout.length
    d_outs, outs = d_out.split(length, 1), out.split(length, 1)
    lses = [y.contiguous() for y in lse.split(length, 2)]
    between = _backward_between(d_outs, x, segments, outs, lses, plan)
    results = [None if y is None else y.new_empty(y.shape) for y in x.floating]
    for i, segment in enumerate(segments):
        d_ends = SegmentEnds(between.dq_start[i], between.dk_end[i], between.d_product[i])
        inside = plan.backend.segment_backward(
            d_outs[i], segment, outs[i], lses[i], plan.scale, d_ends
        )
        d_gate = None if between.d_gate is None else between.d_gate[i]
        outside = (None, None, between.dv[i], None, None, d_gate)
        for total, part, other in zip(results, inside, outside, strict=True):
            if total is not None and part is not None:
                _segment(total, i, plan).copy_(part if other is None else part + other)
    return tuple(results)


def _backward_between(
    d_outs: Sequence[Tensor],
    x: Inputs,
    segments: list[Inputs],
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    plan: Plan,
) -> _Returned:
    """Returns what pairs of tokens in different segments contribute."""
    ends = [plan.backend.segment_ends(segment) for segment in segments]
    scan = _Scan(x, segments, ends, plan)
    dtype = lses[0].dtype
    deltas = [(g.to(dtype) * y).sum(-1).mT.contiguous() for g, y in zip(d_outs, outs, strict=True)]
    grads = _Gradients(scan, dtype)
    for source, theirs in scan.exchange.visit():
        returned = [torch.zeros_like(y, dtype=dtype) for y in theirs]
        for r in scan.pairs(source, theirs):
            computed = plan.backend.cross_segment_backward(
                d_outs[r.row], r.operands, lses[r.row], deltas[r.row], plan.scale
            )
            grads.add(r, theirs[0][r.column], [y[r.column] for y in returned], *computed)
        scan.exchange.give_back(source, returned)
    return grads.finish()


def describe(x: Inputs, starts: Sequence[int], length: int, exchange: str, scale: float) -> str:
    """Returns what all ranks of a call must have in common, in a few hundred characters."""
    layout = hashlib.sha256(repr(list(starts)).encode()).hexdigest()[:8]
    given = [name for name, y in x._asdict().items() if y is not None]
    shapes = f"q {list(x.q.shape)}, k {list(x.k.shape)}, v {list(x.v.shape)} of {x.q.dtype}"
    segments = f"{len(starts)} segments of {length} tokens at #{layout}"
    return f"{shapes}, given {' '.join(given)}; {segments}; {exchange}, scale {scale}"


def _segment(x: Tensor, i: int, plan: Plan) -> Tensor:
    """The rank's i-th segment of x [B, T, ...] (a view)."""
    return x.narrow(1, i * plan.layout.length, plan.layout.length)


def _split(x: Inputs, plan: Plan) -> list[Inputs]:
    """The rank's segments; document starts count from the segment's first token."""
    segments = []
    for i, start in enumerate(plan.layout.starts[plan.transport.rank]):
        segment = x.map(partial(_segment, i=i, plan=plan))
        if segment.document_start is not None:
            relative = (segment.document_start - start).clamp_min(0)
            segment = segment._replace(document_start=relative)
        segments.append(segment)
    return segments


class _Pair(NamedTuple):
    """Holds queries of the rank's segment c, its `row`-th, and segment s, the `column`-th of its
    rank.
    """

    c: int
    row: int
    s: int
    column: int
    move: Tensor | None  # M(s, c) [B, H, D, D], None for the identity
    operands: CrossSegment


class _Returned(NamedTuple):
    """Gradients that reach each own segment from outside."""

    dq_start: Sequence[Tensor]  # [B, T, HQ, D]
    dk_end: Tensor  # [own segments, B, T, H, D]
    dv: Tensor  # [own segments, B, T, H, DV]
    d_product: Sequence[Tensor | None]  # [B, H, D, D]
    d_gate: Tensor | None  # [own segments, B, T, HQ]


class _Scan:
    """Holds what both directions share: ends, products and gates, and the exchange under way."""

    def __init__(self, x: Inputs, segments: list[Inputs], ends: Sequence[SegmentEnds], plan: Plan):
        self.plan, self.document_start = plan, x.document_start
        self.own = plan.layout.held_by(plan.transport.rank)
        q_start, k_end, product = zip(*ends, strict=True)
        self.q_start = q_start
        self.products = None if product[0] is None else self._gather(torch.stack(product))
        self.moves = {c: _moves(self.products, c) for c in self.own}
        mine = [torch.stack(k_end), torch.stack([segment.v for segment in segments])]
        self.gates = None
        if x.log_gate is not None:
            gates = torch.stack([p.log_gate.mT for p in segments if p.log_gate is not None])
            sums = cumulative_gate(gates, -1)
            self.gates = _Gates(sums, torch.stack(self._gather(sums[..., -1])), x.log_gate.dtype)
            mine.append(self.gates.after)
        self.exchange = METHODS[plan.exchange](plan.transport, mine)

    def _gather(self, x: Tensor) -> list[Tensor]:
        """x [own segments, ...] of every rank: the segments along the sequence."""
        gathered = self.plan.transport.all_gather(x)()
        return [gathered[rank, place] for rank, place in self.plan.layout.home]

    def reduce(self, x: Sequence[Tensor]) -> Tensor:
        """The reverse: the sum over all ranks of x[segment], for the own segments."""
        ranks = self.plan.layout.ranks
        order = [segment for rank in range(ranks) for segment in self.plan.layout.held_by(rank)]
        ordered = torch.stack([x[segment] for segment in order]).unflatten(0, (ranks, -1))
        return self.plan.transport.reduce_scatter(ordered)()

    def pairs(self, source: int, theirs: Sequence[Tensor]) -> Iterator[_Pair]:
        """Yields the pairs of the rank's queries with the segments of `source`."""
        for column, s in enumerate(self.plan.layout.held_by(source)):
            k_end, v, *gates = (x[column] for x in theirs)
            gate_k = gates[0] if gates else None
            for row, c in enumerate(self.own):
                if s >= c:
                    continue
                k, move = k_end, self.moves[c].get(s)
                if move is not None:
                    k = _by_head(multiply(_by_head(k), move)).to(k.dtype)
                gate_q = None if self.gates is None else self.gates.before(c, row, s)
                first_key = None
                if self.document_start is not None:
                    start = _segment(self.document_start, row, self.plan)
                    first_key = (start - s * self.plan.layout.length).clamp_min(0)
                operands = CrossSegment(self.q_start[row], k, v, gate_q, gate_k, first_key)
                yield _Pair(c, row, s, column, move, operands)


class _Gates:
    """Log gates between a query and a key of different segments."""

    def __init__(self, sums: Tensor, totals: Tensor, dtype: torch.dtype):
        """sums: fp64 [own segments, B, HQ, T], from its start; totals: [segments, B, HQ]."""
        self.sums, self.dtype = sums, dtype
        self.after = (sums[..., -1:] - sums).to(dtype)  # gate_k of the own segments
        self.until = torch.cat([torch.zeros_like(totals[:1]), totals.cumsum(0)])  # before a segment

    def before(self, c: int, row: int, s: int) -> Tensor:
        """gate_q [B, HQ, T] of segment c on segment s."""
        between = self.until[c] - self.until[s + 1]
        return (self.sums[row] + between.unsqueeze(-1)).to(self.dtype)


class _Gradients:
    """Sums over the pairs of a rank, and then over ranks."""

    def __init__(self, scan: _Scan, dtype: torch.dtype):
        self.scan = scan
        self.dq_start = [torch.zeros_like(q, dtype=dtype) for q in scan.q_start]
        self.d_moves: dict[int, dict[int, Tensor]] = {c: {} for c in scan.own}
        if scan.gates is not None:
            self.d_gate_q = torch.zeros_like(scan.gates.sums)
            self.d_between = torch.zeros_like(scan.gates.until[1:])

    def add(
        self,
        r: _Pair,
        k_end: Tensor,
        returned: Sequence[Tensor],
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        d_gate_q: Tensor | None,
        d_gate_k: Tensor | None,
    ) -> None:
        """Adds one pair; `returned` are the sums of its keys' gradients."""
        self.dq_start[r.row] += dq
        if r.move is not None:
            self.d_moves[r.c][r.s] = multiply(_by_head(k_end).mT, _by_head(dk))
            dk = _by_head(multiply(_by_head(dk), r.move.mT))
        returned[0].add_(dk)
        returned[1].add_(dv)
        if d_gate_q is not None and d_gate_k is not None:
            returned[2].add_(d_gate_k)
            self.d_gate_q[r.row] += d_gate_q
            self.d_between[r.s + 1 : r.c] += d_gate_q.double().sum(-1)

    def finish(self) -> _Returned:
        """Sums over ranks."""
        scan = self.scan
        dk_end, dv, *d_after = scan.exchange.collect()
        d_product: Sequence[Tensor | None] = [None] * len(scan.own)
        if scan.products is not None:
            d_product = scan.reduce(self._d_products(scan.products)).unbind()
        if scan.gates is None:
            return _Returned(self.dq_start, dk_end, dv, d_product, None)
        d_between = scan.reduce(self.d_between.unbind()).unsqueeze(-1)
        before = d_after[0].double()
        before = before.cumsum(-1) - before
        d_gate = self.d_gate_q.flip(-1).cumsum(-1).flip(-1) + before + d_between
        return _Returned(self.dq_start, dk_end, dv, d_product, d_gate.mT)

    def _d_products(self, products: Sequence[Tensor]) -> list[Tensor]:
        """This rank's part of the gradient of every segment's product."""
        d_products = [torch.zeros_like(x) for x in products]
        for c, d_moves in self.d_moves.items():
            total = None
            for s in range(c - 1):
                carried = 0 if total is None else products[s].double().mT @ total
                total = d_moves[s].double() + carried
                rest = self.scan.moves[c].get(s + 1)
                d_products[s + 1] += total if rest is None else total @ rest.double().mT
        return d_products


def _moves(products: Sequence[Tensor] | None, c: int) -> dict[int, Tensor]:
    """M(s, c) of every s < c - 1."""
    moves: dict[int, Tensor] = {}
    if products is not None and c > 1:
        product = products[c - 1].double()
        for s in range(c - 2, -1, -1):
            moves[s] = product.to(products[s].dtype)
            product = products[s].double() @ product
    return moves


def _by_head(x: Tensor) -> Tensor:
    """[B, T, H, D] -> view [B, H, T, D], and back."""
    return x.transpose(1, 2)


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """x @ y [B, H, M, N] as exact as fp32 (fp64 if one of them is), whatever torch.backends allows.

    A flag may turn fp32 products into tf32 or bf16 ones. Here they are sums of products of bf16
    terms, which every mode forms exactly and adds up in fp32.
    """
    if torch.float64 in (x.dtype, y.dtype):
        return x.double() @ y.double()
    total = None
    for i, a in enumerate(_terms(x)):
        for j, b in enumerate(_terms(y)):
            if i + j < 3:
                part = _multiply_bf16(a.flatten(0, 1), b.flatten(0, 1))
                total = part if total is None else total.add_(part)
    assert total is not None
    return total.unflatten(0, x.shape[:2])


def _multiply_bf16(x: Tensor, y: Tensor) -> Tensor:
    if x.is_cuda:
        return torch.bmm(x, y, out_dtype=torch.float32)
    return torch.bmm(x.float(), y.float())


def _terms(x: Tensor) -> list[Tensor]:
    """bf16 tensors of falling size whose sum is x."""
    if x.dtype == torch.bfloat16:
        return [x]
    terms, rest = [], x.float()
    for _ in range(2 if x.dtype == torch.float16 else 3):
        terms.append(rest.bfloat16())
        rest = rest - terms[-1]
    return terms
