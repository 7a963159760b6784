"""Gradients of eq. 19. With x^ = R x, g = dL/d out, gb = g / den (den as clamped in the forward pass):

    dphi^_m = sum_{n<=m} (gb_m . v_n) psi^_n          delta_m = -(phi_m . R^T dphi^_m) / den_m
    dphi_m  = R^T dphi^_m + delta_m Z_m               Z_m = sum_{n<=m} psi_n
    T_n     = sum_{m>=n} phi^_m gb_m^T                W_n = sum_{m>=n} delta_m phi_m
    dpsi_n  = R^T T_n v_n + W_n                       dv_n = T_n^T psi^_n

Of log decay and angle steps each token's part is stored, <phi, dphi> and <psi, dpsi>, <J phi, R^T dphi^> and
<J psi, R^T dpsi^> with a quarter turn J of each pair; their sums over tokens are left to the caller.

With decay each product of a query and a key is times e^(D_m - D_n); T and W are as the token before their
chunk sees them.

``dq`` scans forward with the state S, ``dkv`` backward with T. Where a state does not fit on chip, the
programs split their output: dq and dk by feature pairs (W of them), dv by values (BE).
"""

import triton
import triton.language as tl

from linrope_kernels.pieces import (
    divisor,
    dot,
    factors,
    fade,
    feature,
    in_registers,
    in_twos,
    join,
    keep,
    load_decay,
    load_pairs,
    load_state,
    load_sum,
    load_turn,
    load_values,
    operand,
    power,
    rotate,
    rotate_back,
    slope,
    store_angles,
    store_pairs,
    store_state,
    store_sum,
    store_values,
    tile_power,
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
    e = tl.arange(0, BE)
    seen = c[:, None] >= c[None, :]
    if LOG is not None:
        LOG += batch * log_strides[0] + kv_head.to(tl.int64) * log_strides[2]

    first, end, entry = tokens_of(SLOTS, segment, length, n)
    start = sequence * segments + segment if CAUSAL else sequence + entry * (h // group)
    s1, s2 = load_state(S, start, pairs, e, F, E, P, INTERLEAVED)
    z1, z2 = load_sum(Z, start, pairs, F, P, INTERLEAVED)
    for t in tl.range(first, end, C, num_stages=STAGES):
        rows = t + c
        inside = rows < end
        if LOG is not None:
            sums, total = load_decay(LOG, log_strides, rows, inside)
            at, last, chunk = in_twos(sums), in_twos(total), factors(total)
            queries, keys = power(at[0], at[1]), power(last[0] - at[0], last[1] - at[1])
            tile = tile_power(at, at)
            faded = (queries, keys, tl.exp(total))
        else:
            faded = None
        turn = load_turn(Q_TABLE, rows, inside, pairs, P)
        gb = load_values(G, rows, inside, g_strides, e, E, BE).to(tl.float32)
        if not CAUSAL:
            gb = in_registers(gb, inside)
        if NORMALIZE:
            den = tl.load(DEN + rows, mask=inside, other=1)
            gb = gb / divisor(den, eps, ADD)[:, None]
            if BLOCKS > 1:
                out = load_values(OUT, rows, inside, out_strides, e, E, BE).to(tl.float32)
                delta = -tl.sum(gb * out, 1)
        gb = operand(gb, DOT)
        d1, d2 = tl.zeros([C, W], tl.float32), tl.zeros([C, W], tl.float32)
        d1, d2 = dot(gb, operand(s1, DOT), d1, DOT), dot(gb, operand(s2, DOT), d2, DOT)
        if CAUSAL:
            visible = inside
            if MASK is not None:
                visible = inside & (tl.load(MASK + rows, mask=inside, other=0) != 0)
            key_turn = turn
            if K_TABLE is not None:
                key_turn = load_turn(K_TABLE, rows, inside, pairs, P)
            y1, y2 = load_pairs(K, rows, inside, k_strides, block * W, F, P, INTERLEAVED, C, W)
            psi1, psi2 = keep(feature(y1, MAP), feature(y2, MAP), visible, pairs, F, W)
            psi1_hat, psi2_hat = rotate(psi1, psi2, key_turn, P)
            psi1_hat, psi2_hat = operand(psi1_hat, DOT), operand(psi2_hat, DOT)
            v = load_values(V, rows, visible, v_strides, e, E, BE)
            kept = v
            if LOG is not None:
                kept = v.to(tl.float32) * keys[:, None]
            v, kept = operand(v, DOT), operand(kept, DOT)
            d_scores = dot(gb, tl.trans(v), tl.zeros([C, C], tl.float32), DOT)
            if LOG is not None:
                d_scores = d_scores * tile
                d1, d2 = d1 * queries[:, None], d2 * queries[:, None]
                s1, s2 = fade(s1, chunk), fade(s2, chunk)
            d_scores = operand(tl.where(seen, d_scores, 0.0), DOT)
            d1, d2 = dot(d_scores, psi1_hat, d1, DOT), dot(d_scores, psi2_hat, d2, DOT)
            s1 = dot(tl.trans(kept), psi1_hat, s1, DOT)
            s2 = dot(tl.trans(kept), psi2_hat, s2, DOT)
        d1, d2 = rotate_back(d1, d2, turn, P)
        x1, x2 = load_pairs(Q, rows, inside, q_strides, block * W, F, P, INTERLEAVED, C, W)
        token = (batch * n + rows) * h + head % h
        if D_ANGLES is not None:
            turned = feature(x1, MAP) * d2 - feature(x2, MAP) * d1
            store_angles(D_ANGLES, turned, token, inside, pairs, P)
        if NORMALIZE:
            if BLOCKS == 1:
                delta = -tl.sum(feature(x1, MAP) * d1 + feature(x2, MAP) * d2, 1) / divisor(den, eps, ADD)
            if not ADD:
                delta = tl.where(den < eps, 0.0, delta)  # there max(den, eps) is constant
            if block == 0:
                tl.store(DELTA + rows, delta, mask=inside)
            if CAUSAL:
                psi1, psi2, z1, z2 = join(psi1, psi2, z1, z2, c == 0, faded)
                weights = tl.where(seen, delta[:, None], 0.0)
                if LOG is not None:
                    weights = weights * tile
                weights = operand(weights, DOT)
                d1, d2 = dot(weights, operand(psi1, DOT), d1, DOT), dot(weights, operand(psi2, DOT), d2, DOT)
            else:
                d1 += delta[:, None] * z1.to(tl.float32)[None, :]
                d2 += delta[:, None] * z2.to(tl.float32)[None, :]
        if D_LOG is not None:
            grown = tl.sum(feature(x1, MAP) * d1 + feature(x2, MAP) * d2, 1)
            if NORMALIZE and not ADD:
                grown = tl.where(den < eps, grown, 0.0)  # elsewhere out does not change with phi's length
            tl.store(D_LOG + token * BLOCKS + block, grown, mask=inside)
        d1, d2 = d1 * slope(x1, MAP), d2 * slope(x2, MAP)
        store_pairs(DQ, d1, d2, rows, inside, dq_strides, block * W, F, P, INTERLEAVED, C, W)


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
    e = value_block * BE + tl.arange(0, BE)
    seen = c[:, None] <= c[None, :]  # rows are keys here, columns queries
    if LOG is not None:
        LOG += batch * log_strides[0] + kv_head.to(tl.int64) * log_strides[2]

    first, end, entry = tokens_of(SLOTS, segment, length, m)
    start = sequence * segments + segment if CAUSAL else sequence + entry * g
    t1, t2 = load_state(T, start, pairs, e, F, E, P, INTERLEAVED)
    u1, u2 = load_sum(U, start, pairs, F, P, INTERLEAVED)
    chunks = tl.cdiv(end - first, C)
    for i in tl.range(0, chunks, num_stages=STAGES):
        t = first + (chunks - 1 - i) * C
        rows = t + c
        inside = rows < end
        if LOG is not None:
            sums, total = load_decay(LOG, log_strides, rows, inside)
            near, last, chunk = in_twos(sums), in_twos(total), factors(total)
            queries = power(near[0], near[1])[:, None]
            keys = power(last[0] - near[0], last[1] - near[1])[:, None]
            tile = power(near[0][None, :] - near[0][:, None], near[1][None, :] - near[1][:, None])
        visible = inside
        if MASK is not None:
            visible = inside & (tl.load(MASK + rows, mask=inside, other=0) != 0)
        turn = load_turn(Q_TABLE, rows, inside, pairs, P)
        key_turn = turn
        if K_TABLE is not None:
            key_turn = load_turn(K_TABLE, rows, inside, pairs, P)
        y1, y2 = load_pairs(K, rows, inside, k_strides, pair_block * W, F, P, INTERLEAVED, C, W)
        if WANT_DV:
            psi1, psi2 = keep(feature(y1, MAP), feature(y2, MAP), visible, pairs, F, W)
            psi1, psi2 = rotate(psi1, psi2, key_turn, P)
            psi1, psi2 = operand(psi1, DOT), operand(psi2, DOT)
            dv = tl.zeros([C, BE], tl.float32)
            dv = dot(psi1, tl.trans(operand(t1, DOT)), dv, DOT)
            dv = dot(psi2, tl.trans(operand(t2, DOT)), dv, DOT)
        if WANT_DK:
            v = operand(load_values(V, rows, visible, v_strides, e, E, BE), DOT)
            if not CAUSAL:
                v = in_registers(v, visible)
            d1, d2 = tl.zeros([C, W], tl.float32), tl.zeros([C, W], tl.float32)
            d1, d2 = dot(v, operand(t1, DOT), d1, DOT), dot(v, operand(t2, DOT), d2, DOT)
            w1 = tl.zeros([C, W], tl.float32) + u1.to(tl.float32)[None, :]
            w2 = tl.zeros([C, W], tl.float32) + u2.to(tl.float32)[None, :]
        if LOG is not None:
            if WANT_DV:
                dv = dv * keys
            if WANT_DK:
                d1, d2, w1, w2 = d1 * keys, d2 * keys, w1 * keys, w2 * keys
                u1, u2 = u1 * tl.exp(total), u2 * tl.exp(total)
            t1, t2 = fade(t1, chunk), fade(t2, chunk)
        if CAUSAL:
            for r in range(group):
                head = (kv_head * group + r).to(tl.int64)
                at = (sequence * group + r) * m + rows
                gb = load_values(G + head * g_strides[2], rows, inside, g_strides, e, E, BE)
                if NORMALIZE:
                    den = tl.load(DEN + at, mask=inside, other=1)
                    gb = gb.to(tl.float32) / divisor(den, eps, ADD)[:, None]
                elif not WANT_DV:  # v gb^T would be a product of two copies
                    gb = in_registers(gb, inside)
                gb = operand(gb, DOT)
                x1, x2 = load_pairs(
                    Q + head * q_strides[2], rows, inside, q_strides, pair_block * W,
                    F, P, INTERLEAVED, C, W,
                )  # fmt: skip
                phi1, phi2 = keep(feature(x1, MAP), feature(x2, MAP), inside, pairs, F, W)
                phi1_hat, phi2_hat = rotate(phi1, phi2, turn, P)
                phi1_hat, phi2_hat = operand(phi1_hat, DOT), operand(phi2_hat, DOT)
                if WANT_DV:
                    scores = dot(psi1, tl.trans(phi1_hat), tl.zeros([C, C], tl.float32), DOT)
                    scores = dot(psi2, tl.trans(phi2_hat), scores, DOT)
                    if LOG is not None:
                        scores = scores * tile
                    dv = dot(operand(tl.where(seen, scores, 0.0), DOT), gb, dv, DOT)
                if WANT_DK:
                    d_scores = dot(v, tl.trans(gb), tl.zeros([C, C], tl.float32), DOT)
                    if LOG is not None:
                        d_scores = d_scores * tile
                    d_scores = operand(tl.where(seen, d_scores, 0.0), DOT)
                    d1, d2 = dot(d_scores, phi1_hat, d1, DOT), dot(d_scores, phi2_hat, d2, DOT)
                    if NORMALIZE:
                        delta = tl.load(DELTA + at, mask=inside, other=0)
                        weights = tl.where(seen, delta[None, :], 0.0)
                        if LOG is not None:
                            weights = weights * tile
                        weights = operand(weights, DOT)
                        w1 = dot(weights, operand(phi1, DOT), w1, DOT)
                        w2 = dot(weights, operand(phi2, DOT), w2, DOT)
                        if LOG is not None:
                            phi1, phi2 = phi1 * queries, phi2 * queries
                        u1 += tl.sum(phi1 * delta[:, None], 0).to(tl.float64)
                        u2 += tl.sum(phi2 * delta[:, None], 0).to(tl.float64)
                if LOG is not None:
                    gb = operand(gb.to(tl.float32) * queries, DOT)
                t1 = dot(tl.trans(gb), phi1_hat, t1, DOT)
                t2 = dot(tl.trans(gb), phi2_hat, t2, DOT)
        if WANT_DV:
            dv = tl.where(visible[:, None], dv, 0.0)
            store_values(DV, dv, rows, inside, dv_strides, e, E, BE)
        if WANT_DK:
            d1, d2 = rotate_back(d1, d2, key_turn, P)
            token = (batch * m + rows) * g + kv_head
            if D_ANGLES is not None:
                turned = tl.where(visible[:, None], feature(y1, MAP) * d2 - feature(y2, MAP) * d1, 0.0)
                store_angles(D_ANGLES, turned, token, inside, pairs, P)
            d1, d2 = d1 + w1, d2 + w2
            if D_LOG is not None:
                grown = tl.sum(feature(y1, MAP) * d1 + feature(y2, MAP) * d2, 1)
                tl.store(D_LOG + token * PAIR_BLOCKS + pair_block, tl.where(visible, grown, 0.0), mask=inside)
            d1 = tl.where(visible[:, None], d1 * slope(y1, MAP), 0.0)
            d2 = tl.where(visible[:, None], d2 * slope(y2, MAP), 0.0)
            store_pairs(DK, d1, d2, rows, inside, dk_strides, pair_block * W, F, P, INTERLEAVED, C, W)

    if WANT_DK and CAUSAL and SLOTS is None and T_END is not None and segments == 1:
        store_state(T_END, sequence, t1, t2, pairs, e, F, E, P, INTERLEAVED)
        store_sum(U_END, sequence, u1, u2, pairs, F, P, INTERLEAVED)
