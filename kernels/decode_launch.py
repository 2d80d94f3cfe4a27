"""Launches of the kernels of a decode step."""

import functools
import math
import os

import torch
from torch import Tensor

from .constants import LOG2_E
from .decode import (
    attend_kernel,
    carry_kernel,
    combine_kernel,
    open_kernel,
    reach_kernel,
)
from .decode_close import merge_kernel, suffix_kernel

MAX_ROWS = 32
"""Query rows (tokens times heads of a group) that one tile of the attention holds: with 64 of them
it takes 121 to 145 KiB of shared memory, and small cards have 99.
"""

MAX_HEAD_DIM = 128
"""Widths of products, keys and values that the programs hold."""


def _padded(width: int, least: int = 16) -> int:
    return max(least, 1 << (width - 1).bit_length())


def _processors(device: torch.device) -> int:
    """Multiprocessors of the card; 1 in the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def unsupported_reason(spec, device: torch.device) -> str | None:
    """Why the kernels do not decode from a cache of this spec, or None if they do."""
    if device.type == "cuda":
        if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
            return "they need an NVIDIA GPU of compute capability 8.0 or newer"
    elif os.environ.get("TRITON_INTERPRET") != "1":
        return f"the cache is on {device}; the kernels need CUDA, or TRITON_INTERPRET=1"
    elif spec.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly (seen in 3.7.1 and 3.9)"
    if spec.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype {spec.dtype} is not bfloat16, float16 or float32"
    if spec.reflections and spec.form != "dyadic":
        return f"the form is {spec.form}, they know dyadic"
    if max(spec.head_dim, spec.value_dim) > MAX_HEAD_DIM:
        width = max(spec.head_dim, spec.value_dim)
        return f"a head is {width} wide, they hold at most {MAX_HEAD_DIM}"
    if spec.query_heads // spec.heads > MAX_ROWS:
        return f"{spec.query_heads // spec.heads} query heads share a key, they hold {MAX_ROWS}"
    return None


@functools.lru_cache
def splits_for(pairs: int, room: int, processors: int) -> int:
    """Parts into which the closed keys of each of `pairs` heads are split, of at least 256 tokens.

    A multiprocessor holds two programs: the last wave of them should be full, so this is the least
    number within 5 % of the fullest waves.
    """

    def full(splits: int) -> float:
        waves = pairs * splits / (2 * processors)
        return waves / math.ceil(waves)

    choices = range(1, max(1, min(room // 256, 128)) + 1)
    best = max(full(splits) for splits in choices)
    return next(splits for splits in choices if full(splits) >= 0.95 * best)


def step(
    tensors: dict[str, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_gate: Tensor | None,
    document_start: Tensor | None,
    scale: float,
    *,
    tokens: int,
    open_room: int,
    documents: bool,
    closing: bool,
    prune: float = math.inf,
    splits: int | None = None,
) -> Tensor:
    """Appends n tokens, which fit into the open group; returns out [B, n, HQ, DV].

    tensors: of a PathCache, by name. tokens: of a group. documents: whether any document began.
    closing: launch what closes a group that becomes full, which the kernels find out on the device;
    False where the host knows that it does not, or closes it itself. prune: as in CacheSpec.
    """
    B, n, HQ, D = q.shape
    H, DV = v.shape[2:]
    R, room = HQ // H, tensors["k"].shape[2]
    keys, product = tensors["k"], tensors.get("product")
    slots = 0 if product is None else product.shape[2]
    splits = splits or splits_for(B * H, room, _processors(q.device))
    reflections, closes = w is not None, int(closing)
    fp32 = q.dtype == torch.float32
    precision = {"PRECISION": "ieee" if fp32 else "tf32"}
    q, k, v = (x.contiguous() for x in (q, k, v))
    w, beta, log_gate, document_start = (
        None if x is None else x.contiguous() for x in (w, beta, log_gate, document_start)
    )
    out = q.new_empty(B, n, HQ, DV)
    shape = (B * H, splits + 1, n * R)
    m, l_sum = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    acc = torch.empty(*shape, DV, dtype=torch.float32, device=q.device)
    if reflections:
        x = torch.empty(B * H, n * R, D, dtype=torch.float32, device=q.device)
    else:
        x = q.unflatten(2, (H, R)).transpose(1, 2).flatten(0, 1).flatten(1, 2).contiguous()
    groups = room // tokens
    widths = {"HEAD_DIM": D, "BLOCK_D": _padded(D)}
    values = {"HEAD_DIM_V": DV, "BLOCK_DV": _padded(DV)}
    block_p = min(32, _padded(D))
    slices = -(-D // block_p)
    flags = {
        "REFLECTIONS": reflections,
        "HAS_GATE": log_gate is not None,
        "HAS_DOC": documents or document_start is not None,
    }
    common = {"GROUP": R, "TOKENS": tokens, "OPEN": open_room}
    position = tensors["position"]
    get = tensors.get
    # Registers let one program of open_kernel into a multiprocessor: few and large ones, then.
    rows = block_p if B * H < _processors(q.device) else _padded(D)
    open_kernel[(B * H, 1 + (-(-D // rows) if reflections else 0))](
        q, k, v, w, beta, log_gate, document_start, position, keys, tensors["v"], get("gate_end"),
        get("gate_after"), tensors["starts"], tensors["raw_k"], get("raw_w"), get("raw_beta"),
        tensors["open_keys"], get("open_product"), get("open_gate"), get("key_size"), x, m,
        l_sum, acc, n, room, groups, scale * LOG2_E, H, splits, closes, **common, **widths,
        **values, **flags, **precision, BLOCK_R=_padded(R), BLOCK_O=_padded(open_room),
        BLOCK_P=rows, START_GIVEN=document_start is not None, num_warps=8 if D > 64 else 4,
    )  # fmt: skip
    moved = None
    if reflections:
        moved = torch.empty(B * H, slots, n * R, D, dtype=torch.float32, device=q.device)
        carry_kernel[(B * H, slots, slices)](
            x, moved, position, tensors["suffix"], n, slots, **widths, **precision, GROUP=R,
            BLOCK_M=_padded(n * R), BLOCK_P=block_p, num_warps=4,
        )  # fmt: skip
    reach = None
    if log_gate is not None and prune < math.inf:
        reach = torch.empty(B * H, dtype=torch.int32, device=q.device)
        reach_kernel[(B * H,)](
            q, k, position, tensors["gate_end"], tensors["open_gate"], tensors["key_size"], reach,
            n, groups, scale, prune, H, **widths, GROUP=R, BLOCK_M=_padded(n * R), TOKENS=tokens,
            OPEN=open_room, BLOCK_G=128, num_warps=4,
        )  # fmt: skip
    attend_kernel[(splits, B * H)](
        x, moved, position, keys, tensors["v"], get("gate_end"), get("gate_after"),
        tensors["starts"], get("open_gate"), reach, m, l_sum, acc, n, room, groups,
        scale * LOG2_E, H, splits, slots, **common, **widths, **values, **flags,
        **precision, BLOCK_M=_padded(n * R), BLOCK_N=_padded(tokens) if tokens < 64 else 64,
        HAS_REACH=reach is not None, num_warps=4, num_stages=2 if fp32 else 3,
    )  # fmt: skip
    if closing and reflections:
        exact = {"EXACT": "ieee"}
        suffix_kernel[(B * H, slots, slices)](
            position, tensors["open_product"], tensors["suffix"], n, slots, **widths, **exact,
            BLOCK_P=block_p, TOKENS=tokens, num_warps=4,
        )  # fmt: skip
        merge_kernel[(4 * _processors(q.device),)](
            position, tensors["open_product"], product, tensors["suffix"], keys, n, room, slots,
            B * H, **widths, **precision, **exact, BLOCK_P=block_p, TOKENS=tokens,
            BLOCK_T=_padded(tokens), num_warps=4,
        )  # fmt: skip
    combine_kernel[(B * H, n * R)](
        m, l_sum, acc, out, position, n, room, H, splits, closes, GROUP=R, TOKENS=tokens,
        **values, BLOCK_S=_padded(splits + 1), OPEN=open_room, num_warps=4,
    )  # fmt: skip
    return out
