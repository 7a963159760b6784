"""Gradients of eq. 19. With x^ = R x, g = dL/d out (den as clamped in the forward pass):

    dphi^_m = sum_{n<=m} (g_m . v_n) psi^_n / den_m   delta_m = -(phi_m . R^T dphi^_m) = -(g_m . out_m)
    dphi_m  = R^T dphi^_m + delta_m Z_m / den_m       Z_m = sum_{n<=m} psi_n
    T_n     = sum_{m>=n} (phi^_m / den_m) g_m^T       W_n = sum_{m>=n} delta_m phi_m / den_m
    dpsi_n  = R^T T_n v_n + W_n                       dv_n = T_n^T psi^_n

For the gradients of log decay and angle steps the kernels store each token's part: <phi, dphi> and
<psi, dpsi>, <J phi, R^T dphi^> and <J psi, R^T dpsi^>, with J a quarter turn of each pair. gradients.py sums
the parts of log decay, the caller those of angle steps. <phi, dphi> is stored as computed, even where the
normalizer makes it 0 but for rounding: its error cancels a part of that of <psi, dpsi>.

What is divided is a sum or a feature and never g, which the matrix unit then takes as it was copied.

With decay each product of a query and a key is times e^(D_m - D_n); T and W are as the token before their
chunk sees them.

``dq`` scans forward with the state S, ``dkv`` backward with T. Where a state does not fit on chip, the
programs split their output: dq and dk by feature pairs (W of them), dv by values (BE).
"""

import triton
import triton.language as tl

from linrope_kernels.decay import again, as_columns, as_rows, exponents, factors, fade, load_decay, power
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
    quarter_turns,
    rotate,
    rotate_back,
    slope,
    store_angles,
    store_features,
    store_state,
    store_sum,
    store_values,
    sum_of_products,
    tokens_of,
)


