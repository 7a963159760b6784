"""Causal and bidirectional eq. 19: one scan over a segment's chunks, the state on chip.

    num_i = sum_j <R phi_i, R psi_j> v_j     den_i = sum_j <phi_i, psi_j>     out_i = num_i / max(den_i, eps)

With decay each term is times e^(D_i - D_j), for D the sum of the tokens' log decay, formed from the chunk's
start; a state is as the last token of its chunk sees it. ADD: out_i = num_i / (den_i + eps).

Where there are too few heads to fill the GPU a sequence is cut into segments: ``states`` makes each
segment's own state, ``prefix`` adds up those before it, and the scans of all segments run at once. Packed
sequences are cut at their ends too: a table on the device (SLOTS) tells each segment's tokens.

Axis letters as in linrope, and s segment; heads are numbered b h, sequences of keys b g.
"""

import triton
import triton.language as tl

from linrope_kernels.decay import as_columns, as_rows, exponents, factors, fade, load_decay, power
from linrope_kernels.pieces import (
    divisor,
    dot,
    feature,
    features,
    in_registers,
    join,
    keep,
    load_features,
    load_state,
    load_sum,
    load_turn,
    load_values,
    operand,
    rotate,
    store_state,
    store_sum,
    store_values,
    sum_of_products,
    tokens_of,
)


