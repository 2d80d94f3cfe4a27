"""Launchers: scratch, grids and arguments. The only module that the operator calls.

Shapes: q [B, T, HQ, D], k and w [B, T, H, D], v [B, T, H, DV], beta [B, T, H] and log_gate [B, T, HQ]
in fp32, document_start [B, T] int32. Last dimensions may have any stride; they are copied if it is not 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from . import config, tiles
from .attention_backward import attention_dkdv_kernel, attention_dq_kernel, delta_kernel
from .attention_forward import attention_forward_kernel
from .chunk import chunk_inverse_kernel
from .chunk_backward import chunk_backward_kernel, chunk_product_backward_kernel
from .sweep import block_product_kernel, key_sweep_kernel, query_sweep_kernel, tree_kernel
from .sweep_backward import (
    key_sweep_backward_kernel,
    product_gradient_kernel,
    query_sweep_backward_kernel,
    tree_backward_kernel,
)
from .tiles import CHUNK

LOG2_E = 1.4426950408889634
MAX_HEAD_DIM = 128
"""Products P are D x D tiles held by one program."""


def unsupported_reason(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_gate: Tensor | None,
    document_start: Tensor | None,
) -> str | None:
    """Why the kernels do not cover this case, or None if they do."""
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype {q.dtype} is not bfloat16, float16 or float32"
    limit = 256 if w is None else MAX_HEAD_DIM
    for name, width in (("q", q.shape[-1]), ("v", v.shape[-1])):
        if width > limit:
            return f"{name} has head width {width}, the kernels hold at most {limit}"
    return None


@dataclass
class _Inputs:
    """One group of heads of one call, last dimensions contiguous.

    gate [B, HQ, T] is the running sum in log2 units from the start of each GATE_SPAN tokens, fp32, and
    gate_offset [B, HQ, spans] the sum at these starts, fp64.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor | None
    beta: Tensor | None
    gate: Tensor | None
    gate_offset: Tensor | None
    document_start: Tensor | None
    document_end: Tensor | None
    scale: float

    @property
    def group(self) -> int:
        return self.q.shape[2] // self.k.shape[2]

    @property
    def widths(self) -> dict[str, int]:
        return {"HEAD_DIM": self.q.shape[3], "BLOCK_D": self.width}

    @property
    def width(self) -> int:
        """Columns of a tile of q, k and w. With reflections at least 64: Triton 3.6 compiles the
        products of 32 columns to shared-memory accesses out of range (seen on sm_90)."""
        return _padded(self.q.shape[3], 16 if self.w is None else 64)

    @property
    def value_widths(self) -> dict[str, int]:
        return {"HEAD_DIM_V": self.v.shape[3], "BLOCK_DV": _padded(self.v.shape[3])}

    @property
    def flags(self) -> dict[str, Any]:
        return {
            "HAS_PATH": self.w is not None,
            "HAS_GATE": self.gate is not None,
            "HAS_DOC": self.document_start is not None,
            "PRECISION": "tf32x3" if self.q.dtype == torch.float32 else "tf32",
        }

    @property
    def precision(self) -> str:
        """How the transform multiplies: see `tiles.dot`. The interpreter miscomputes bf16 products."""
        if self.q.dtype == torch.float32:
            return "tf32x3" if triton.knobs.runtime.interpret else "fp32"
        return "fp16x3" if self.q.dtype == torch.float16 else "bf16x3"

    def part(self, batch: slice, heads: slice) -> "_Inputs":
        queries = slice(heads.start * self.group, heads.stop * self.group)

        def pick(x: Tensor | None, h: slice) -> Tensor | None:
            return None if x is None else x[batch, :, h]

        return _Inputs(
            self.q[batch, :, queries],
            self.k[batch, :, heads],
            self.v[batch, :, heads],
            pick(self.w, heads),
            pick(self.beta, heads),
            None if self.gate is None else self.gate[batch, queries],
            None if self.gate_offset is None else self.gate_offset[batch, queries],
            None if self.document_start is None else self.document_start[batch],
            None if self.document_end is None else self.document_end[batch],
            self.scale,
        )


@dataclass
class _Frames:
    """The transformed inputs of one group of heads: factors, products, and q, k of every level."""

    inverse: Tensor  # [B, H, N, C, C] fp32, M^-1 of each chunk
    products: Tensor  # [B, H, blocks, BLOCK_D, BLOCK_D] fp32, levels 1 ... num_levels - 2
    q_levels: Tensor  # [B, HQ, rows, BLOCK_D]
    k_levels: Tensor  # [B, H, rows, BLOCK_D]
    local: Tensor  # [B, HQ, N, C, C] fp32


