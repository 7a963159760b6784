"""Decoding: one token of every sequence in one launch, which reads and writes the state once."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from linrope_kernels.angles import Phases, cos_sin, load_theta
from linrope_kernels.decay import decay_state, state_factor
from linrope_kernels.launch import NO_STATE, State, launch, tile_of
from linrope_kernels.memory import (
    Chunk,
    Pairs,
    broadcast_rows,
    feature_offsets,
    load_features,
    load_state,
    load_values,
    load_write,
    load_z,
    mask_features,
    rows_of,
    rows_of_units,
    store_state,
    store_z,
    strides_of,
)
from linrope_kernels.pieces import divisor, feature_map, inverse_length, rotate, sum_of_products
from linrope_kernels.unit_decay import unit_columns


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
    log,  # Rows (b or 1, 1, g or 1, 1 or units): log decay, float32 or float64
    write, erase,  # Rows (b or 1, 1, g or 1): the factors of the values, and b of the delta rule
    SLOTS,  # (b,) int64: each sequence's row in a pool of states; None: sequence i has row i
    start,  # (rows g, f, e) float32, (rows g, f) float64; None: 0
    end,  # the new state; may be start if parts == 1; None: not wanted
    out,  # Rows (b, 1, h, e)
    g, group, parts, eps,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr, AXES: tl.constexpr,
    MAP: tl.constexpr, INTERLEAVED: tl.constexpr, ADD: tl.constexpr, NORMALIZE: tl.constexpr,
    UNITS: tl.constexpr, LENGTH: tl.constexpr, W: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """S = e^a S + R psi (w v)^T, z = e^a z + psi; out = (R phi)^T S / phi . z; ``parts`` programs per (b g).

    With erase w v - b (e^a S)^T R psi takes the place of w v, and z is 0. LENGTH: the queries' length under the
    map "unit", whose keys have length 1; 0: another map.
    """
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
    f, columns = feature_offsets(0, PAIRS), unit_columns(0, UNITS, PAIRS)
    if log.pointer is not None:
        LOG = log.pointer + (batch * log.strides[0] + kv_head * log.strides[2])
        a = tl.load(LOG + columns * log.strides[3]).to(tl.float64)
        factor = state_factor(a[None, :])
    keys = Chunk(batch, kv_head.to(tl.int64), row, unmasked)
    psi = feature_map(load_features(k, keys, 0, PAIRS), MAP)
    psi = mask_features(psi, unmasked, 0, PAIRS)
    if LENGTH > 0:
        psi *= inverse_length(psi)
    psi_hat = rotate(psi, key_rotation, P)
    w, b = 1.0, 0.0
    if write.pointer is not None:
        w = load_write(write, keys)[None, :]
    if erase.pointer is not None:
        b = load_write(erase, keys)[None, :]
        z = tl.zeros([2 * W], tl.float64)
    else:
        z = load_z(start, state_index, f, F)
        if log.pointer is not None:
            z = z * tl.exp(a)
        z += tl.sum(psi, 0).to(tl.float64)
    for block in range(part, tl.cdiv(E, BE), parts):
        e = block * BE + tl.arange(0, BE)
        values = tl.trans(load_values(v, keys, e, E, BE)).to(tl.float32) * w
        s = load_state(start, state_index, f, e, F, E)
        if log.pointer is not None:
            s = decay_state(s, factor)
        if erase.pointer is not None:
            values -= b * sum_of_products(s, psi_hat, 1)[:, None]
        s += values * psi_hat
        if end[0] is not None:
            store_state(end, state_index, s, f, e, F, E)
        for r in range(group):
            head = (kv_head * group + r).to(tl.int64)
            phi = feature_map(load_features(q, Chunk(batch, head, row, row == 0), 0, PAIRS), MAP)
            if LENGTH > 0:
                phi = mask_features(phi, None, 0, PAIRS)
                phi *= LENGTH * inverse_length(phi)
            num = sum_of_products(s, rotate(phi, rotation, P), 1)
            if NORMALIZE:
                num /= divisor(sum_of_products(phi, z.to(tl.float32), None), eps, ADD)
            OUT = out.pointer + batch * out.strides[0] + head * out.strides[2] + e * out.strides[3]
            tl.store(OUT, num.to(OUT.dtype.element_ty), mask=e < E)
    if end[0] is not None and part == 0:
        store_z(end, state_index, z, f, F)


def step_fwd(
    call: Any, phases: Phases | None, start: State | None, end: State | None, slots: Tensor | None
) -> Tensor:
    """out of one token of every sequence. end may be start, which is then updated in place.

    phases: the angles if they come from data. slots (b,): start and end are pools of states, and sequence i has row
    slots[i].
    """
    b, g, e = call.k.shape[0], call.k.shape[2], call.v.shape[3]
    # In place a single program handles a sequence and head: each program reads z, and one overwrites it.
    in_place = start is not None and end is not None and start[1] is end[1]
    name = "step_in_place" if in_place else "step_fwd"
    parts = 1 if in_place else -(-e // tile_of(call, name).values)
    theta = call.theta_turns if phases is None else None
    axes, heads = (1, 1) if theta is None else theta.shape[:2]
    key_positions = call.positions if call.key_positions is None else call.key_positions
    places = [(x, strides_of(x, 1)[0]) for x in (call.positions.contiguous(), key_positions.contiguous())]
    of_queries, of_keys = phases or (None, None)
    of_keys = of_queries if of_keys is None else of_keys
    mask = None if call.key_mask is None else call.key_mask.contiguous()
    out: Tensor = call.v.new_empty(*call.q.shape[:3], e)
    launch(
        call, step_fwd_kernel, name, b * g * parts,
        rows_of(call.q), rows_of(call.k), rows_of(call.v), mask, (theta, heads), *places,
        broadcast_rows(of_queries, 4), broadcast_rows(of_keys, 4), rows_of_units(call.log_decay),
        broadcast_rows(call.write, 3), broadcast_rows(call.erase, 3), slots,
        start or NO_STATE, end or NO_STATE, rows_of(out), g, call.group, parts, call.eps, AXES=axes,
        UNITS=call.decays_by_unit, LENGTH=float(call.query_factor),
    )  # fmt: skip
    return out