@triton.jit(do_not_specialize=["n", "h", "segments", "length"])
def scan_fwd_kernel(
    Q, q_strides,  # (b, n, h, f)
    K, k_strides,  # (b, m, g, f)
    V, v_strides,  # (b, m, g, e)
    MASK,  # (b, m) bool
    Q_TABLE, q_table_strides,  # (1 or b, 1 or g, n, 2 P): cos and sin
    K_TABLE, k_table_strides,  # (1 or b, 1 or g, m, 2 P), None: as Q_TABLE
    LOG, log_strides,  # (b or 1, n, g or 1) float32 or float64: log decay; strides of 0 for axes of length 1
    SLOTS,  # (s, 3) int32 of packed sequences
    S, Z,  # (b g, s, f, e) float32 and (b g, s, f) float64: the state before each segment; None: 0
    OUT, out_strides,  # (b, n, h, e)
    DEN,  # (b, h, n) float32
    S_END, Z_END,  # (b g, f, e), (b g, f); None: not wanted
    n, h, group, segments, length, eps,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
    MAP: tl.constexpr, INTERLEAVED: tl.constexpr, ADD: tl.constexpr,
    CAUSAL: tl.constexpr, NORMALIZE: tl.constexpr,
    DOT: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out, and where wanted den and the last state; one program per (head, segment, value block)."""
    BLOCKS: tl.constexpr = (E + BE - 1) // BE
    block = tl.program_id(0) % BLOCKS
    segment = tl.program_id(0) // BLOCKS % segments
    head = tl.program_id(0) // BLOCKS // segments
    batch, kv_head = (head // h).to(tl.int64), head % h // group
    sequence = (head // group).to(tl.int64)

    Q += batch * q_strides[0] + (head % h).to(tl.int64) * q_strides[2]
    K += batch * k_strides[0] + kv_head.to(tl.int64) * k_strides[2]
    V += batch * v_strides[0] + kv_head.to(tl.int64) * v_strides[2]
    OUT += batch * out_strides[0] + (head % h).to(tl.int64) * out_strides[2]
    if MASK is not None:
        MASK += batch * n
    if DEN is not None:
        DEN += head.to(tl.int64) * n
    if P > 0:
        Q_TABLE += batch * q_table_strides[0] + kv_head.to(tl.int64) * q_table_strides[1]
    if K_TABLE is not None:
        K_TABLE += batch * k_table_strides[0] + kv_head.to(tl.int64) * k_table_strides[1]

    c = tl.arange(0, C)
    f = features(0, F, P, INTERLEAVED, W)
    e = block * BE + tl.arange(0, BE)
    seen = c[:, None] >= c[None, :]
    if LOG is not None:
        LOG += batch * log_strides[0] + kv_head.to(tl.int64) * log_strides[2]

    first, end, entry = tokens_of(SLOTS, segment, length, n)
    start = sequence * segments + segment if CAUSAL else sequence + entry * (h // group)
    s = load_state(S, start, f, e, F, E)
    z = load_sum(Z, start, f, F)
    for t in tl.range(first, end, C, num_stages=STAGES):
        rows = t + c
        inside = rows < end
        if LOG is not None:
            sums, total = load_decay(LOG, log_strides, rows, inside, DOT)
            at, chunk = as_rows(exponents(sums, DOT)), factors(total)
            queries, keys = power(at, (0, 0), DOT), power(exponents(total, DOT), at, DOT)
            faded = (queries, keys, chunk)
        else:
            faded = None
        turn = load_turn(Q_TABLE, rows, inside, 0, F, P, INTERLEAVED, C, W)
        key_turn = turn
        if CAUSAL:
            visible = inside
            if MASK is not None:
                visible = inside & (tl.load(MASK + rows, mask=inside, other=0) != 0)
            if K_TABLE is not None:
                key_turn = load_turn(K_TABLE, rows, inside, 0, F, P, INTERLEAVED, C, W)
            y = load_features(K, rows, inside, k_strides, 0, F, P, INTERLEAVED, C, W)
            psi = keep(feature(y, MAP), visible, 0, F, W)
            psi_hat = rotate(psi, key_turn, P)
            kept = operand(psi_hat if LOG is None else psi_hat * keys, DOT)
            psi_hat = operand(psi_hat, DOT)
            psi, z = join(psi, z, c == 0, faded)
            psi = operand(psi, DOT)
            v = operand(load_values(V, rows, visible, v_strides, e, E, BE), DOT)
        x = load_features(Q, rows, inside, q_strides, 0, F, P, INTERLEAVED, C, W)
        if not CAUSAL:
            x = in_registers(x, inside)
        phi = feature(x, MAP)
        phi_hat = operand(rotate(phi, turn, P), DOT)
        if LOG is not None:  # one tile for both products, gone before the state is read
            tile = power(at, as_columns(exponents(sums, DOT)), DOT)
            scores = dot(phi_hat, tl.trans(psi_hat), tl.zeros([C, C], tl.float32), DOT) * tile
        if NORMALIZE:
            if CAUSAL:
                weights = dot(operand(phi, DOT), tl.trans(psi), tl.zeros([C, C], tl.float32), DOT)
                if LOG is not None:
                    weights = weights * tile
                den = tl.sum(tl.where(seen, weights, 0.0), 1)
            else:
                den = sum_of_products(phi, z.to(tl.float32)[None, :], 1)
            if DEN is not None and block == 0:
                tl.store(DEN + rows, den, mask=inside)
        num = dot(phi_hat, tl.trans(operand(s, DOT)), tl.zeros([C, BE], tl.float32), DOT)
        if CAUSAL:
            if LOG is None:
                scores = dot(phi_hat, tl.trans(psi_hat), tl.zeros([C, C], tl.float32), DOT)
            else:
                num = num * queries
                s = fade(s, chunk)
            scores = tl.where(seen, scores, 0.0)
            num = dot(operand(scores, DOT), v, num, DOT)
            s = dot(tl.trans(v), kept, s, DOT)
        if NORMALIZE:
            num = num / divisor(den, eps, ADD)[:, None]
        store_values(OUT, num, rows, inside, out_strides, e, E, BE)

    if CAUSAL and SLOTS is None and S_END is not None and segments == 1 and head % group == 0:
        store_state(S_END, sequence, s, f, e, F, E)
        if block == 0:
            store_sum(Z_END, sequence, z, f, F)


@triton.jit(do_not_specialize=["m", "g", "segments", "length"])
def states_kernel(
    X, x_strides,  # (b, m, heads, f): k, or q for the backward pass
    Y, y_strides,  # (b, m, heads, e): v, or g
    MASK,  # (b, m) bool
    DEN, DELTA,  # (b, h, m) float32, for the backward pass
    TABLE, table_strides,  # (1 or b, 1 or g, m, 2 P)
    LOG, log_strides, SLOTS,
    S, Z,  # (b g, s, f, e), (b g, s, f)
    TOTALS,  # (b g, s) float64, with decay: its sum over each segment
    m, g, group, segments, length, eps,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
    MAP: tl.constexpr, INTERLEAVED: tl.constexpr, ADD: tl.constexpr,
    NORMALIZE: tl.constexpr, REVERSE: tl.constexpr,
    DOT: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each segment's own state: S = sum R psi v^T, z = sum psi; one program per (b g, segment, block).

    REVERSE: T = sum R phi g^T / den and W = sum delta phi / den, over all query heads. With decay
    S and z are as the segment's last token sees them, T and W as the token before it does. From there on
    chunks are taken, so that what lies between is known, and nothing that was added has to fade again.
    """
    BLOCKS: tl.constexpr = (E + BE - 1) // BE
    block = tl.program_id(0) % BLOCKS
    segment = tl.program_id(0) // BLOCKS % segments
    sequence = tl.program_id(0) // BLOCKS // segments
    batch, kv_head = (sequence // g).to(tl.int64), sequence % g
    sequence = sequence.to(tl.int64)

    X += batch * x_strides[0]
    Y += batch * y_strides[0]
    if MASK is not None:
        MASK += batch * m
    if P > 0:
        TABLE += batch * table_strides[0] + kv_head.to(tl.int64) * table_strides[1]

    c = tl.arange(0, C)
    f = features(0, F, P, INTERLEAVED, W)
    e = block * BE + tl.arange(0, BE)
    s, z = tl.zeros([BE, 2 * W], tl.float32), tl.zeros([2 * W], tl.float64)
    first, end, _ = tokens_of(SLOTS, segment, length, m)
    if LOG is not None:
        LOG += batch * log_strides[0] + kv_head.to(tl.int64) * log_strides[2]
    between = tl.full([], 0, tl.float64)
    chunks = tl.cdiv(end - first, C)
    for i in tl.range(0, chunks, num_stages=STAGES):
        rows = first + (i if REVERSE else chunks - 1 - i) * C + c
        inside = rows < end
        visible = inside
        if MASK is not None:
            visible = inside & (tl.load(MASK + rows, mask=inside, other=0) != 0)
        turn = load_turn(TABLE, rows, inside, 0, F, P, INTERLEAVED, C, W)
        if LOG is not None:
            sums, total = load_decay(LOG, log_strides, rows, inside, DOT)
            at = exponents(between + (sums if REVERSE else total - sums), DOT)
            faded = power(at, (0, 0), DOT)[:, None]
            between += total
        for r in range(group if REVERSE else 1):
            head = (kv_head * group + r if REVERSE else kv_head).to(tl.int64)
            x = load_features(X + head * x_strides[2], rows, inside, x_strides, 0, F, P, INTERLEAVED, C, W)
            y = load_values(Y + head * y_strides[2], rows, visible, y_strides, e, E, BE)
            x = keep(feature(x, MAP), visible, 0, F, W)
            if LOG is not None:
                x = x * faded
            token = (sequence * group + r) * m + rows
            if REVERSE and NORMALIZE:
                x *= (1 / divisor(tl.load(DEN + token, mask=inside, other=1), eps, ADD))[:, None]
            x_hat = rotate(x, turn, P)
            if REVERSE and NORMALIZE:
                x = x * tl.load(DELTA + token, mask=inside, other=0)[:, None]
            s = dot(tl.trans(operand(y, DOT)), operand(x_hat, DOT), s, DOT)
            if NORMALIZE or not REVERSE:
                z += tl.sum(x, 0).to(tl.float64)

    number = sequence * segments + segment
    store_state(S, number, s, f, e, F, E)
    if block == 0:
        store_sum(Z, number, z, f, F)
        if LOG is not None:
            tl.store(TOTALS + number, between)


@triton.jit(do_not_specialize=["g", "segments"])
def prefix_kernel(
    TOTALS,  # (b g, s) float64: log decay of each segment
    FIRST_SLOTS,  # (s + 1,) int32 of packed sequences
    S, Z,  # (b g, s, f, e), (b g, s, f): on entry each segment's own, on exit what comes before it
    S_START, Z_START,  # (b g, f, e), (b g, f); None: 0
    S_END, Z_END,  # None: not wanted
    g, segments,
    F: tl.constexpr, E: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of the states before each segment (REVERSE: after it), and of all; in place, in order."""
    BLOCKS: tl.constexpr = (F * E + BLOCK - 1) // BLOCK
    block = tl.program_id(0) % BLOCKS
    sequence = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i = block * BLOCK + tl.arange(0, BLOCK)
    f = i % BLOCK  # the first block carries z as well
    inside, has_z = i < F * E, i < (F if block == 0 else 0)
    s, z = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float64)
    if S_START is not None:
        s = tl.load(S_START + sequence * F * E + i, mask=inside, other=0)
        z = tl.load(Z_START + sequence * F + f, mask=has_z, other=0).to(tl.float64)
    low, high, base = 0, segments, sequence * segments
    if FIRST_SLOTS is not None:
        FIRST_SLOTS += sequence // g
        low, high, base = tl.load(FIRST_SLOTS), tl.load(FIRST_SLOTS + 1), sequence % g * segments
    for j in range(low, high):
        at = base + (low + high - 1 - j if REVERSE else j)
        own = tl.load(S + at * F * E + i, mask=inside, other=0)
        own_z = tl.load(Z + at * F + f, mask=has_z, other=0)
        tl.store(S + at * F * E + i, s, mask=inside)
        tl.store(Z + at * F + f, z, mask=has_z)
        if TOTALS is not None:
            total = tl.load(TOTALS + at)
            s, z = fade(s, factors(total)), z * tl.exp(total)
        s += own
        z += own_z
    if S_END is not None:
        tl.store(S_END + sequence * F * E + i, s, mask=inside)
        tl.store(Z_END + sequence * F + f, z.to(Z_END.dtype.element_ty), mask=has_z)