def _padded(width: int, least: int = 16) -> int:
    return max(least, triton.next_power_of_2(width))


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_gate: Tensor | None,
    document_start: Tensor | None,
    scale: float,
) -> _Inputs:
    gate = gate_offset = document_end = None
    if log_gate is not None:
        span = tiles.GATE_SPAN.value
        total = (log_gate.transpose(1, 2).double() * LOG2_E).cumsum(-1)
        gate_offset = total[..., ::span].contiguous()
        gate = (total - gate_offset.repeat_interleave(span, -1)[..., : q.shape[1]]).float()
    if document_start is not None:
        document_start = document_start.contiguous()
        positions = torch.arange(q.shape[1], device=q.device, dtype=torch.int32)
        document_end = torch.searchsorted(
            document_start, positions.expand_as(document_start).contiguous(), right=True, out_int32=True
        )
    return _Inputs(
        _dense(q),
        _dense(k),
        _dense(v),
        None if w is None else _dense(w),
        beta,
        gate,
        gate_offset,
        document_start,
        document_end,
        scale,
    )


def _groups(inputs: _Inputs, backward: bool) -> Iterator[tuple[slice, slice]]:
    """Batch and key/value-head ranges whose scratch fits SCRATCH_BYTES (at least one head at a time)."""
    B, T, H = inputs.k.shape[:3]
    if inputs.w is None:
        yield slice(0, B), slice(0, H)
        return
    width, size = inputs.width, inputs.q.element_size()
    rows, blocks = tiles.total_rows(T), tiles.total_blocks(T)
    passes = 2 if backward else 1
    per_query = (rows * width * size + T * CHUNK * 4) * inputs.group
    if backward and inputs.group > 1:
        per_query += T * CHUNK * 4 * inputs.group  # factors kept for the sum over a group
    per_key = rows * width * size + blocks * width * width * 4 + T * CHUNK * 4
    limit = max(1, config.SCRATCH_BYTES // (passes * (per_query + per_key)))
    if limit >= H:
        step = min(B, limit // H)
        step = -(-B // -(-B // step))
        for b in range(0, B, step):
            yield slice(b, min(b + step, B)), slice(0, H)
        return
    step = -(-H // -(-H // limit))
    for b in range(B):
        for h in range(0, H, step):
            yield slice(b, b + 1), slice(h, min(h + step, H))


def _strides(*names_and_tensors: tuple[str, Tensor | None]) -> dict[str, int]:
    """stride_<name>b, stride_<name>t, stride_<name>h of [B, T, H, ...] tensors (zeros where absent)."""
    result = {}
    for name, x in names_and_tensors:
        for i, axis in enumerate("bth"):
            result[f"stride_{name}{axis}"] = 0 if x is None else x.stride(i)
    return result


def _frames(x: _Inputs) -> _Frames:
    """Chunk transform, tree of products, sweep of queries and keys."""
    assert x.w is not None and x.beta is not None
    B, T, HQ, D = x.q.shape
    H, width = x.k.shape[2], x.width
    chunks, levels = triton.cdiv(T, CHUNK), tiles.num_levels(T)
    rows, blocks = tiles.total_rows(T), tiles.total_blocks(T)
    fp32 = {"dtype": torch.float32, "device": x.q.device}
    frames = _Frames(
        torch.empty(B, H, chunks, CHUNK, CHUNK, **fp32),
        torch.empty(B, H, blocks, width, width, **fp32),
        x.q.new_empty(B, HQ, rows, width),
        x.q.new_empty(B, H, rows, width),
        torch.empty(B, HQ, chunks, CHUNK, CHUNK, **fp32),
    )
    factors = {
        "w_ptr": x.w,
        "beta_ptr": x.beta,
        "inverse_ptr": frames.inverse,
        **_strides(("w", x.w), ("b", x.beta)),
        "T": T,
        "num_chunks": chunks,
        "CHUNK": CHUNK,
        **x.widths,
    }
    side = min(width, config.PRODUCT_TILE)
    chunk_inverse_kernel[(chunks, B * H)](
        **factors, H=H, PRECISION=x.precision, num_warps=4
    )
    base = 0
    for level in range(1, levels - 1):
        count = tiles.level_blocks(T, level)
        if level == 1:
            block_product_kernel[(count, B * H, width // side)](
                **factors, product_ptr=frames.products, H=H, total_blocks=blocks, COLS=side, PRECISION=x.precision
            )
        else:
            child = base - tiles.level_blocks(T, level - 1)
            tree_kernel[(count, B * H, (width // side) ** 2)](
                frames.products, child, base, blocks, BLOCK_D=width, TILE=side, PRECISION=x.precision
            )
        base += count
    sweep = {
        **factors,
        "product_ptr": frames.products,
        "num_levels": levels,
        "total_rows": rows,
        "total_blocks": blocks,
        "HAS_DOC": x.document_start is not None,
        "PRECISION": x.precision,
        **config.SWEEP_OPTIONS,
    }
    query_sweep_kernel[(triton.cdiv(T, sweep["ROWS"]), B * HQ)](
        **sweep,
        q_ptr=x.q,
        k_ptr=x.k,
        levels_ptr=frames.q_levels,
        local_ptr=frames.local,
        start_ptr=x.document_start,
        **_strides(("q", x.q), ("k", x.k)),
        HQ=HQ,
        GROUP=x.group,
    )
    key_sweep_kernel[(triton.cdiv(T, sweep["ROWS"]), B * H)](
        **sweep, k_ptr=x.k, levels_ptr=frames.k_levels, end_ptr=x.document_end, **_strides(("k", x.k)), H=H
    )
    return frames


def _attention_arguments(x: _Inputs, frames: _Frames | None, tile: config.Tiles) -> dict[str, Any]:
    """What the three attention kernels share."""
    T = x.q.shape[1]
    return {
        "q_ptr": x.q,
        "k_ptr": x.k,
        "v_ptr": x.v,
        "q_levels_ptr": frames.q_levels if frames else x.q,
        "k_levels_ptr": frames.k_levels if frames else x.k,
        "local_ptr": frames.local if frames else x.q,
        "gate_ptr": x.gate if x.gate is not None else x.q,
        "offset_ptr": x.gate_offset if x.gate_offset is not None else x.q,
        "start_ptr": x.document_start if x.document_start is not None else x.q,
        **_strides(("q", x.q), ("k", x.k), ("v", x.v)),
        "T": T,
        "HQ": x.q.shape[2],
        "num_chunks": triton.cdiv(T, CHUNK),
        "num_levels": tiles.num_levels(T),
        "total_rows": tiles.total_rows(T),
        "GROUP": x.group,
        "CHUNK": CHUNK,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **x.widths,
        **x.value_widths,
        **x.flags,
    }


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_gate: Tensor | None,
    document_start: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out [B, T, HQ, DV] in q's dtype and the natural log-sum-exp [B, HQ, T] in fp32."""
    B, T, HQ, _ = q.shape
    out = q.new_empty(B, T, HQ, v.shape[3])
    lse = torch.empty(B, HQ, T, dtype=torch.float32, device=q.device)
    inputs = _prepare(q, k, v, w, beta, log_gate, document_start, scale)
    for batch, heads in _groups(inputs, backward=False):
        x = inputs.part(batch, heads)
        queries = slice(heads.start * x.group, heads.stop * x.group)
        frames = None if w is None else _frames(x)
        tile = config.forward_tiles(q.dtype, max(x.width, _padded(v.shape[3])))
        part = out[batch, :, queries]
        attention_forward_kernel[(triton.cdiv(T, tile.block_m), part.shape[0] * part.shape[2])](
            **_attention_arguments(x, frames, tile),
            out_ptr=part,
            lse_ptr=lse[batch, queries],
            **_strides(("o", part)),
            scale=scale * LOG2_E,
        )
    return out, lse


def attention_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_gate: Tensor | None,
    document_start: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, ...]:
    """dq, dk, dv, dw, dbeta, dlog_gate; empty tensors where the input is absent.

    fp16 inputs are differentiated in fp32 storage and tf32 products, which hold fp16 values exactly: a
    mean loss over a million tokens has gradients of 1e-7, where fp16 has no digits left.
    """
    dtype = q.dtype
    if dtype == torch.float16:
        d_out, q, k, v, out = (t.float() for t in (d_out, q, k, v, out))
        w = None if w is None else w.float()
    d_out = _dense(d_out)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dq, dk, dv = (t if t.stride(-1) == 1 else t.contiguous() for t in (dq, dk, dv))
    dw = q.new_empty(0) if w is None else w.new_empty(w.shape)
    d_beta = lse.new_empty(0) if beta is None else lse.new_empty(beta.shape)
    row_sum = col_sum = lse
    if log_gate is not None:
        row_sum, col_sum = torch.empty_like(lse), torch.empty_like(lse)
    inputs = _prepare(q, k, v, w, beta, log_gate, document_start, scale)
    for batch, heads in _groups(inputs, backward=True):
        queries = slice(heads.start * inputs.group, heads.stop * inputs.group)
        _backward_group(
            inputs.part(batch, heads),
            d_out[batch, :, queries],
            out[batch, :, queries],
            lse[batch, queries],
            dq[batch, :, queries],
            dk[batch, :, heads],
            dv[batch, :, heads],
            None if w is None else dw[batch, :, heads],
            None if beta is None else d_beta[batch, :, heads],
            row_sum[batch, queries],
            col_sum[batch, queries],
        )
    d_gate = lse.new_empty(0)
    if log_gate is not None:
        # fp64: the suffix sum of a million signed terms; reversed as total minus prefix
        d_sum = (row_sum - col_sum).double()
        d_gate = (d_sum.sum(-1, keepdim=True) - d_sum.cumsum(-1) + d_sum).float().transpose(1, 2).contiguous()
    return dq.to(dtype), dk.to(dtype), dv.to(dtype), dw.to(dtype), d_beta, d_gate


def _backward_group(
    x: _Inputs,
    d_out: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dw: Tensor | None,
    d_beta: Tensor | None,
    row_sum: Tensor,
    col_sum: Tensor,
) -> None:
    B, T, HQ, D = x.q.shape
    H, width = x.k.shape[2], x.width
    frames = None if x.w is None else _frames(x)
    delta = torch.empty_like(lse)
    delta_kernel[(triton.cdiv(T, 64), B * HQ)](
        out, d_out, delta, **_strides(("o", out), ("g", d_out)), T=T, HQ=HQ, BLOCK_M=64, **x.value_widths
    )
    dq_levels = dk_levels = d_local = dq
    if frames:
        dq_levels, dk_levels = torch.empty_like(frames.q_levels), torch.empty_like(frames.k_levels)
        d_local = torch.empty_like(frames.local, dtype=x.q.dtype)
    shared = {"lse_ptr": lse, "delta_ptr": delta, "d_out_ptr": d_out, "scale": x.scale, **_strides(("g", d_out))}
    block = max(width, _padded(x.v.shape[3]))
    tile = config.query_tiles(x.q.dtype, block)
    attention_dq_kernel[(triton.cdiv(T, tile.block_m), B * HQ)](
        **_attention_arguments(x, frames, tile),
        **shared,
        **_strides(("dq", dq)),
        dq_ptr=dq,
        dq_levels_ptr=dq_levels,
        d_local_ptr=d_local,
        row_sum_ptr=row_sum,
    )
    tile = config.key_tiles(x.q.dtype, block)
    attention_dkdv_kernel[(triton.cdiv(T, tile.block_n), B * H)](
        **_attention_arguments(x, frames, tile),
        **shared,
        **_strides(("dk", dk), ("dv", dv)),
        end_ptr=x.document_end if x.document_end is not None else x.q,
        dk_ptr=dk,
        dv_ptr=dv,
        dk_levels_ptr=dk_levels,
        col_sum_ptr=col_sum,
    )
    if frames:
        _frames_backward(x, frames, dq_levels, dk_levels, d_local, dq, dk, dw, d_beta)


def _frames_backward(
    x: _Inputs,
    frames: _Frames,
    dq_levels: Tensor,
    dk_levels: Tensor,
    d_local: Tensor,
    dq: Tensor,
    dk: Tensor,
    dw: Tensor | None,
    d_beta: Tensor | None,
) -> None:
    """From the gradients of every level to those of q, k, w, beta."""
    assert x.w is not None and x.beta is not None
    B, T, HQ, D = x.q.shape
    H, width = x.k.shape[2], x.width
    chunks, levels = triton.cdiv(T, CHUNK), tiles.num_levels(T)
    rows, blocks = tiles.total_rows(T), tiles.total_blocks(T)
    side = min(width, config.PRODUCT_TILE)
    dq_start = dq_levels.new_empty(B, HQ, chunks, CHUNK, width)
    dk_end = dk_levels.new_empty(B, H, chunks, CHUNK, width)
    sweep = {
        "w_ptr": x.w,
        "beta_ptr": x.beta,
        "inverse_ptr": frames.inverse,
        "product_ptr": frames.products,
        **_strides(("w", x.w), ("b", x.beta)),
        "T": T,
        "num_chunks": chunks,
        "num_levels": levels,
        "total_rows": rows,
        "total_blocks": blocks,
        "CHUNK": CHUNK,
        "HAS_DOC": x.document_start is not None,
        "PRECISION": x.precision,
        **config.SWEEP_OPTIONS,
        **x.widths,
    }
    query_sweep_backward_kernel[(triton.cdiv(T, sweep["ROWS"]), B * HQ)](
        **sweep, levels_ptr=dq_levels, dq_start_ptr=dq_start, start_ptr=x.document_start, HQ=HQ, GROUP=x.group
    )
    key_sweep_backward_kernel[(triton.cdiv(T, sweep["ROWS"]), B * H)](
        **sweep, levels_ptr=dk_levels, dk_end_ptr=dk_end, end_ptr=x.document_end, H=H
    )
    gradient, count = frames.products, 0  # of the level above; none at the top
    block_base, row_base = blocks, tiles.total_rows(T) - tiles.level_rows(T, levels - 1) if levels else 0
    for level in range(levels - 2, 0, -1):
        parent, parents = gradient, count
        count = tiles.level_blocks(T, level)
        block_base -= count
        row_base -= tiles.level_rows(T, level)
        moved = {
            "q_levels_ptr": frames.q_levels,
            "k_levels_ptr": frames.k_levels,
            "dq_levels_ptr": dq_levels,
            "dk_levels_ptr": dk_levels,
            "start_ptr": x.document_start,
            "end_ptr": x.document_end,
            "T": T,
            "H": H,
            "level": level,
            "row_base": row_base,
            "num_blocks": count,
            "total_rows": rows,
            "GROUP": x.group,
            "BLOCK_D": width,
            "CHUNK": CHUNK,
            "TILE": side,
            "HAS_DOC": x.document_start is not None,
            "PRECISION": x.precision,
        }
        tokens = max(CHUNK, config.PRODUCT_ROWS // x.group)
        splits = triton.cdiv(CHUNK << level, tokens)
        partial = frames.products
        if splits > 1:
            partial = torch.empty(
                B * H, count, splits, width, width, dtype=torch.float32, device=x.q.device
            )
            product_gradient_kernel[(count * splits, B * H, (width // side) ** 2)](
                **moved, partial_ptr=partial, num_splits=splits, ROWS=tokens
            )
        gradient = dq_levels.new_empty(B * H, count, width, width)
        tree_backward_kernel[(count, B * H, (width // side) ** 2)](
            **moved,
            product_ptr=frames.products,
            partial_ptr=partial,
            parent_ptr=parent,
            gradient_ptr=gradient,
            block_base=block_base,
            num_splits=splits,
            num_parents=parents,
            total_blocks=blocks,
            SPLIT=splits > 1,
        )
    dx, scratch = frames.inverse, d_local
    if x.group > 1:
        scratch = torch.empty(B, HQ, chunks, 2, CHUNK, CHUNK, dtype=torch.float32, device=x.q.device)
    if levels > 1:
        dx = torch.empty_like(frames.inverse)
        for right, here, moved, group in (
            (0, frames.q_levels, dq_levels, x.group),
            (1, frames.k_levels, dk_levels, 1),
        ):
            chunk_product_backward_kernel[((chunks + 1 - right) // 2, B * H)](
                x.w,
                x.beta,
                frames.inverse,
                here,
                moved,
                gradient,
                dx,
                dw,
                scratch,
                **_strides(("w", x.w), ("b", x.beta), ("dw", dw)),
                T=T,
                H=H,
                num_chunks=chunks,
                total_rows=rows,
                num_blocks=count,
                RIGHT=right,
                GROUP=group,
                CHUNK=CHUNK,
                PRECISION=x.precision,
                num_warps=4,
                **x.widths,
            )
    chunk_backward_kernel[(chunks, B * H)](
        x.q,
        x.k,
        x.w,
        x.beta,
        frames.inverse,
        dq_start,
        dk_end,
        d_local,
        dx,
        scratch,
        dq,
        dk,
        dw,
        d_beta,
        **_strides(
            ("q", x.q), ("k", x.k), ("w", x.w), ("b", x.beta), ("dq", dq), ("dk", dk), ("dw", dw), ("db", d_beta)
        ),
        T=T,
        H=H,
        num_chunks=chunks,
        GROUP=x.group,
        CHUNK=CHUNK,
        HAS_PRODUCT=levels > 1,
        PRECISION=x.precision,
        num_warps=4,
        **x.widths,
    )
