"""Decoding: one token of every sequence in one launch, which reads and writes the state once."""

import triton
import triton.language as tl

from linrope_kernels.angles import cos_sin, load_theta
from linrope_kernels.decay import decay_state, state_factor
from linrope_kernels.pieces import (
    divisor,
    feature_map,
    feature_offsets,
    load_features,
    load_state,
    load_values,
    load_z,
    mask_features,
    rotate,
    store_state,
    store_z,
    sum_of_products,
)


@triton.jit(do_not_specialize=["g", "parts"])
def step_fwd_kernel(
    Q, q_strides,  # (b, 1, h, f)
    K, k_strides,  # (b, 1, g, f)
    V, v_strides,  # (b, 1, g, e)
    MASK,  # (b, 1) bool
    THETA, theta_heads,  # (axes, 1 or g, P) int64, 2^-64 turns per position; None: PHASES
    Q_POSITIONS, q_position_stride,  # (1 or b, 1) int64, with axes (1 or b, 1, axes)
    K_POSITIONS, k_position_stride,
    Q_PHASES, q_phase_strides,  # (b or 1, 1, g or 1, P) int64, in 2^-64 turns
    K_PHASES, k_phase_strides,
    LOG, log_strides,  # (b or 1, 1, g or 1) float32 or float64: log decay
    SLOTS,  # (b,) int64: each sequence's row in a pool of states; None: sequence i has row i
    S, Z,  # (rows g, f, e) float32, (rows g, f) float64; None: 0
    S_END, Z_END,  # the new state; may be S and Z if parts == 1; None: not wanted
    OUT, out_strides,  # (b, 1, h, e)
    g, group, parts, eps,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr, AXES: tl.constexpr,
    MAP: tl.constexpr, INTERLEAVED: tl.constexpr, ADD: tl.constexpr, NORMALIZE: tl.constexpr,
    W: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """S = e^a S + R psi v^T, z = e^a z + psi; out = (R phi)^T S / phi . z; ``parts`` programs per (b g)."""
    part = tl.program_id(0) % parts
    bg = tl.program_id(0) // parts
    batch, kv_head = (bg // g).to(tl.int64), bg % g
    pool_row = batch
    if SLOTS is not None:
        pool_row = tl.load(SLOTS + batch)
    state_index = pool_row * g + kv_head
    Q += batch * q_strides[0]
    K += batch * k_strides[0] + kv_head.to(tl.int64) * k_strides[2]
    V += batch * v_strides[0] + kv_head.to(tl.int64) * v_strides[2]
    OUT += batch * out_strides[0]

    row = tl.zeros([1], tl.int32)
    pairs = tl.arange(0, W)
    unmasked = row == 0
    if MASK is not None:
        # row makes it a tile: Triton 3.9's interpreter makes a mask of int32 of a comparison of scalars
        unmasked = unmasked & (tl.load(MASK + batch + row) != 0)
    rotation, key_rotation = (1.0, 0.0), (1.0, 0.0)
    if P > 0:
        if THETA is not None:
            phase, key_phase = tl.zeros([1, W], tl.int64), tl.zeros([1, W], tl.int64)
            for a in tl.static_range(AXES):
                theta = load_theta(THETA, a, theta_heads, kv_head, pairs, P)[None, :]
                phase += tl.load(Q_POSITIONS + batch * q_position_stride + a) * theta
                key_phase += tl.load(K_POSITIONS + batch * k_position_stride + a) * theta
        else:
            q_offsets = batch * q_phase_strides[0] + kv_head * q_phase_strides[2] + pairs * q_phase_strides[3]
            k_offsets = batch * k_phase_strides[0] + kv_head * k_phase_strides[2] + pairs * k_phase_strides[3]
            phase = tl.load(Q_PHASES + q_offsets, mask=pairs < P, other=0)[None, :]
            key_phase = tl.load(K_PHASES + k_offsets, mask=pairs < P, other=0)[None, :]
        rotation, key_rotation = cos_sin(phase), cos_sin(key_phase)
    if LOG is not None:
        log = tl.load(LOG + batch * log_strides[0] + kv_head * log_strides[2]).to(tl.float64)
        factor = state_factor(log)

    f = feature_offsets(0, F, P, INTERLEAVED, W)
    k = load_features(K, row, unmasked, k_strides, 0, F, P, INTERLEAVED, 1, W)
    psi = mask_features(feature_map(k, MAP), unmasked, 0, F, W)
    psi_hat = rotate(psi, key_rotation, P)
    z = load_z(Z, state_index, f, F)
    if LOG is not None:
        z = z * tl.exp(log)
    z += tl.sum(psi, 0).to(tl.float64)
    for block in range(part, tl.cdiv(E, BE), parts):
        e = block * BE + tl.arange(0, BE)
        v = tl.trans(load_values(V, row, unmasked, v_strides, e, E, BE)).to(tl.float32)
        s = load_state(S, state_index, f, e, F, E)
        if LOG is not None:
            s = decay_state(s, factor)
        s += v * psi_hat
        if S_END is not None:
            store_state(S_END, state_index, s, f, e, F, E)
        for r in range(group):
            head = (kv_head * group + r).to(tl.int64)
            q = load_features(Q + head * q_strides[2], row, row == 0, q_strides, 0, F, P, INTERLEAVED, 1, W)
            phi = feature_map(q, MAP)
            out = sum_of_products(s, rotate(phi, rotation, P), 1)
            if NORMALIZE:
                out /= divisor(sum_of_products(phi, z.to(tl.float32), None), eps, ADD)
            out_pointers = OUT + head * out_strides[2] + e * out_strides[3]
            tl.store(out_pointers, out.to(OUT.dtype.element_ty), mask=e < E)
    if S_END is not None and part == 0:
        store_z(Z_END, state_index, z, f, F)
