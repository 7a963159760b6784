"""Decoding: one token of every sequence in one launch; the state is read and written once."""

import triton
import triton.language as tl

from linrope_kernels.angles import cos_sin, load_theta
from linrope_kernels.pieces import (
    feature,
    keep,
    load_pairs,
    load_state,
    load_sum,
    load_values,
    rotate,
    store_state,
    store_sum,
)


@triton.jit(do_not_specialize=["g", "parts"])
def step_fwd_kernel(
    Q, q_strides,  # (b, 1, h, f)
    K, k_strides,  # (b, 1, g, f)
    V, v_strides,  # (b, 1, g, e)
    MASK,  # (b, 1) bool
    THETA, theta_heads,  # (axes, 1 or g, P)
    Q_POSITIONS, q_position_stride,  # (1 or b, 1) int64, with axes (1 or b, 1, axes)
    K_POSITIONS, k_position_stride,
    RATES,  # (g,) float64, log of the decay
    START, start_stride,  # (1 or b,) int64, the state's position
    S, Z, S_END, Z_END,  # (b g, f, e) float32, (b g, f) float64; if parts == 1 the last may be the first
    OUT, out_strides,  # (b, 1, h, e)
    g, group, parts, eps,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr, AXES: tl.constexpr,
    MAP: tl.constexpr, INTERLEAVED: tl.constexpr, NORMALIZE: tl.constexpr,
    W: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """S = g S + R psi v^T, z = g z + psi; out = (R phi)^T S / phi . z; ``parts`` programs per sequence."""
    part = tl.program_id(0) % parts
    sequence = tl.program_id(0) // parts
    batch, kv_head = (sequence // g).to(tl.int64), sequence % g
    sequence = sequence.to(tl.int64)
    Q += batch * q_strides[0]
    K += batch * k_strides[0] + kv_head.to(tl.int64) * k_strides[2]
    V += batch * v_strides[0] + kv_head.to(tl.int64) * v_strides[2]
    OUT += batch * out_strides[0]

    row = tl.zeros([1], tl.int32)
    pairs = tl.arange(0, W)
    visible = row == 0
    if MASK is not None:
        visible = visible & (tl.load(MASK + batch) != 0)
    turn, key_turn = (1.0, 0.0), (1.0, 0.0)
    if P > 0:
        phase, key_phase = tl.zeros([1, W], tl.int64), tl.zeros([1, W], tl.int64)
        for a in tl.static_range(AXES):
            theta = load_theta(THETA, a, theta_heads, kv_head, pairs, P)[None, :]
            phase += tl.load(Q_POSITIONS + batch * q_position_stride + a) * theta
            key_phase += tl.load(K_POSITIONS + batch * k_position_stride + a) * theta
        turn, key_turn = cos_sin(phase), cos_sin(key_phase)
    if RATES is not None:
        near = tl.load(K_POSITIONS + batch * k_position_stride) - tl.load(START + batch * start_stride) + 1
        faded = tl.exp(tl.load(RATES + kv_head) * near.to(tl.float64)) - 1

    x1, x2 = load_pairs(K, row, visible, k_strides, 0, F, P, INTERLEAVED, 1, W)
    psi1, psi2 = keep(feature(x1, MAP), feature(x2, MAP), visible, pairs, F, W)
    psi1_hat, psi2_hat = rotate(psi1, psi2, key_turn, P)
    z1, z2 = load_sum(Z + sequence * F, pairs, F, P, INTERLEAVED)
    if RATES is not None:
        z1, z2 = z1 + z1 * faded, z2 + z2 * faded
    z1 += tl.sum(psi1, 0).to(tl.float64)
    z2 += tl.sum(psi2, 0).to(tl.float64)
    for block in range(part, tl.cdiv(E, BE), parts):
        e = block * BE + tl.arange(0, BE)
        v = tl.trans(load_values(V, row, visible, v_strides, e, E, BE)).to(tl.float32)
        s1, s2 = load_state(S + sequence * F * E, pairs, e, F, E, P, INTERLEAVED)
        if RATES is not None:
            s1, s2 = s1 + s1 * faded.to(tl.float32), s2 + s2 * faded.to(tl.float32)
        s1 += v * psi1_hat
        s2 += v * psi2_hat
        store_state(S_END + sequence * F * E, s1, s2, pairs, e, F, E, P, INTERLEAVED)
        for r in range(group):
            head = (kv_head * group + r).to(tl.int64)
            x1, x2 = load_pairs(Q + head * q_strides[2], row, row == 0, q_strides, 0, F, P, INTERLEAVED, 1, W)
            phi1, phi2 = feature(x1, MAP), feature(x2, MAP)
            phi1_hat, phi2_hat = rotate(phi1, phi2, turn, P)
            out = tl.sum(s1 * phi1_hat + s2 * phi2_hat, 1)
            if NORMALIZE:
                out /= tl.maximum(tl.sum(phi1 * z1.to(tl.float32) + phi2 * z2.to(tl.float32)), eps)
            at = OUT + head * out_strides[2] + e * out_strides[3]
            tl.store(at, out.to(OUT.dtype.element_ty), mask=e < E)
    if part == 0:
        store_sum(Z_END + sequence * F, z1, z2, pairs, F, P, INTERLEAVED)