@triton.jit(do_not_specialize=["n", "h", "segments", "length"])
def dq_kernel(
    Q, q_strides, K, k_strides, V, v_strides, MASK,
    Q_TABLE, q_table_strides, K_TABLE, k_table_strides,
    LOG, log_strides, SLOTS,
    S, Z,  # (b g, s, f, e), (b g, s, f): the state before each segment
    OUT, out_strides,  # (b, n, h, e): read only where the pairs are split
    G, g_strides,  # (b, n, h, e)
    DEN, DELTA,  # (b, h, n)
    DQ, dq_strides,  # (b, n, h, f)
    D_LOG,  # (b, n, h, blocks of pairs) float32: <phi, dphi>; None: not wanted
    D_ANGLES,  # (b, n, h, P) float32; None: not wanted
    n, h, group, segments, length, eps,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
    MAP: tl.constexpr, INTERLEAVED: tl.constexpr, ADD: tl.constexpr,
    CAUSAL: tl.constexpr, NORMALIZE: tl.constexpr,
    DOT: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq and delta; one program per (head, segment, block of pairs). BE covers E."""
    BLOCKS: tl.constexpr = ((F + 1) // 2 + W - 1) // W
    block = tl.program_id(0) % BLOCKS
    segment = tl.program_id(0) // BLOCKS % segments
    head = tl.program_id(0) // BLOCKS // segments
    batch, kv_head = (head // h).to(tl.int64), head % h // group
    sequence = (head // group).to(tl.int64)

    Q += batch * q_strides[0] + (head % h).to(tl.int64) * q_strides[2]
    K += batch * k_strides[0] + kv_head.to(tl.int64) * k_strides[2]
    V += batch * v_strides[0] + kv_head.to(tl.int64) * v_strides[2]
    if OUT is not None:
        OUT += batch * out_strides[0] + (head % h).to(tl.int64) * out_strides[2]
    G += batch * g_strides[0] + (head % h).to(tl.int64) * g_strides[2]
    DQ += batch * dq_strides[0] + (head % h).to(tl.int64) * dq_strides[2]
    if MASK is not None:
        MASK += batch * n
    if DEN is not None:
        DEN += head.to(tl.int64) * n
    if DELTA is not None:
        DELTA += head.to(tl.int64) * n
    if P > 0:
        Q_TABLE += batch * q_table_strides[0] + kv_head.to(tl.int64) * q_table_strides[1]
    if K_TABLE is not None:
        K_TABLE += batch * k_table_strides[0] + kv_head.to(tl.int64) * k_table_strides[1]

    c = tl.arange(0, C)
    pairs = block * W + tl.arange(0, W)
    f = features(block * W, F, P, INTERLEAVED, W)
    e = tl.arange(0, BE)
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
        turn = load_turn(Q_TABLE, rows, inside, block * W, F, P, INTERLEAVED, C, W)
        grad = load_values(G, rows, inside, g_strides, e, E, BE)
        if not CAUSAL or BLOCKS == 1:  # with three stages there is no shared memory for three of g
            grad = in_registers(grad, inside)
        if NORMALIZE:
            den = tl.load(DEN + rows, mask=inside, other=1)
            scale = 1 / divisor(den, eps, ADD)
            if BLOCKS > 1:
                out = load_values(OUT, rows, inside, out_strides, e, E, BE).to(tl.float32)
                delta = -sum_of_products(grad.to(tl.float32), out, 1)
        grad = operand(grad, DOT)
        d = dot(grad, operand(s, DOT), tl.zeros([C, 2 * W], tl.float32), DOT)
        if CAUSAL:
            visible = inside
            if MASK is not None:
                visible = inside & (tl.load(MASK + rows, mask=inside, other=0) != 0)
            key_turn = turn
            if K_TABLE is not None:
                key_turn = load_turn(K_TABLE, rows, inside, block * W, F, P, INTERLEAVED, C, W)
            y = load_features(K, rows, inside, k_strides, block * W, F, P, INTERLEAVED, C, W)
            psi = keep(feature(y, MAP), visible, block * W, F, W)
            psi_hat = rotate(psi, key_turn, P)
            kept = operand(psi_hat if LOG is None else psi_hat * keys, DOT)
            psi_hat = operand(psi_hat, DOT)
            v = operand(load_values(V, rows, visible, v_strides, e, E, BE), DOT)
            if LOG is not None:
                s = fade(s, chunk)
            s = dot(tl.trans(v), kept, s, DOT)
            if NORMALIZE:
                psi, z = join(psi, z, c == 0, faded)
                psi = operand(psi, DOT)
            d_scores = dot(grad, tl.trans(v), tl.zeros([C, C], tl.float32), DOT)
            if LOG is not None:
                d_scores = d_scores * power(at, as_columns(exponents(sums, DOT)), DOT)
                d = d * queries
            d = dot(operand(tl.where(seen, d_scores, 0.0), DOT), psi_hat, d, DOT)
        if NORMALIZE:
            d = d * scale[:, None]
        d = rotate_back(d, turn, P)
        x = load_features(Q, rows, inside, q_strides, block * W, F, P, INTERLEAVED, C, W)
        phi = feature(x, MAP)
        token = (batch * n + rows) * h + head % h
        if D_ANGLES is not None:
            store_angles(D_ANGLES, quarter_turns(phi, d), token, inside, pairs, P)
        if NORMALIZE:
            if BLOCKS == 1:
                delta = -sum_of_products(phi, d, 1)
            if not ADD:
                delta = tl.where(den < eps, 0.0, delta)  # there max(den, eps) is constant
            if block == 0:
                tl.store(DELTA + rows, delta, mask=inside)
            delta = delta * scale
            if CAUSAL:
                weights = tl.broadcast_to(delta[:, None], C, C)
                if LOG is not None:
                    at = again(exponents(sums, DOT), end)
                    weights = weights * power(as_rows(at), as_columns(at), DOT)
                weights = tl.where(seen, weights, 0.0)
                d = dot(operand(weights, DOT), psi, d, DOT)
            else:
                d += delta[:, None] * z.to(tl.float32)[None, :]
        if D_LOG is not None:
            grown = sum_of_products(phi, d, 1)
            tl.store(D_LOG + token * BLOCKS + block, grown, mask=inside)
        store_features(DQ, d * slope(x, MAP), rows, inside, dq_strides, block * W, F, P, INTERLEAVED, W)


@triton.jit(do_not_specialize=["m", "g", "segments", "length"])
def dkv_kernel(
    Q, q_strides, K, k_strides, V, v_strides, MASK,
    Q_TABLE, q_table_strides, K_TABLE, k_table_strides,
    LOG, log_strides, SLOTS,
    T, U,  # (b g, s, f, e), (b g, s, f): T and W after each segment; None: 0
    G, g_strides, DEN, DELTA,
    DK, dk_strides,  # (b, m, g, f)
    DV, dv_strides,  # (b, m, g, e)
    D_LOG, D_ANGLES,  # (b, m, g, blocks of pairs), (b, m, g, P): of keys
    T_END, U_END,  # (b g, f, e), (b g, f): the gradient of the first state; None: not wanted
    m, g, group, segments, length, eps,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
    MAP: tl.constexpr, INTERLEAVED: tl.constexpr, ADD: tl.constexpr,
    CAUSAL: tl.constexpr, NORMALIZE: tl.constexpr,
    WANT_DK: tl.constexpr, WANT_DV: tl.constexpr,
    DOT: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv, one program per (b g, segment); or one of them, per (b g, segment, block of its columns).

    For dk, BE covers E; for dv, W covers the pairs.
    """
    PAIR_BLOCKS: tl.constexpr = ((F + 1) // 2 + W - 1) // W
    VALUE_BLOCKS: tl.constexpr = (E + BE - 1) // BE
    block = tl.program_id(0) % (PAIR_BLOCKS * VALUE_BLOCKS)
    segment = tl.program_id(0) // (PAIR_BLOCKS * VALUE_BLOCKS) % segments
    sequence = tl.program_id(0) // (PAIR_BLOCKS * VALUE_BLOCKS) // segments
    pair_block, value_block = block // VALUE_BLOCKS, block % VALUE_BLOCKS
    batch, kv_head = (sequence // g).to(tl.int64), sequence % g
    sequence = sequence.to(tl.int64)

    Q += batch * q_strides[0]
    K += batch * k_strides[0] + kv_head.to(tl.int64) * k_strides[2]
    V += batch * v_strides[0] + kv_head.to(tl.int64) * v_strides[2]
    G += batch * g_strides[0]
    DK += batch * dk_strides[0] + kv_head.to(tl.int64) * dk_strides[2]
    DV += batch * dv_strides[0] + kv_head.to(tl.int64) * dv_strides[2]
    if MASK is not None:
        MASK += batch * m
    if P > 0:
        Q_TABLE += batch * q_table_strides[0] + kv_head.to(tl.int64) * q_table_strides[1]
    if K_TABLE is not None:
        K_TABLE += batch * k_table_strides[0] + kv_head.to(tl.int64) * k_table_strides[1]

    c = tl.arange(0, C)
    pairs = pair_block * W + tl.arange(0, W)
    f = features(pair_block * W, F, P, INTERLEAVED, W)
    e = value_block * BE + tl.arange(0, BE)
    seen = c[:, None] <= c[None, :]  # rows are keys here, columns queries
    if LOG is not None:
        LOG += batch * log_strides[0] + kv_head.to(tl.int64) * log_strides[2]

    first, end, entry = tokens_of(SLOTS, segment, length, m)
    start = sequence * segments + segment if CAUSAL else sequence + entry * g
    t = load_state(T, start, f, e, F, E)
    u = load_sum(U, start, f, F)
    chunks = tl.cdiv(end - first, C)
    for i in tl.range(0, chunks, num_stages=STAGES):
        rows = first + (chunks - 1 - i) * C + c
        inside = rows < end
        if LOG is not None:
            sums, total = load_decay(LOG, log_strides, rows, inside, DOT)
            since, chunk = exponents(sums, DOT), factors(total)
            queries = power(since, (0, 0), DOT)[:, None]
            keys = power(exponents(total, DOT), since, DOT)[:, None]
        visible = inside
        if MASK is not None:
            visible = inside & (tl.load(MASK + rows, mask=inside, other=0) != 0)
        turn = load_turn(Q_TABLE, rows, inside, pair_block * W, F, P, INTERLEAVED, C, W)
        key_turn = turn
        if K_TABLE is not None:
            key_turn = load_turn(K_TABLE, rows, inside, pair_block * W, F, P, INTERLEAVED, C, W)
        y = load_features(K, rows, inside, k_strides, pair_block * W, F, P, INTERLEAVED, C, W)
        if WANT_DV:
            psi = rotate(keep(feature(y, MAP), visible, pair_block * W, F, W), key_turn, P)
            psi = operand(psi, DOT)
            dv = dot(psi, tl.trans(operand(t, DOT)), tl.zeros([C, BE], tl.float32), DOT)
        if WANT_DK:
            v = operand(load_values(V, rows, visible, v_strides, e, E, BE), DOT)
            if not CAUSAL:
                v = in_registers(v, visible)
            d = dot(v, operand(t, DOT), tl.zeros([C, 2 * W], tl.float32), DOT)
            w = tl.zeros([C, 2 * W], tl.float32) + u.to(tl.float32)[None, :]
        if LOG is not None:
            if WANT_DV:
                dv = dv * keys
            if WANT_DK:
                d, w = d * keys, w * keys
                u = fade(u, chunk)
            t = fade(t, chunk)
        if CAUSAL:
            for r in range(group):
                head = (kv_head * group + r).to(tl.int64)
                at = (sequence * group + r) * m + rows
                copied = load_values(G + head * g_strides[2], rows, inside, g_strides, e, E, BE)
                grad = operand(copied, DOT)
                x = load_features(
                    Q + head * q_strides[2], rows, inside, q_strides, pair_block * W,
                    F, P, INTERLEAVED, C, W,
                )  # fmt: skip
                phi = keep(feature(x, MAP), inside, pair_block * W, F, W)
                if NORMALIZE:
                    phi *= (1 / divisor(tl.load(DEN + at, mask=inside, other=1), eps, ADD))[:, None]
                phi_hat = rotate(phi, turn, P)
                entering = operand(phi_hat if LOG is None else phi_hat * queries, DOT)
                phi_hat = operand(phi_hat, DOT)
                if WANT_DV:
                    scores = dot(psi, tl.trans(phi_hat), tl.zeros([C, C], tl.float32), DOT)
                    if LOG is not None:
                        scores = scores * power(as_columns(since), as_rows(since), DOT)
                    dv = dot(operand(tl.where(seen, scores, 0.0), DOT), grad, dv, DOT)
                if WANT_DK:
                    written = operand(in_registers(copied, inside), DOT)  # or v g^T would be of two copies
                    d_scores = dot(v, tl.trans(written), tl.zeros([C, C], tl.float32), DOT)
                    if LOG is not None:
                        d_scores = d_scores * power(as_columns(since), as_rows(since), DOT)
                    d_scores = operand(tl.where(seen, d_scores, 0.0), DOT)
                    d = dot(d_scores, phi_hat, d, DOT)
                    if NORMALIZE:
                        delta = tl.load(DELTA + at, mask=inside, other=0)
                        weights = tl.broadcast_to(delta[None, :], C, C)
                        if LOG is not None:
                            once_more = again(since, end)
                            weights *= power(as_columns(once_more), as_rows(once_more), DOT)
                        weights = tl.where(seen, weights, 0.0)
                        w = dot(operand(weights, DOT), operand(phi, DOT), w, DOT)
                        delta = delta[:, None] if LOG is None else delta[:, None] * queries
                        u += sum_of_products(phi, delta, 0).to(tl.float64)
                t = dot(tl.trans(grad), entering, t, DOT)
        if WANT_DV:
            dv = tl.where(visible[:, None], dv, 0.0)
            store_values(DV, dv, rows, inside, dv_strides, e, E, BE)
        if WANT_DK:
            d = rotate_back(d, key_turn, P)
            token = (batch * m + rows) * g + kv_head
            if D_ANGLES is not None:
                turned = tl.where(visible[:, None], quarter_turns(feature(y, MAP), d), 0.0)
                store_angles(D_ANGLES, turned, token, inside, pairs, P)
            d += w
            if D_LOG is not None:
                grown = tl.where(visible, sum_of_products(feature(y, MAP), d, 1), 0.0)
                tl.store(D_LOG + token * PAIR_BLOCKS + pair_block, grown, mask=inside)
            d = tl.where(visible[:, None], d * slope(y, MAP), 0.0)
            store_features(DK, d, rows, inside, dk_strides, pair_block * W, F, P, INTERLEAVED, W)

    if WANT_DK and CAUSAL and SLOTS is None and T_END is not None and segments == 1:
        store_state(T_END, sequence, t, f, e, F, E)
        store_sum(U_END, sequence, u, f, F)
