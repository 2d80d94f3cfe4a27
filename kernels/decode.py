"""A decode step in the dyadic form of path_backend.inference, which names the tensors of a cache.

Seven kernels, in order; B * H pairs of a row and a key/value head are `bh`, a query row of one is
(token, query head), M = n * R of them:

    open_kernel      the open group takes n tokens: P_open, open keys, x = P_open q, and attention
                     to the open keys, which is the last of the splits
    carry_kernel     x in the frame of each block, by the suffix products
    reach_kernel     the closed groups that a forget gate hides from all rows of a head
    attend_kernel    attention of x to a split of the closed keys, in the frame of each block
    suffix_kernel    if the group became full: suffix products <- suffix P_open
    merge_kernel     if it did: keys of the blocks that merge, and the merged block's product
    combine_kernel   the splits by log-sum-exp; counts the tokens

The group is full and the blocks are found from `position` on the device, so that a CUDA graph can
hold a step. Products and open keys are fp32; `PRECISION` is that of products with queries and keys,
`EXACT` that of products with products.
"""

import triton
import triton.language as tl

from . import constants

LOG2_E = tl.constexpr(constants.LOG2_E)
CLOSED = tl.constexpr(constants.CLOSED_GATE * constants.LN_2)

RUNTIME = ["n", "room", "groups", "splits", "slots", "pairs", "H", "closes"]
"""Numbers of a step and of a cache: one version of a kernel serves all."""

kernel = triton.jit(do_not_specialize=RUNTIME)


@triton.jit
def highest_bit(x):
    """floor(log2(x)) of x >= 1."""
    bit = 0
    while (x >> (bit + 1)) > 0:
        bit += 1
    return bit


