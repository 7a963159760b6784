"""Gradients of eq. 19. With x^ = R x, dout the gradient of out, and den as clamped in the forward pass:

    dphi^_i = sum_{j<=i} (dout_i . v_j) psi^_j / den_i   delta_i = -(phi_i . R^T dphi^_i) = -(dout_i . out_i)
    dphi_i  = R^T dphi^_i + delta_i z_i / den_i          z_i  = sum_{j<=i} psi_j
    T_j     = sum_{i>=j} (phi^_i / den_i) dout_i^T       dz_j = sum_{i>=j} delta_i phi_i / den_i
    dpsi_j  = R^T T_j v_j + dz_j                         dv_j = T_j^T psi^_j

T is the gradient of the state S, and dz that of z. With decay each product of a query and a key is multiplied
by e^(D_i - D_j), and the T and dz that leave a chunk are decayed to the token before it.

The gradients of log decay and of angle steps are sums over tokens. The kernels store each token's terms:
<phi, dphi> and <psi, dpsi> for log decay, which gradients.py sums; <J phi, R^T dphi^> and <J psi, R^T dpsi^>
for angle steps, which the caller sums. J rotates each pair by 90 degrees. With a normalizer <phi, dphi> is 0
up to rounding, but it is stored as computed: its error cancels part of the error of <psi, dpsi>.

Divide features or sums by den, never dout: dout then goes from the async copy straight to the matrix unit.

``dq`` scans forward with the state S, ``dkv`` backward with T. If a state does not fit on chip, the programs
split their output: dq and dk by feature pairs (W per program), dv by values (BE per program).
"""

import triton
import triton.language as tl

from linrope_kernels.decay import (
    as_columns,
    as_rows,
    decay_state,
    exponent,
    load_decay,
    power,
    rematerialize,
    state_factor,
)
from linrope_kernels.pieces import (
    angle_gradients,
    carry_z,
    divisor,
    dot,
    feature_map,
    feature_offsets,
    load_features,
    load_rotation,
    load_state,
    load_values,
    load_z,
    mask_features,
    operand,
    rotate,
    rotate_back,
    segment_span,
    slope,
    store_angle_gradients,
    store_features,
    store_state,
    store_values,
    store_z,
    sum_of_products,
    through_registers,
)


