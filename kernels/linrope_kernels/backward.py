"""Gradients of eq. 19. With x^ = R x, dout the gradient of out, and den as clamped in the forward pass:

    dphi^_i = sum_{j<=i} (dout_i . v_j) psi^_j / den_i   delta_i = -(phi_i . R^T dphi^_i) = -(dout_i . out_i)
    dphi_i  = R^T dphi^_i + delta_i z_i / den_i          z_i  = sum_{j<=i} psi_j
    T_j     = sum_{i>=j} (phi^_i / den_i) dout_i^T       dz_j = sum_{i>=j} delta_i phi_i / den_i
    dpsi_j  = R^T T_j v_j + dz_j                         dv_j = T_j^T psi^_j

T is the gradient of the state S, and dz that of z. With decay each product of a query and a key is multiplied
by e^(D_i - D_j), and the T and dz that leave a chunk are decayed to the token before it.

The gradients of log decay and of angle steps are sums over tokens. The kernels store each token's terms:
<phi, dphi> and <psi, dpsi> for log decay, which log_decay.py sums; <J phi, R^T dphi^> and <J psi, R^T dpsi^>
for angle steps, which the caller sums. J rotates each pair by 90 degrees. Where out = num / den, <phi, dphi> is 0
up to rounding, but it is stored as computed: its error cancels part of the error of <psi, dpsi>.

Divide features or sums by den, never dout: dout then goes from the async copy straight to the matrix unit.

``dq`` scans forward with the state S, ``dkv`` (backward_keys.py) backward with T. If a state does not fit on chip, the
programs split their output: dq and dk by feature pairs, dv by values, and dk and dv are two launches.
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
    load_write,
    load_z,
    places_of,
    program_of,
    seen,
    segment_span,
    store_angle_gradients,
    store_features,
)
from linrope_kernels.pieces import (
    angle_gradients,
    divisor,
    dot,
    dot_rows,
    feature_map,
    is_raw,
    not_future,
    operand,
    partial_sums,
    rotate_back,
    slope,
    spread,
    sum_in_rows,
    sum_of_products,
    through_registers,
)


class Terms(NamedTuple):
    """A float32 number per token and head, from which gradients are summed; None: not wanted."""

    log: Any  # (b, n, heads, pair blocks): <phi, dphi> or <psi, dpsi>
    angles: Any  # (b, n, heads, P): <J phi, R^T dphi^> or <J psi, R^T dpsi^>
    write: Any  # (b, m, heads, value blocks): <v, d(w v)>, of the keys alone


@triton.jit
def weighed(scores, decay, end, DOT: tl.constexpr, OF_KEYS: tl.constexpr):
    """A chunk's scores as an operand: times e^(D_i - D_j), and 0 where the key lies in the query's future.

    OF_KEYS: rows are keys. end: any number that is never negative, to compute the exponentials anew, or None.
    """
    if decay is not None:
        D = decay.D
        if end is not None:
            D = rematerialize(D, end)
        scores = scores * decay_tile(D, DOT, OF_KEYS)
    return operand(tl.where(not_future(scores.shape[0], OF_KEYS), scores, 0.0), DOT)


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
    w0, e = block * W, tl.arange(0, BE)
    f = feature_offsets(w0, PAIRS)
    first, end, packed_index = segment_span(tokens.spans, segment, length, n)
    state_index = bg * segments + segment if CAUSAL else bg + packed_index * (h // group)
    s, z = load_state(before, state_index, f, e, F, E), spread(load_z(before, state_index, f, F), DOT)
    for chunk_start in tl.range(first, end, C, num_stages=STAGES):
        rows = chunk_start + tl.arange(0, C)
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
            row_mask = visible.inside if tokens.mask is not None or is_raw(MAP, P) else None
            write = None if tokens.write.pointer is None else load_write(tokens.write, visible)
            psi, psi_hat, psi_to_end = load_keys(
                k, tokens, keys, row_mask, rotation, w0, decay, write, MAP, DOT, PAIRS
            )
            values = operand(load_values(v, visible, e, E, BE), DOT)
            if decay is not None:
                s = decay_state(s, decay.over_chunk)
            s = dot(tl.trans(values), psi_to_end, s, DOT)
            if NORMALIZE:
                z_before = z
                if decay is None:
                    z += partial_sums(psi)
                else:
                    z = decay_state(z, decay.over_chunk) + partial_sums(psi * decay.to_end)
                psi = operand(psi, DOT)
            if decay is not None:
                dphi = dphi * decay.from_start
            d_scores = dot_rows(d_outputs, values, DOT)
            d_scores = d_scores if write is None else d_scores * write[None, :]
            dphi = dot(weighed(d_scores, decay, None, DOT, False), psi_hat, dphi, DOT)
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
                ones = weighed(tl.full([C, C], 1.0, tl.float32), decay, end, DOT, False)
                sums = sum_in_rows(z_before, C, DOT)
                sums = dot(ones, psi, sums if decay is None else sums * decay.from_start, DOT)
                dphi += delta[:, None] * sums
            else:
                dphi += delta[:, None] * sum_in_rows(z, C, DOT)
        if terms.log is not None:
            tl.store(terms.log + token * BLOCKS + block, sum_of_products(phi, dphi, 1), mask=inside)
        store_features(dq, dphi * slope(x, MAP), queries, w0, PAIRS)