@triton.jit
def load_matrix(ptr, rows, columns, WIDTH: tl.constexpr, limit):
    """Tile [rows, columns] of a row-major matrix of WIDTH columns, zero outside."""
    mask = (rows < limit)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(ptr + rows[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0)


@kernel
def open_kernel(
    q_ptr, k_ptr, v_ptr, w_ptr, beta_ptr, log_gate_ptr, start_ptr, position_ptr, keys_ptr,
    values_ptr, gate_end_ptr, gate_after_ptr, starts_ptr, raw_k_ptr, raw_w_ptr, raw_beta_ptr,
    open_keys_ptr, open_product_ptr, open_gate_ptr, key_size_ptr, x_ptr, m_ptr, l_ptr, acc_ptr, n,
    room, groups, scale, H, splits, closes, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_R: tl.constexpr,
    TOKENS: tl.constexpr, OPEN: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_P: tl.constexpr,
    REFLECTIONS: tl.constexpr, HAS_GATE: tl.constexpr, HAS_DOC: tl.constexpr,
    START_GIVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program 0 of a head has the open keys, the others BLOCK_P rows of P_open each."""
    bh = tl.program_id(0).to(tl.int64)
    tokens = tl.load(position_ptr)
    closed = tl.load(position_ptr + 1)
    count = (tokens - closed * TOKENS).to(tl.int32)
    if (tokens + n <= room) & (count + n <= OPEN):
        if tl.program_id(1) == 0:
            _open_attention(
                q_ptr, k_ptr, v_ptr, w_ptr, beta_ptr, log_gate_ptr, start_ptr, keys_ptr,
                values_ptr, gate_end_ptr, gate_after_ptr, starts_ptr, raw_k_ptr, raw_w_ptr,
                raw_beta_ptr, open_keys_ptr, open_gate_ptr, key_size_ptr, m_ptr, l_ptr, acc_ptr, n,
                room, groups, scale, H, splits, closes, bh, tokens, closed, count, GROUP,
                HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_R, TOKENS, OPEN, BLOCK_O,
                REFLECTIONS, HAS_GATE, HAS_DOC, START_GIVEN, PRECISION,
            )  # fmt: skip
        elif REFLECTIONS:
            rows = (tl.program_id(1) - 1) * BLOCK_P + tl.arange(0, BLOCK_P)
            _open_product(
                q_ptr, w_ptr, beta_ptr, open_product_ptr, x_ptr, n, H, bh, count, rows, GROUP,
                HEAD_DIM, BLOCK_D,
            )  # fmt: skip
    elif tl.program_id(1) == 0:  # the host did not count: NaN says so, and nothing is written
        for row in range(n * GROUP):
            tl.store(m_ptr + (bh * (splits + 1) + splits) * n * GROUP + row, float("nan"))


@triton.jit
def _open_product(
    q_ptr, w_ptr, beta_ptr, open_product_ptr, x_ptr, n, H, bh, count, rows,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """P_open <- P_open H and x = P_open q of n tokens, for some rows of P_open."""
    b, h = bh // H, bh % H
    dim = tl.arange(0, BLOCK_D)
    in_dim = dim < HEAD_DIM
    open_product_ptr += bh * HEAD_DIM * HEAD_DIM
    product = load_matrix(open_product_ptr, rows, dim, HEAD_DIM, HEAD_DIM)
    if count == 0:
        product = (rows[:, None] == dim[None, :]).to(tl.float32)
    for i in range(n):
        at = (b * n + i) * H + h
        w = tl.load(w_ptr + at * HEAD_DIM + dim, mask=in_dim, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + at)
        along = tl.sum(product * w[None, :], 1)
        product -= beta * along[:, None] * w[None, :]
        for r in tl.static_range(GROUP):
            q_at = (at * GROUP + r) * HEAD_DIM
            q = tl.load(q_ptr + q_at + dim, mask=in_dim, other=0.0).to(tl.float32)
            x = tl.sum(product * q[None, :], 1)
            x_at = ((bh * n + i) * GROUP + r) * HEAD_DIM
            tl.store(x_ptr + x_at + rows, x, mask=rows < HEAD_DIM)
    mask = (rows < HEAD_DIM)[:, None] & in_dim[None, :]
    tl.store(open_product_ptr + rows[:, None] * HEAD_DIM + dim[None, :], product, mask=mask)


@triton.jit
def _open_attention(
    q_ptr, k_ptr, v_ptr, w_ptr, beta_ptr, log_gate_ptr, start_ptr, keys_ptr, values_ptr,
    gate_end_ptr, gate_after_ptr, starts_ptr, raw_k_ptr, raw_w_ptr, raw_beta_ptr, open_keys_ptr,
    open_gate_ptr, key_size_ptr, m_ptr, l_ptr, acc_ptr, n, room, groups, scale, H, splits, closes,
    bh, tokens, closed, count, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_R: tl.constexpr,
    TOKENS: tl.constexpr, OPEN: tl.constexpr, BLOCK_O: tl.constexpr, REFLECTIONS: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_DOC: tl.constexpr, START_GIVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Moves the open keys, appends n tokens, attends to them; closes a full group."""
    b, h = bh // H, bh % H
    dim, dim_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    in_dim, in_dim_v = dim < HEAD_DIM, dim_v < HEAD_DIM_V
    row, r = tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_R)
    in_group = r < GROUP
    first = closed * TOKENS
    open_keys_ptr += bh * OPEN * HEAD_DIM
    values_ptr += bh * room * HEAD_DIM_V
    keys = load_matrix(open_keys_ptr, row, dim, HEAD_DIM, count)
    values = load_matrix(values_ptr + first * HEAD_DIM_V, row, dim_v, HEAD_DIM_V, count)
    head = bh * GROUP + r  # of the query heads of all rows
    gates = tl.zeros([BLOCK_R, BLOCK_O], tl.float64)
    gate = tl.zeros([BLOCK_R], tl.float64)
    if HAS_GATE:
        gate_rows = open_gate_ptr + head[:, None] * (OPEN + 1) + 1 + row[None, :]
        gates = tl.load(gate_rows, mask=in_group[:, None] & (row < count)[None, :], other=0.0)
        gate = tl.load(open_gate_ptr + head * (OPEN + 1) + count, mask=in_group, other=0.0)
    start = tl.full([], 0, tl.int32)
    if HAS_DOC and not START_GIVEN:
        start = tl.load(starts_ptr + b * room + tl.maximum(tokens - 1, 0))
    for i in range(n):
        slot = count + i
        at = (b * n + i) * H + h
        k = tl.load(k_ptr + at * HEAD_DIM + dim, mask=in_dim, other=0.0)
        tl.store(raw_k_ptr + (bh * OPEN + slot) * HEAD_DIM + dim, k, mask=in_dim)
        if REFLECTIONS:
            raw_w = tl.load(w_ptr + at * HEAD_DIM + dim, mask=in_dim, other=0.0)
            beta = tl.load(beta_ptr + at)
            tl.store(raw_w_ptr + (bh * OPEN + slot) * HEAD_DIM + dim, raw_w, mask=in_dim)
            tl.store(raw_beta_ptr + bh * OPEN + slot, beta)
            w = raw_w.to(tl.float32)
            keys -= beta * tl.sum(keys * w[None, :], 1)[:, None] * w[None, :]
        here = (row == slot)[:, None]
        keys = tl.where(here, k.to(tl.float32)[None, :], keys)
        v = tl.load(v_ptr + at * HEAD_DIM_V + dim_v, mask=in_dim_v, other=0.0)
        tl.store(values_ptr + (tokens + i) * HEAD_DIM_V + dim_v, v, mask=in_dim_v)
        values = tl.where(here, v[None, :], values)
        if HAS_DOC:
            if START_GIVEN:
                start = tl.load(start_ptr + b * n + i)
            tl.store(starts_ptr + b * room + tokens + i, start, mask=h == 0)

        q = load_matrix(q_ptr + at * GROUP * HEAD_DIM, r, dim, HEAD_DIM, GROUP).to(tl.float32)
        logits = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        if HAS_GATE:
            g = tl.load(log_gate_ptr + at * GROUP + r, mask=in_group, other=0.0)
            gate += tl.maximum(g.to(tl.float64), CLOSED)
            tl.store(open_gate_ptr + head * (OPEN + 1) + slot + 1, gate, mask=in_group)
            gates = tl.where((row == slot)[None, :], gate[:, None], gates)
            length = tl.sqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), 0))
            tl.store(key_size_ptr + bh, tl.maximum(tl.load(key_size_ptr + bh), length))
            logits += (gate[:, None] - gates).to(tl.float32) * LOG2_E
        seen = row <= slot
        if HAS_DOC:
            seen = seen & (first + row >= start)
        logits = tl.where(seen[None, :], logits, float("-inf"))
        m = tl.max(logits, 1)
        p = tl.exp2(logits - m[:, None])
        part = (bh * (splits + 1) + splits) * n * GROUP + i * GROUP + r
        tl.store(m_ptr + part, m, mask=in_group)
        tl.store(l_ptr + part, tl.sum(p, 1), mask=in_group)
        acc = tl.dot(p.to(values.dtype), values, input_precision=PRECISION)
        acc_mask = in_group[:, None] & in_dim_v[None, :]
        tl.store(acc_ptr + part[:, None] * HEAD_DIM_V + dim_v[None, :], acc, mask=acc_mask)
    in_keys = (row < count + n)[:, None] & in_dim[None, :]
    places = row[:, None] * HEAD_DIM + dim[None, :]
    tl.store(open_keys_ptr + places, keys, mask=in_keys)
    if (closes > 0) & (count + n == TOKENS):
        closed_ptr = keys_ptr + (bh * room + first) * HEAD_DIM
        tl.store(closed_ptr + places, keys.to(keys_ptr.dtype.element_ty), mask=in_keys)
        if HAS_GATE:
            tl.store(gate_end_ptr + head * groups + closed, gate, mask=in_group)
            tl.store(open_gate_ptr + head * (OPEN + 1), gate, mask=in_group)
            after = (gate[:, None] - gates).to(tl.float32)
            after_ptr = gate_after_ptr + head[:, None] * room + first + row[None, :]
            tl.store(after_ptr, after, mask=in_group[:, None] & (row < TOKENS)[None, :])


