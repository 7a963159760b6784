"""Decoding: one token of every sequence in one launch, which reads and writes the state once."""

import triton
import triton.language as tl

from linrope_kernels.angles import cos_sin, load_theta
from linrope_kernels.decay import decay_state, state_factor
from linrope_kernels.memory import (
    Chunk,
    Pairs,
    feature_offsets,
    load_features,
    load_state,
    load_values,
    load_z,
    mask_features,
    store_state,
    store_z,
)
from linrope_kernels.pieces import divisor, feature_map, rotate, sum_of_products


@triton.jit
def load_angles(theta, positions, phases, batch, head, pairs, P: tl.constexpr, AXES: tl.constexpr):
    """(1, W) cos and sin of one token's Theta, from theta and its position or from phases."""
    if theta[0] is None:
        PHASES = phases.pointer + (batch * phases.strides[0] + head * phases.strides[2])
        phase = tl.load(PHASES + pairs * phases.strides[3], mask=pairs < P, other=0)[None, :]
    else:
        phase = tl.zeros([1, pairs.shape[0]], tl.int64)
        for a in tl.static_range(AXES):
            turns = load_theta(theta[0], a, theta[1], head, pairs, P)[None, :]
            phase += tl.load(positions[0] + batch * positions[1] + a) * turns
    return cos_sin(phase)


@triton.jit(do_not_specialize=["g", "parts"])
def step_fwd_kernel(
    q, k, v,  # Rows (b, 1, h, f), (b, 1, g, f), (b, 1, g, e)
    MASK,  # (b, 1) bool
    theta,  # (axes, 1 or g, P) int64, 2^-64 turns per position, and its number of heads; None: phases
    positions, key_positions,  # (1 or b, 1) int64, with axes (1 or b, 1, axes), and the stride of its rows
    phases, key_phases,  # Rows (b or 1, 1, g or 1, P) int64, in 2^-64 turns
    log,  # Rows (b or 1, 1, g or 1) float32 or float64: log decay
    SLOTS,  # (b,) int64: each sequence's row in a pool of states; None: sequence i has row i
    start,  # (rows g, f, e) float32, (rows g, f) float64; None: 0
    end,  # the new state; may be start if parts == 1; None: not wanted
    out,  # Rows (b, 1, h, e)
    g, group, parts, eps,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr, AXES: tl.constexpr,
    MAP: tl.constexpr, INTERLEAVED: tl.constexpr, ADD: tl.constexpr, NORMALIZE: tl.constexpr,
    W: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """S = e^a S + R psi v^T, z = e^a z + psi; out = (R phi)^T S / phi . z; ``parts`` programs per (b g)."""
    PAIRS: tl.constexpr = Pairs(F, P, INTERLEAVED, W)
    part = tl.program_id(0) % parts
    bg = tl.program_id(0) // parts
    batch, kv_head = (bg // g).to(tl.int64), bg % g
    pool_row = batch
    if SLOTS is not None:
        pool_row = tl.load(SLOTS + batch)
    state_index = pool_row * g + kv_head
    row = tl.zeros([1], tl.int32)
    unmasked = row == 0
    if MASK is not None:
        # row makes it a tile: Triton 3.9's interpreter makes a mask of int32 of a comparison of scalars
        unmasked = unmasked & (tl.load(MASK + batch + row) != 0)
    rotation, key_rotation = (1.0, 0.0), (1.0, 0.0)
    if P > 0:
        rotation = load_angles(theta, positions, phases, batch, kv_head, tl.arange(0, W), P, AXES)
        key_rotation = load_angles(theta, key_positions, key_phases, batch, kv_head, tl.arange(0, W), P, AXES)
    if log.pointer is not None:
        a = tl.load(log.pointer + (batch * log.strides[0] + kv_head * log.strides[2])).to(tl.float64)
        factor = state_factor(a)

    f = feature_offsets(0, PAIRS)
    keys = Chunk(batch, kv_head.to(tl.int64), row, unmasked)
    psi = mask_features(feature_map(load_features(k, keys, 0, PAIRS), MAP), unmasked, 0, PAIRS)
    psi_hat = rotate(psi, key_rotation, P)
    z = load_z(start, state_index, f, F)
    if log.pointer is not None:
        z = z * tl.exp(a)
    z += tl.sum(psi, 0).to(tl.float64)
    for block in range(part, tl.cdiv(E, BE), parts):
        e = block * BE + tl.arange(0, BE)
        values = tl.trans(load_values(v, keys, e, E, BE)).to(tl.float32)
        s = load_state(start, state_index, f, e, F, E)
        if log.pointer is not None:
            s = decay_state(s, factor)
        s += values * psi_hat
        if end[0] is not None:
            store_state(end, state_index, s, f, e, F, E)
        for r in range(group):
            head = (kv_head * group + r).to(tl.int64)
            phi = feature_map(load_features(q, Chunk(batch, head, row, row == 0), 0, PAIRS), MAP)
            num = sum_of_products(s, rotate(phi, rotation, P), 1)
            if NORMALIZE:
                num /= divisor(sum_of_products(phi, z.to(tl.float32), None), eps, ADD)
            OUT = out.pointer + batch * out.strides[0] + head * out.strides[2] + e * out.strides[3]
            tl.store(OUT, num.to(OUT.dtype.element_ty), mask=e < E)
    if end[0] is not None and part == 0:
        store_z(end, state_index, z, f, F)
