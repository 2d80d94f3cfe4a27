"""Running sums of the log gates g, and the gradient of the log gates.

    G_t    = sum of g_s over s <= t  = offset_n + gate_t     in log2 units, n = t // GATE_SPAN
    offset = the part up to the first token of t's span, fp64;   gate = what follows in it, fp32
    d(g)_t = sum of d(G)_s over s >= t,   d(G) = row_sum - col_sum of the logits' gradient

Differences of near pairs are right to 2^-24 of what a span forgets at any position, and the suffix
sum of a million signed terms to that of the result: all sums are formed in fp64 and rounded once.

Both directions first sum every span, then add up inside spans. A program takes one span of HEADS
heads, and itself sums what it needs of the other spans' totals, in a fixed order: at 131,072 tokens
all programs of a head read 4 MB of them from the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import constants
from .levels import cdiv
from .tiles import GATE_SPAN, LOG2_E, kernel

CLOSED_GATE = tl.constexpr(constants.CLOSED_GATE)

HEADS = tl.constexpr(8)
"""Heads of a program: log_gate [B, T, HQ] is read in sectors of 32 bytes."""


@triton.jit
def place_of_program(T, HQ):
    """Returns the program's batch, heads [HEADS, 1], tokens [1, SPAN], and which of them exist."""
    parts = tl.cdiv(HQ, HEADS)
    b = (tl.program_id(0) // parts).to(tl.int64)
    tokens = (tl.program_id(1) * GATE_SPAN + tl.arange(0, GATE_SPAN))[None, :]
    heads = (tl.program_id(0) % parts * HEADS + tl.arange(0, HEADS))[:, None]
    return b, heads, tokens, (heads < HQ) & (tokens < T)


@triton.jit
def load_log_gates(log_gate_ptr, b, heads, tokens, mask, stride_lb, stride_lt, stride_lh):
    """Loads log gates [HEADS, SPAN] in log2 units, fp64, not below CLOSED_GATE."""
    at = b * stride_lb + tokens.to(tl.int64) * stride_lt + heads.to(tl.int64) * stride_lh
    terms = tl.load(log_gate_ptr + at, mask=mask, other=0.0).to(tl.float64) * LOG2_E
    return tl.where(terms < CLOSED_GATE, CLOSED_GATE, terms)  # NaN stays


@triton.jit
def load_gradients(row_sum_ptr, col_sum_ptr, rows, tokens, mask, T):
    """Loads d(G) [HEADS, SPAN], fp64."""
    at = rows * T + tokens
    row_sum = tl.load(row_sum_ptr + at, mask=mask, other=0.0)
    col_sum = tl.load(col_sum_ptr + at, mask=mask, other=0.0)
    return row_sum.to(tl.float64) - col_sum.to(tl.float64)


@triton.jit
def store_totals(total_ptr, rows, heads, terms, HQ):
    """Stores a span's sums into total [B, HQ, spans]."""
    at = rows * tl.num_programs(1) + tl.program_id(1)
    tl.store(total_ptr + at, tl.sum(terms, 1)[:, None], mask=heads < HQ)


@triton.jit
def sum_of_spans(total_ptr, rows, heads, first, end, HQ):
    """Returns [HEADS, 1]: the totals of the spans first ... end - 1."""
    acc = tl.zeros([HEADS, GATE_SPAN], tl.float64)
    for start in tl.range(first, end, GATE_SPAN, num_stages=1):
        spans = (start + tl.arange(0, GATE_SPAN))[None, :]
        mask = (heads < HQ) & (spans < end)
        acc += tl.load(total_ptr + rows * tl.num_programs(1) + spans, mask=mask, other=0.0)
    return tl.sum(acc, 1)[:, None]


@kernel
def gate_totals_kernel(log_gate_ptr, total_ptr, stride_lb, stride_lt, stride_lh, T, HQ):
    """Sums log gates over spans."""
    b, heads, tokens, mask = place_of_program(T, HQ)
    terms = load_log_gates(log_gate_ptr, b, heads, tokens, mask, stride_lb, stride_lt, stride_lh)
    store_totals(total_ptr, b * HQ + heads, heads, terms, HQ)


@kernel
def gate_kernel(
    log_gate_ptr, total_ptr, gate_ptr, offset_ptr, stride_lb, stride_lt, stride_lh, T, HQ
):  # fmt: skip
    """Computes running sums inside a span, and its offset.

    The offset takes the first token's gate: closed, it would cost every sum of the span digits.
    """
    b, heads, tokens, mask = place_of_program(T, HQ)
    rows = b * HQ + heads
    terms = load_log_gates(log_gate_ptr, b, heads, tokens, mask, stride_lb, stride_lt, stride_lh)
    span = tl.program_id(1)
    first = tl.sum(tl.where(tokens == span * GATE_SPAN, terms, 0.0), 1)[:, None]
    gate = tl.cumsum(terms, 1) - first
    whole = tl.num_programs(1) * GATE_SPAN
    tl.store(gate_ptr + rows * whole + tokens, gate.to(tl.float32), mask=heads < HQ)
    offset = sum_of_spans(total_ptr, rows, heads, 0, span, HQ) + first
    tl.store(offset_ptr + rows * tl.num_programs(1) + span, offset, mask=heads < HQ)


@kernel
def gate_gradient_totals_kernel(row_sum_ptr, col_sum_ptr, total_ptr, T, HQ):
    """Sums d(G) over spans."""
    b, heads, tokens, mask = place_of_program(T, HQ)
    rows = b * HQ + heads
    terms = load_gradients(row_sum_ptr, col_sum_ptr, rows, tokens, mask, T)
    store_totals(total_ptr, rows, heads, terms, HQ)


@kernel
def gate_gradient_kernel(row_sum_ptr, col_sum_ptr, total_ptr, d_log_gate_ptr, T, HQ):
    """Computes d(g) of a span, as the sum from its first token on without the tokens before."""
    b, heads, tokens, mask = place_of_program(T, HQ)
    rows = b * HQ + heads
    terms = load_gradients(row_sum_ptr, col_sum_ptr, rows, tokens, mask, T)
    rest = sum_of_spans(total_ptr, rows, heads, tl.program_id(1), tl.num_programs(1), HQ)
    suffix = rest - (tl.cumsum(terms, 1) - terms)
    tl.store(d_log_gate_ptr + (b * T + tokens) * HQ + heads, suffix.to(tl.float32), mask=mask)


def running_sums(log_gate: Tensor) -> tuple[Tensor, Tensor]:
    """Returns gate [B, HQ, whole spans] in fp32, offset [B, HQ, spans] in fp64, of log_gate [B, T,
    HQ].
    """
    B, T, HQ = log_gate.shape
    spans = cdiv(T, constants.GATE_SPAN)
    total, offset = log_gate.new_empty(2, B, HQ, spans, dtype=torch.float64)
    gate = log_gate.new_empty(B, HQ, spans * constants.GATE_SPAN, dtype=torch.float32)
    stride_lb, stride_lt, stride_lh = log_gate.stride()
    shared = {
        "log_gate_ptr": log_gate,
        "total_ptr": total,
        "stride_lb": stride_lb,
        "stride_lt": stride_lt,
        "stride_lh": stride_lh,
        "T": T,
        "HQ": HQ,
    }
    grid = (B * cdiv(HQ, HEADS.value), spans)
    gate_totals_kernel[grid](**shared)
    gate_kernel[grid](**shared, gate_ptr=gate, offset_ptr=offset)
    return gate, offset


def gradient(row_sum: Tensor, col_sum: Tensor) -> Tensor:
    """Returns d(log_gate) [B, T, HQ] in fp32, from row_sum and col_sum [B, HQ, T] of the logits'
    gradient, both contiguous.
    """
    B, HQ, T = row_sum.shape
    spans = cdiv(T, constants.GATE_SPAN)
    shared = {
        "row_sum_ptr": row_sum,
        "col_sum_ptr": col_sum,
        "total_ptr": row_sum.new_empty(B, HQ, spans, dtype=torch.float64),
        "T": T,
        "HQ": HQ,
    }
    d_log_gate = row_sum.new_empty(B, T, HQ)
    grid = (B * cdiv(HQ, HEADS.value), spans)
    gate_gradient_totals_kernel[grid](**shared)
    gate_gradient_kernel[grid](**shared, d_log_gate_ptr=d_log_gate)
    return d_log_gate