@kernel
def carry_kernel(
    x_ptr, moved_ptr, position_ptr, suffix_ptr, n, slots, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """moved = suffix x of a block, BLOCK_P components of it; the last block takes x as it is."""
    bh, level = tl.program_id(0).to(tl.int64), tl.program_id(1)
    closed = tl.load(position_ptr + 1).to(tl.int32)
    if ((closed >> level) & 1 == 1) & ((closed & ((1 << level) - 1)) != 0):
        M = n * GROUP
        rows, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        part = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
        x = load_matrix(x_ptr + bh * M * HEAD_DIM, rows, dim, HEAD_DIM, M)
        suffix_ptr += (bh * slots + level) * HEAD_DIM * HEAD_DIM
        suffix = load_matrix(suffix_ptr, part, dim, HEAD_DIM, HEAD_DIM)
        moved = tl.dot(x, tl.trans(suffix), input_precision=PRECISION)
        moved_ptr += (bh * slots + level) * M * HEAD_DIM
        mask = (rows < M)[:, None] & (part < HEAD_DIM)[None, :]
        tl.store(moved_ptr + rows[:, None] * HEAD_DIM + part[None, :], moved, mask=mask)


@kernel
def reach_kernel(
    q_ptr, k_ptr, position_ptr, gate_end_ptr, open_gate_ptr, key_size_ptr, reach_ptr, n, groups,
    scale, margin, H, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, TOKENS: tl.constexpr, OPEN: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """The first closed token that a head must read.

    No reflection lengthens a vector, so a logit is at most scale |q| max |k| plus its gate, and a
    row's sum holds exp(scale q . k) of its own token: a group is skipped if the first, times the
    number of tokens, is exp(-margin) of the second or less. Earlier groups then are, too.
    """
    bh = tl.program_id(0).to(tl.int64)
    tokens = tl.load(position_ptr)
    closed = tl.load(position_ptr + 1).to(tl.int32)
    count = (tokens - closed * TOKENS).to(tl.int32)
    rows, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    i, r = rows // GROUP, rows % GROUP
    in_rows = rows < n * GROUP
    in_tile = in_rows[:, None] & (dim < HEAD_DIM)[None, :]
    at = ((bh // H) * n + i) * H + bh % H
    q_at = (at * GROUP + r)[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=in_tile, other=0.0).to(tl.float32)
    k_at = at[:, None] * HEAD_DIM + dim[None, :]
    k = tl.load(k_ptr + k_at, mask=in_tile, other=0.0).to(tl.float32)
    head = bh * GROUP + r
    gate_at = head * (OPEN + 1) + count + 1 + i
    gate = tl.load(open_gate_ptr + gate_at, mask=in_rows, other=0.0)
    largest = tl.sqrt(tl.sum(q * q, 1)) * tl.load(key_size_ptr + bh) * tl.abs(scale)
    slack = tl.sum(q * k, 1) * scale - largest - tl.log((tokens + n).to(tl.float32)) - margin
    hidden = tl.zeros([BLOCK_G], tl.int32)
    for first in range(0, closed, BLOCK_G):
        place = first + tl.arange(0, BLOCK_G)
        seen = in_rows[:, None] & (place < closed)[None, :]
        end = tl.load(gate_end_ptr + head[:, None] * groups + place[None, :], mask=seen, other=0.0)
        over = seen & ((gate[:, None] - end).to(tl.float32) > slack[:, None])
        hidden += tl.where((tl.max(over.to(tl.int32), 0) == 0) & (place < closed), 1, 0)
    tl.store(reach_ptr + bh, tl.sum(hidden, 0) * TOKENS)


@kernel
def attend_kernel(
    x_ptr, moved_ptr, position_ptr, keys_ptr, values_ptr, gate_end_ptr, gate_after_ptr, starts_ptr,
    open_gate_ptr, reach_ptr, m_ptr, l_ptr, acc_ptr, n, room, groups, scale, H, splits, slots,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr,
    OPEN: tl.constexpr, REFLECTIONS: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_DOC: tl.constexpr, HAS_REACH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One split of the closed keys; x [bh, M, D] fp32."""
    split, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b = bh // H
    tokens = tl.load(position_ptr)
    closed = tl.load(position_ptr + 1).to(tl.int32)
    count = (tokens - closed * TOKENS).to(tl.int32)
    length = closed * TOKENS
    base = 0
    if HAS_REACH:
        base = tl.load(reach_ptr + bh)
    span = tl.cdiv(tl.cdiv(length - base, splits), BLOCK_N) * BLOCK_N
    rows, dim, dim_v = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    M = n * GROUP
    in_rows, in_dim_v = rows < M, dim_v < HEAD_DIM_V
    x_ptr += bh * M * HEAD_DIM
    keys_ptr += bh * room * HEAD_DIM
    values_ptr += bh * room * HEAD_DIM_V
    head = bh * GROUP + rows % GROUP
    gate = tl.zeros([BLOCK_M], tl.float64)
    if HAS_GATE:
        gate_at = open_gate_ptr + head * (OPEN + 1) + count + 1 + rows // GROUP
        gate = tl.load(gate_at, mask=in_rows, other=0.0)
    lo = base + split * span
    start = tl.zeros([BLOCK_M], tl.int32)
    if HAS_DOC:
        start = tl.load(starts_ptr + b * room + tokens + rows // GROUP, mask=in_rows, other=0)
        earliest = tl.min(tl.where(in_rows, start, 2147483647), 0)
        lo = tl.maximum(lo, earliest // BLOCK_N * BLOCK_N)
    hi = tl.minimum(base + (split + 1) * span, length)

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    while lo < hi:
        stop = hi
        x = load_matrix(x_ptr, rows, dim, HEAD_DIM, M)
        if REFLECTIONS:
            place = lo // TOKENS
            level = highest_bit(closed ^ place)
            block_end = ((place >> level) + 1) << level  # in groups
            stop = tl.minimum(hi, block_end * TOKENS)
            if block_end < closed:
                moved_at = moved_ptr + (bh * slots + level) * M * HEAD_DIM
                x = load_matrix(moved_at, rows, dim, HEAD_DIM, M)
        x = x.to(keys_ptr.dtype.element_ty)
        for j in range(lo, stop, BLOCK_N):
            column = j + tl.arange(0, BLOCK_N)
            limit = stop - j
            offset = tl.arange(0, BLOCK_N)
            k = load_matrix(keys_ptr + j * HEAD_DIM, offset, dim, HEAD_DIM, limit)
            v = load_matrix(values_ptr + j * HEAD_DIM_V, offset, dim_v, HEAD_DIM_V, limit)
            logits = tl.dot(x, tl.trans(k), input_precision=PRECISION) * scale
            seen = in_rows[:, None] & (offset < limit)[None, :]
            if HAS_GATE:
                after_ptr = gate_after_ptr + head[:, None] * room + column[None, :]
                after = tl.load(after_ptr, mask=seen, other=0.0)
                if BLOCK_N == TOKENS:  # a tile is a group
                    end_ptr = gate_end_ptr + head * groups + j // TOKENS
                    to_end = gate - tl.load(end_ptr, mask=in_rows, other=0.0)
                    after += to_end.to(tl.float32)[:, None]
                else:
                    ends_ptr = gate_end_ptr + head[:, None] * groups + column[None, :] // TOKENS
                    to_ends = gate[:, None] - tl.load(ends_ptr, mask=seen, other=0.0)
                    after += to_ends.to(tl.float32)
                logits += after * LOG2_E
            if HAS_DOC:
                seen = seen & (column[None, :] >= start[:, None])
            logits = tl.where(seen, logits, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(logits, 1))
            origin = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(logits - origin[:, None])
            shrink = tl.exp2(m_i - origin)
            l_i = l_i * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
            m_i = m_new
        lo = stop
    part = (bh * (splits + 1) + split) * M + rows
    tl.store(m_ptr + part, m_i, mask=in_rows)
    tl.store(l_ptr + part, l_i, mask=in_rows)
    acc_mask = in_rows[:, None] & in_dim_v[None, :]
    tl.store(acc_ptr + part[:, None] * HEAD_DIM_V + dim_v[None, :], acc, mask=acc_mask)


@kernel
def combine_kernel(
    m_ptr, l_ptr, acc_ptr, out_ptr, position_ptr, n, room, H, splits, closes, GROUP: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_S: tl.constexpr, OPEN: tl.constexpr,
):  # fmt: skip
    """out [B, n, HQ, DV] of one query row; the first program counts the tokens."""
    bh, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    M = n * GROUP
    dim_v = tl.arange(0, BLOCK_DV)
    in_dim = dim_v < HEAD_DIM_V
    split = tl.arange(0, BLOCK_S)
    part = (bh * (splits + 1) + split) * M + row
    there = split <= splits
    m = tl.load(m_ptr + part, mask=there, other=float("-inf"))
    l_i = tl.load(l_ptr + part, mask=there, other=0.0)
    # A maximum drops NaN, which the last split has if there was no room.
    own = tl.load(m_ptr + (bh * (splits + 1) + splits) * M + row)
    weight = tl.exp2(m - tl.max(m, 0)) + (own - own)
    acc_mask = there[:, None] & in_dim[None, :]
    acc = tl.load(
        acc_ptr + part[:, None] * HEAD_DIM_V + dim_v[None, :], mask=acc_mask, other=0.0
    )  # fmt: skip
    out = tl.sum(acc * weight[:, None], 0) / tl.sum(l_i * weight, 0)
    i, r = row // GROUP, row % GROUP
    place = (((bh // H) * n + i) * H + bh % H) * GROUP + r
    tl.store(
        out_ptr + place * HEAD_DIM_V + dim_v, out.to(out_ptr.dtype.element_ty), mask=in_dim
    )  # fmt: skip
    if (bh == 0) & (row == 0):
        tokens = tl.load(position_ptr)
        closed = tl.load(position_ptr + 1)
        count = tokens + n - closed * TOKENS
        if (tokens + n <= room) & (count <= OPEN):
            tl.store(position_ptr, tokens + n)
            if (closes > 0) & (count == TOKENS):
                tl.store(position_ptr + 1, closed + 1)
