"""Gradients of eq. 19. With x^ = R x, dout the gradient of out, and den as clamped in the forward pass:

    dphi^_i = sum_{j<=i} (dout_i . v_j) psi^_j / den_i   delta_i = -(phi_i . R^T dphi^_i) = -(dout_i . out_i)
    dphi_i  = R^T dphi^_i + delta_i z_i / den_i          z_i  = sum_{j<=i} psi_j
    T_j     = sum_{i>=j} (phi^_i / den_i) dout_i^T       dz_j = sum_{i>=j} delta_i phi_i / den_i
    dpsi_j  = R^T T_j v_j + dz_j                         dv_j = T_j^T psi^_j

T is the gradient of the state S, and dz that of z. With decay each product of a query and a key is multiplied
by e^(D_i - D_j), and the T and dz that leave a chunk are decayed to the token before it.

The gradients of log decay and of angle steps are sums over tokens. The kernels store each token's terms:
<phi, dphi> and <psi, dpsi> for log decay, which gradients.py sums; <J phi, R^T dphi^> and <J psi, R^T dpsi^>
for angle steps, which the caller sums. J rotates each pair by 90 degrees. Where out = num / den, <phi, dphi> is 0
up to rounding, but it is stored as computed: its error cancels part of the error of <psi, dpsi>.

Divide features or sums by den, never dout: dout then goes from the async copy straight to the matrix unit.

``dq`` scans forward with the state S, ``dk`` and ``dv`` backward with T. If a state does not fit on chip, the programs
split their output: dq and dk by feature pairs (W per program), dv by values (BE per program).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from linrope_kernels.decay import (
    chunk_decay,
    decay_state,
    decay_tile,
    rematerialize,
)
from linrope_kernels.forward import load_keys
from linrope_kernels.memory import (
    Chunk,
    Pairs,
    feature_offsets,
    load_features,
    load_rotation,
    load_state,
    load_values,
    load_z,
    mask_features,
    places_of,
    program_of,
    seen,
    segment_span,
    store_angle_gradients,
    store_features,
    store_state,
    store_values,
    store_z,
)
from linrope_kernels.pieces import (
    angle_gradients,
    carry_z,
    divisor,
    dot,
    dot_rows,
    feature_map,
    operand,
    rotate,
    rotate_back,
    slope,
    sum_of_products,
    through_registers,
)


class Terms(NamedTuple):
    """A float32 number per token and head, from which gradients are summed; None: not wanted."""

    log: Any  # (b, n, heads, pair blocks): <phi, dphi> or <psi, dpsi>
    angles: Any  # (b, n, heads, P): <J phi, R^T dphi^> or <J psi, R^T dpsi^>


@triton.jit
def weighed(scores, decay, not_future, end, DOT: tl.constexpr, OF_KEYS: tl.constexpr):
    """A chunk's scores as an operand: times e^(D_i - D_j), and 0 where the key lies in the query's future.

    OF_KEYS: rows are keys. end: any number that is never negative, to compute the exponentials anew, or None.
    """
    if decay is not None:
        D = decay.D
        if end is not None:
            D = rematerialize(D, end)
        scores = scores * decay_tile(D, DOT, OF_KEYS)
    return operand(tl.where(not_future, scores, 0.0), DOT)


@triton.jit(do_not_specialize=["n", "h", "segments", "length"])
def dq_kernel(
    q, k, v, tokens, before,  # all as in scan_fwd_kernel
    out,  # Rows (b, n, h, e); None: one program has all pairs, and out is not read
    dout,  # Rows (b, n, h, e)
    DEN, DELTA,  # (b, h, n) float32
    dq,  # Rows (b, n, h, f)
    terms,  # Terms of the queries
    n, h, group, segments, length, eps,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
    MAP: tl.constexpr, INTERLEAVED: tl.constexpr, ADD: tl.constexpr,
    CAUSAL: tl.constexpr, NORMALIZE: tl.constexpr,
    DOT: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq and delta; one program per (query head, segment, pair block). BE covers all of E."""
    PAIRS: tl.constexpr = Pairs(F, P, INTERLEAVED, W)
    BLOCKS: tl.constexpr = ((F + 1) // 2 + W - 1) // W
    block, segment, bh = program_of(BLOCKS, segments)
    batch, head, kv_head, bg = places_of(bh, h, group)
    w0, c, e = block * W, tl.arange(0, C), tl.arange(0, BE)
    f = feature_offsets(w0, PAIRS)
    not_future = c[:, None] >= c[None, :]
    first, end, packed_index = segment_span(tokens.spans, segment, length, n)
    state_index = bg * segments + segment if CAUSAL else bg + packed_index * (h // group)
    s, z = load_state(before, state_index, f, e, F, E), load_z(before, state_index, f, F)
    for chunk_start in tl.range(first, end, C, num_stages=STAGES):
        rows = chunk_start + c
        inside = rows < end
        queries, keys = Chunk(batch, head, rows, inside), Chunk(batch, kv_head, rows, inside)
        decay = None if tokens.log.pointer is None else chunk_decay(tokens.log, keys, DOT, False)
        rotation = load_rotation(tokens.table, keys, w0, PAIRS)
        d_outputs = load_values(dout, queries, e, E, BE)
        if not CAUSAL or BLOCKS == 1:  # else three stages would need three buffers of dout
            d_outputs = through_registers(d_outputs, inside)
        if NORMALIZE:
            den = tl.load(DEN + bh.to(tl.int64) * n + rows, mask=inside, other=1)
            inv_den = 1 / divisor(den, eps, ADD)
            if BLOCKS > 1:
                outputs = load_values(out, queries, e, E, BE).to(tl.float32)
                delta = -sum_of_products(d_outputs.to(tl.float32), outputs, 1)
        d_outputs = operand(d_outputs, DOT)
        dphi = dot(d_outputs, operand(s, DOT), tl.zeros([C, 2 * W], tl.float32), DOT)
        if CAUSAL:
            visible = seen(tokens.mask, keys, n)
            psi, psi_hat, psi_to_end = load_keys(
                k, tokens, keys, visible, rotation, w0, decay, MAP, DOT, PAIRS
            )
            values = operand(load_values(v, visible, e, E, BE), DOT)
            if decay is not None:
                s = decay_state(s, decay.over_chunk)
            s = dot(tl.trans(values), psi_to_end, s, DOT)
            if NORMALIZE:
                psi, z = carry_z(psi, z, c == 0, decay)
                psi = operand(psi, DOT)
            if decay is not None:
                dphi = dphi * decay.from_start
            d_scores = weighed(dot_rows(d_outputs, values, DOT), decay, not_future, None, DOT, False)
            dphi = dot(d_scores, psi_hat, dphi, DOT)
        if NORMALIZE:
            dphi = dphi * inv_den[:, None]
        dphi = rotate_back(dphi, rotation, P)
        x = load_features(q, queries, w0, PAIRS)
        phi, token = feature_map(x, MAP), (batch * n + rows) * h + bh % h
        if terms.angles is not None:
            store_angle_gradients(terms.angles, angle_gradients(phi, dphi), token, inside, w0, P)
        if NORMALIZE:
            if BLOCKS == 1:
                delta = -sum_of_products(phi, dphi, 1)
            if not ADD:
                delta = tl.where(den < eps, 0.0, delta)  # max(den, eps) is constant there
            if block == 0:
                tl.store(DELTA + bh.to(tl.int64) * n + rows, delta, mask=inside)
            delta = delta * inv_den
            if CAUSAL:
                d_den_scores = tl.broadcast_to(delta[:, None], C, C)
                dphi = dot(weighed(d_den_scores, decay, not_future, end, DOT, False), psi, dphi, DOT)
            else:
                dphi += delta[:, None] * z.to(tl.float32)[None, :]
        if terms.log is not None:
            tl.store(terms.log + token * BLOCKS + block, sum_of_products(phi, dphi, 1), mask=inside)
        store_features(dq, dphi * slope(x, MAP), queries, w0, PAIRS)


@triton.jit
def load_queries(
    q, queries, rotation, w0, DEN, token, decay, eps,
    MAP: tl.constexpr, ADD: tl.constexpr, DOT: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """phi / den in float32, and as operands phi^ = R phi / den and phi^ e^D, which T takes up.

    token: the rows' indices in DEN (b, h, n).
    """
    phi = feature_map(load_features(q, queries, w0, PAIRS), MAP)
    phi = mask_features(phi, queries.inside, w0, PAIRS)
    if DEN is not None:
        phi *= (1 / divisor(tl.load(DEN + token, mask=queries.inside, other=1), eps, ADD))[:, None]
    phi_hat = rotate(phi, rotation, PAIRS.P)
    phi_to_start = operand(phi_hat if decay is None else phi_hat * decay.from_start, DOT)
    return phi, operand(phi_hat, DOT), phi_to_start


@triton.jit(do_not_specialize=["m", "g", "segments", "length"])
def dk_kernel(
    q, k, v, tokens,  # all as in scan_fwd_kernel
    after,  # T (b g, s, f, e), dz (b g, s, f): the state's gradient after each segment; None: 0
    dout, DEN, DELTA,
    dk,  # Rows (b, m, g, f)
    terms,  # Terms of the keys
    d_start,  # (b g, f, e), (b g, f): the gradient of the first state; None: not wanted
    m, g, group, segments, length, eps,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
    MAP: tl.constexpr, INTERLEAVED: tl.constexpr, ADD: tl.constexpr,
    CAUSAL: tl.constexpr, NORMALIZE: tl.constexpr,
    DOT: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk; one program per (key/value head, segment, pair block). BE covers all of E."""
    PAIRS: tl.constexpr = Pairs(F, P, INTERLEAVED, W)
    BLOCKS: tl.constexpr = ((F + 1) // 2 + W - 1) // W
    block, segment, bg = program_of(BLOCKS, segments)
    batch, kv_head, bg, w0 = (bg // g).to(tl.int64), bg % g, bg.to(tl.int64), block * W
    c, e = tl.arange(0, C), tl.arange(0, BE)
    f = feature_offsets(w0, PAIRS)
    not_future = c[:, None] <= c[None, :]  # rows are keys here, columns queries
    first, end, packed_index = segment_span(tokens.spans, segment, length, m)
    state_index = bg * segments + segment if CAUSAL else bg + packed_index * g
    t, dz = load_state(after, state_index, f, e, F, E), load_z(after, state_index, f, F)
    chunks = tl.cdiv(end - first, C)
    for i in tl.range(0, chunks, num_stages=STAGES):
        rows = first + (chunks - 1 - i) * C + c
        inside = rows < end
        keys = Chunk(batch, kv_head.to(tl.int64), rows, inside)
        decay = None if tokens.log.pointer is None else chunk_decay(tokens.log, keys, DOT, True)
        visible = seen(tokens.mask, keys, m)
        rotation = load_rotation(tokens.table, keys, w0, PAIRS)
        key_rotation = rotation
        if tokens.key_table is not None:
            key_rotation = load_rotation(tokens.key_table, keys, w0, PAIRS)
        x = load_features(k, keys, w0, PAIRS)
        values = operand(load_values(v, visible, e, E, BE), DOT)
        if not CAUSAL:
            values = through_registers(values, visible.inside)
        dpsi = dot(values, operand(t, DOT), tl.zeros([C, 2 * W], tl.float32), DOT)
        dpsi_den = tl.zeros([C, 2 * W], tl.float32) + dz.to(tl.float32)[None, :]
        if decay is not None:
            dpsi, dpsi_den = dpsi * decay.to_end, dpsi_den * decay.to_end
            dz = decay_state(dz, decay.over_chunk)
            t = decay_state(t, decay.over_chunk)
        if CAUSAL:
            for r in range(group):
                queries = Chunk(batch, (kv_head * group + r).to(tl.int64), rows, inside)
                token_of_head = (bg * group + r) * m + rows
                d_outputs = load_values(dout, queries, e, E, BE)
                phi, phi_hat, phi_to_start = load_queries(
                    q, queries, rotation, w0, DEN, token_of_head, decay, eps, MAP, ADD, DOT, PAIRS
                )
                # the values are an async copy, so dout must not be one as well
                d_scores = dot_rows(values, operand(through_registers(d_outputs, inside), DOT), DOT)
                dpsi = dot(weighed(d_scores, decay, not_future, None, DOT, True), phi_hat, dpsi, DOT)
                if NORMALIZE:
                    delta = tl.load(DELTA + token_of_head, mask=inside, other=0)
                    d_den_scores = tl.broadcast_to(delta[None, :], C, C)
                    d_den_scores = weighed(d_den_scores, decay, not_future, end, DOT, True)
                    dpsi_den = dot(d_den_scores, operand(phi, DOT), dpsi_den, DOT)
                    delta = delta[:, None] if decay is None else delta[:, None] * decay.from_start
                    dz += sum_of_products(phi, delta, 0).to(tl.float64)
                t = dot(tl.trans(operand(d_outputs, DOT)), phi_to_start, t, DOT)
        dpsi = rotate_back(dpsi, key_rotation, P)
        psi, token = feature_map(x, MAP), (batch * m + rows) * g + kv_head
        if terms.angles is not None:
            d_angles = tl.where(visible.inside[:, None], angle_gradients(psi, dpsi), 0.0)
            store_angle_gradients(terms.angles, d_angles, token, inside, w0, P)
        dpsi += dpsi_den
        if terms.log is not None:
            psi_dpsi = tl.where(visible.inside, sum_of_products(psi, dpsi, 1), 0.0)
            tl.store(terms.log + token * BLOCKS + block, psi_dpsi, mask=inside)
        dpsi = tl.where(visible.inside[:, None], dpsi * slope(x, MAP), 0.0)
        store_features(dk, dpsi, keys, w0, PAIRS)

    if CAUSAL and tokens.spans is None and d_start[0] is not None and segments == 1:
        store_state(d_start, bg, t, f, e, F, E)
        store_z(d_start, bg, dz, f, F)


@triton.jit(do_not_specialize=["m", "g", "segments", "length"])
def dv_kernel(
    q, k, tokens, after, dout, DEN,  # all as in dk_kernel
    dv,  # Rows (b, m, g, e)
    m, g, group, segments, length, eps,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
    MAP: tl.constexpr, INTERLEAVED: tl.constexpr, ADD: tl.constexpr,
    CAUSAL: tl.constexpr, NORMALIZE: tl.constexpr,
    DOT: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dv; one program per (key/value head, segment, value block). W covers all pairs."""
    PAIRS: tl.constexpr = Pairs(F, P, INTERLEAVED, W)
    block, segment, bg = program_of((E + BE - 1) // BE, segments)
    batch, kv_head, bg = (bg // g).to(tl.int64), bg % g, bg.to(tl.int64)
    c = tl.arange(0, C)
    f = feature_offsets(0, PAIRS)
    e = block * BE + tl.arange(0, BE)
    not_future = c[:, None] <= c[None, :]  # rows are keys here, columns queries
    first, end, packed_index = segment_span(tokens.spans, segment, length, m)
    t = load_state(after, bg * segments + segment if CAUSAL else bg + packed_index * g, f, e, F, E)
    chunks = tl.cdiv(end - first, C)
    for i in tl.range(0, chunks, num_stages=STAGES):
        rows = first + (chunks - 1 - i) * C + c
        inside = rows < end
        keys = Chunk(batch, kv_head.to(tl.int64), rows, inside)
        decay = None if tokens.log.pointer is None else chunk_decay(tokens.log, keys, DOT, True)
        visible = seen(tokens.mask, keys, m)
        rotation = load_rotation(tokens.table, keys, 0, PAIRS)
        psi_hat = load_keys(k, tokens, keys, visible, rotation, 0, None, MAP, DOT, PAIRS)[1]
        d_values = dot_rows(psi_hat, operand(t, DOT), DOT)
        if decay is not None:
            d_values = d_values * decay.to_end
            t = decay_state(t, decay.over_chunk)
        if CAUSAL:
            for r in range(group):
                queries = Chunk(batch, (kv_head * group + r).to(tl.int64), rows, inside)
                token_of_head = (bg * group + r) * m + rows
                d_outputs = operand(load_values(dout, queries, e, E, BE), DOT)
                _phi, phi_hat, phi_to_start = load_queries(
                    q, queries, rotation, 0, DEN, token_of_head, decay, eps, MAP, ADD, DOT, PAIRS
                )
                scores = weighed(dot_rows(psi_hat, phi_hat, DOT), decay, not_future, None, DOT, True)
                d_values = dot(scores, d_outputs, d_values, DOT)
                t = dot(tl.trans(d_outputs), phi_to_start, t, DOT)
        d_values = tl.where(visible.inside[:, None], d_values, 0.0)
        store_values(dv, d_values, keys, e, E, BE)