@triton.jit(do_not_specialize=["n", "h", "segments", "length"])
def dq_kernel(
    Q, q_strides, K, k_strides, V, v_strides, MASK,
    Q_TABLE, q_table_strides, K_TABLE, k_table_strides,
    LOG, log_strides, SPANS, S, Z,  # all as in scan_fwd_kernel
    OUT, out_strides,  # (b, n, h, e); None: one program has all pairs, and out is not read
    DOUT, dout_strides,  # (b, n, h, e)
    DEN, DELTA,  # (b, h, n)
    DQ, dq_strides,  # (b, n, h, f)
    D_LOG,  # (b, n, h, pair blocks) float32: <phi, dphi>; None: not wanted
    D_ANGLES,  # (b, n, h, P) float32: <J phi, R^T dphi^>; None: not wanted
    n, h, group, segments, length, eps,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
    MAP: tl.constexpr, INTERLEAVED: tl.constexpr, ADD: tl.constexpr,
    CAUSAL: tl.constexpr, NORMALIZE: tl.constexpr,
    DOT: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq and delta; one program per (query head, segment, pair block). BE covers all of E."""
    BLOCKS: tl.constexpr = ((F + 1) // 2 + W - 1) // W
    block = tl.program_id(0) % BLOCKS
    segment = tl.program_id(0) // BLOCKS % segments
    bh = tl.program_id(0) // BLOCKS // segments
    batch, kv_head = (bh // h).to(tl.int64), bh % h // group
    bg = (bh // group).to(tl.int64)

    Q += batch * q_strides[0] + (bh % h).to(tl.int64) * q_strides[2]
    K += batch * k_strides[0] + kv_head.to(tl.int64) * k_strides[2]
    V += batch * v_strides[0] + kv_head.to(tl.int64) * v_strides[2]
    if OUT is not None:
        OUT += batch * out_strides[0] + (bh % h).to(tl.int64) * out_strides[2]
    DOUT += batch * dout_strides[0] + (bh % h).to(tl.int64) * dout_strides[2]
    DQ += batch * dq_strides[0] + (bh % h).to(tl.int64) * dq_strides[2]
    if MASK is not None:
        MASK += batch * n
    if DEN is not None:
        DEN += bh.to(tl.int64) * n
    if DELTA is not None:
        DELTA += bh.to(tl.int64) * n
    if P > 0:
        Q_TABLE += batch * q_table_strides[0] + kv_head.to(tl.int64) * q_table_strides[1]
    if K_TABLE is not None:
        K_TABLE += batch * k_table_strides[0] + kv_head.to(tl.int64) * k_table_strides[1]

    c = tl.arange(0, C)
    pairs = block * W + tl.arange(0, W)
    f = feature_offsets(block * W, F, P, INTERLEAVED, W)
    e = tl.arange(0, BE)
    not_future = c[:, None] >= c[None, :]
    if LOG is not None:
        LOG += batch * log_strides[0] + kv_head.to(tl.int64) * log_strides[2]

    first, end, packed_index = segment_span(SPANS, segment, length, n)
    state_index = bg * segments + segment if CAUSAL else bg + packed_index * (h // group)
    s = load_state(S, state_index, f, e, F, E)
    z = load_z(Z, state_index, f, F)
    for chunk_start in tl.range(first, end, C, num_stages=STAGES):
        rows = chunk_start + c
        inside = rows < end
        if LOG is not None:
            D, D_end = load_decay(LOG, log_strides, rows, inside, DOT)
            D_rows, over_chunk = as_rows(exponent(D, DOT)), state_factor(D_end)
            from_start, to_end = power(D_rows, (0, 0), DOT), power(exponent(D_end, DOT), D_rows, DOT)
            decay = (from_start, to_end, over_chunk)
        else:
            decay = None
        rotation = load_rotation(Q_TABLE, rows, inside, block * W, F, P, INTERLEAVED, C, W)
        dout = load_values(DOUT, rows, inside, dout_strides, e, E, BE)
        if not CAUSAL or BLOCKS == 1:  # else three stages would need three buffers of dout
            dout = through_registers(dout, inside)
        if NORMALIZE:
            den = tl.load(DEN + rows, mask=inside, other=1)
            inv_den = 1 / divisor(den, eps, ADD)
            if BLOCKS > 1:
                out = load_values(OUT, rows, inside, out_strides, e, E, BE).to(tl.float32)
                delta = -sum_of_products(dout.to(tl.float32), out, 1)
        dout = operand(dout, DOT)
        dphi = dot(dout, operand(s, DOT), tl.zeros([C, 2 * W], tl.float32), DOT)
        if CAUSAL:
            unmasked = inside
            if MASK is not None:
                unmasked = inside & (tl.load(MASK + rows, mask=inside, other=0) != 0)
            key_rotation = rotation
            if K_TABLE is not None:
                key_rotation = load_rotation(K_TABLE, rows, inside, block * W, F, P, INTERLEAVED, C, W)
            k = load_features(K, rows, inside, k_strides, block * W, F, P, INTERLEAVED, C, W)
            psi = mask_features(feature_map(k, MAP), unmasked, block * W, F, W)
            psi_hat = rotate(psi, key_rotation, P)
            psi_to_end = operand(psi_hat if LOG is None else psi_hat * to_end, DOT)
            psi_hat = operand(psi_hat, DOT)
            v = operand(load_values(V, rows, unmasked, v_strides, e, E, BE), DOT)
            if LOG is not None:
                s = decay_state(s, over_chunk)
            s = dot(tl.trans(v), psi_to_end, s, DOT)
            if NORMALIZE:
                psi, z = carry_z(psi, z, c == 0, decay)
                psi = operand(psi, DOT)
            d_scores = dot(dout, tl.trans(v), tl.zeros([C, C], tl.float32), DOT)
            if LOG is not None:
                d_scores = d_scores * power(D_rows, as_columns(exponent(D, DOT)), DOT)
                dphi = dphi * from_start
            dphi = dot(operand(tl.where(not_future, d_scores, 0.0), DOT), psi_hat, dphi, DOT)
        if NORMALIZE:
            dphi = dphi * inv_den[:, None]
        dphi = rotate_back(dphi, rotation, P)
        q = load_features(Q, rows, inside, q_strides, block * W, F, P, INTERLEAVED, C, W)
        phi = feature_map(q, MAP)
        token = (batch * n + rows) * h + bh % h
        if D_ANGLES is not None:
            store_angle_gradients(D_ANGLES, angle_gradients(phi, dphi), token, inside, pairs, P)
        if NORMALIZE:
            if BLOCKS == 1:
                delta = -sum_of_products(phi, dphi, 1)
            if not ADD:
                delta = tl.where(den < eps, 0.0, delta)  # max(den, eps) is constant there
            if block == 0:
                tl.store(DELTA + rows, delta, mask=inside)
            delta = delta * inv_den
            if CAUSAL:
                d_den_scores = tl.broadcast_to(delta[:, None], C, C)
                if LOG is not None:
                    D_again = rematerialize(exponent(D, DOT), end)
                    d_den_scores = d_den_scores * power(as_rows(D_again), as_columns(D_again), DOT)
                d_den_scores = tl.where(not_future, d_den_scores, 0.0)
                dphi = dot(operand(d_den_scores, DOT), psi, dphi, DOT)
            else:
                dphi += delta[:, None] * z.to(tl.float32)[None, :]
        if D_LOG is not None:
            phi_dphi = sum_of_products(phi, dphi, 1)
            tl.store(D_LOG + token * BLOCKS + block, phi_dphi, mask=inside)
        store_features(DQ, dphi * slope(q, MAP), rows, inside, dq_strides, block * W, F, P, INTERLEAVED, W)


@triton.jit(do_not_specialize=["m", "g", "segments", "length"])
def dkv_kernel(
    Q, q_strides, K, k_strides, V, v_strides, MASK,
    Q_TABLE, q_table_strides, K_TABLE, k_table_strides,
    LOG, log_strides, SPANS,  # all as in scan_fwd_kernel
    T, DZ,  # (b g, s, f, e), (b g, s, f): the state's gradient after each segment; None: 0
    DOUT, dout_strides, DEN, DELTA,
    DK, dk_strides,  # (b, m, g, f)
    DV, dv_strides,  # (b, m, g, e)
    D_LOG, D_ANGLES,  # (b, m, g, pair blocks), (b, m, g, P): <psi, dpsi>, <J psi, R^T dpsi^>
    T_END, DZ_END,  # (b g, f, e), (b g, f): the gradient of the first state; None: not wanted
    m, g, group, segments, length, eps,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
    MAP: tl.constexpr, INTERLEAVED: tl.constexpr, ADD: tl.constexpr,
    CAUSAL: tl.constexpr, NORMALIZE: tl.constexpr,
    WANT_DK: tl.constexpr, WANT_DV: tl.constexpr,
    DOT: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv, or only one of them; one program per (b g, segment, block of pairs or of values).

    For dk BE covers all of E, for dv W covers all pairs.
    """
    PAIR_BLOCKS: tl.constexpr = ((F + 1) // 2 + W - 1) // W
    VALUE_BLOCKS: tl.constexpr = (E + BE - 1) // BE
    block = tl.program_id(0) % (PAIR_BLOCKS * VALUE_BLOCKS)
    segment = tl.program_id(0) // (PAIR_BLOCKS * VALUE_BLOCKS) % segments
    bg = tl.program_id(0) // (PAIR_BLOCKS * VALUE_BLOCKS) // segments
    pair_block, value_block = block // VALUE_BLOCKS, block % VALUE_BLOCKS
    batch, kv_head = (bg // g).to(tl.int64), bg % g
    bg = bg.to(tl.int64)

    Q += batch * q_strides[0]
    K += batch * k_strides[0] + kv_head.to(tl.int64) * k_strides[2]
    V += batch * v_strides[0] + kv_head.to(tl.int64) * v_strides[2]
    DOUT += batch * dout_strides[0]
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
    f = feature_offsets(pair_block * W, F, P, INTERLEAVED, W)
    e = value_block * BE + tl.arange(0, BE)
    not_future = c[:, None] <= c[None, :]  # rows are keys here, columns queries
    if LOG is not None:
        LOG += batch * log_strides[0] + kv_head.to(tl.int64) * log_strides[2]

    first, end, packed_index = segment_span(SPANS, segment, length, m)
    state_index = bg * segments + segment if CAUSAL else bg + packed_index * g
    t = load_state(T, state_index, f, e, F, E)
    dz = load_z(DZ, state_index, f, F)
    chunks = tl.cdiv(end - first, C)
    for i in tl.range(0, chunks, num_stages=STAGES):
        rows = first + (chunks - 1 - i) * C + c
        inside = rows < end
        if LOG is not None:
            D, D_end = load_decay(LOG, log_strides, rows, inside, DOT)
            D_exponent, over_chunk = exponent(D, DOT), state_factor(D_end)
            from_start = power(D_exponent, (0, 0), DOT)[:, None]
            to_end = power(exponent(D_end, DOT), D_exponent, DOT)[:, None]
        unmasked = inside
        if MASK is not None:
            unmasked = inside & (tl.load(MASK + rows, mask=inside, other=0) != 0)
        rotation = load_rotation(Q_TABLE, rows, inside, pair_block * W, F, P, INTERLEAVED, C, W)
        key_rotation = rotation
        if K_TABLE is not None:
            key_rotation = load_rotation(K_TABLE, rows, inside, pair_block * W, F, P, INTERLEAVED, C, W)
        k = load_features(K, rows, inside, k_strides, pair_block * W, F, P, INTERLEAVED, C, W)
        if WANT_DV:
            psi = mask_features(feature_map(k, MAP), unmasked, pair_block * W, F, W)
            psi_hat = operand(rotate(psi, key_rotation, P), DOT)
            dv = dot(psi_hat, tl.trans(operand(t, DOT)), tl.zeros([C, BE], tl.float32), DOT)
        if WANT_DK:
            v = operand(load_values(V, rows, unmasked, v_strides, e, E, BE), DOT)
            if not CAUSAL:
                v = through_registers(v, unmasked)
            dpsi = dot(v, operand(t, DOT), tl.zeros([C, 2 * W], tl.float32), DOT)
            dpsi_den = tl.zeros([C, 2 * W], tl.float32) + dz.to(tl.float32)[None, :]
        if LOG is not None:
            if WANT_DV:
                dv = dv * to_end
            if WANT_DK:
                dpsi, dpsi_den = dpsi * to_end, dpsi_den * to_end
                dz = decay_state(dz, over_chunk)
            t = decay_state(t, over_chunk)
        if CAUSAL:
            for r in range(group):
                head = (kv_head * group + r).to(tl.int64)
                token_of_head = (bg * group + r) * m + rows
                dout_copy = load_values(DOUT + head * dout_strides[2], rows, inside, dout_strides, e, E, BE)
                dout = operand(dout_copy, DOT)
                q = load_features(
                    Q + head * q_strides[2], rows, inside, q_strides, pair_block * W,
                    F, P, INTERLEAVED, C, W,
                )  # fmt: skip
                phi = mask_features(feature_map(q, MAP), inside, pair_block * W, F, W)
                if NORMALIZE:
                    den = tl.load(DEN + token_of_head, mask=inside, other=1)
                    phi *= (1 / divisor(den, eps, ADD))[:, None]
                phi_hat = rotate(phi, rotation, P)
                phi_to_start = operand(phi_hat if LOG is None else phi_hat * from_start, DOT)
                phi_hat = operand(phi_hat, DOT)
                if WANT_DV:
                    scores = dot(psi_hat, tl.trans(phi_hat), tl.zeros([C, C], tl.float32), DOT)
                    if LOG is not None:
                        scores = scores * power(as_columns(D_exponent), as_rows(D_exponent), DOT)
                    dv = dot(operand(tl.where(not_future, scores, 0.0), DOT), dout, dv, DOT)
                if WANT_DK:
                    # v is an async copy, so dout must not be one as well
                    dout_in_registers = operand(through_registers(dout_copy, inside), DOT)
                    d_scores = dot(v, tl.trans(dout_in_registers), tl.zeros([C, C], tl.float32), DOT)
                    if LOG is not None:
                        d_scores = d_scores * power(as_columns(D_exponent), as_rows(D_exponent), DOT)
                    d_scores = operand(tl.where(not_future, d_scores, 0.0), DOT)
                    dpsi = dot(d_scores, phi_hat, dpsi, DOT)
                    if NORMALIZE:
                        delta = tl.load(DELTA + token_of_head, mask=inside, other=0)
                        d_den_scores = tl.broadcast_to(delta[None, :], C, C)
                        if LOG is not None:
                            D_again = rematerialize(D_exponent, end)
                            d_den_scores *= power(as_columns(D_again), as_rows(D_again), DOT)
                        d_den_scores = tl.where(not_future, d_den_scores, 0.0)
                        dpsi_den = dot(operand(d_den_scores, DOT), operand(phi, DOT), dpsi_den, DOT)
                        delta = delta[:, None] if LOG is None else delta[:, None] * from_start
                        dz += sum_of_products(phi, delta, 0).to(tl.float64)
                t = dot(tl.trans(dout), phi_to_start, t, DOT)
        if WANT_DV:
            dv = tl.where(unmasked[:, None], dv, 0.0)
            store_values(DV, dv, rows, inside, dv_strides, e, E, BE)
        if WANT_DK:
            dpsi = rotate_back(dpsi, key_rotation, P)
            token = (batch * m + rows) * g + kv_head
            if D_ANGLES is not None:
                d_angles = tl.where(unmasked[:, None], angle_gradients(feature_map(k, MAP), dpsi), 0.0)
                store_angle_gradients(D_ANGLES, d_angles, token, inside, pairs, P)
            dpsi += dpsi_den
            if D_LOG is not None:
                psi_dpsi = tl.where(unmasked, sum_of_products(feature_map(k, MAP), dpsi, 1), 0.0)
                tl.store(D_LOG + token * PAIR_BLOCKS + pair_block, psi_dpsi, mask=inside)
            dpsi = tl.where(unmasked[:, None], dpsi * slope(k, MAP), 0.0)
            store_features(DK, dpsi, rows, inside, dk_strides, pair_block * W, F, P, INTERLEAVED, W)

    if WANT_DK and CAUSAL and SPANS is None and T_END is not None and segments == 1:
        store_state(T_END, bg, t, f, e, F, E)
        store_z(DZ_END, bg, dz, f, F)
