"""Causal and bidirectional eq. 19: a scan over the chunks of a segment, with the state on chip.

    num_i = sum_j <R phi_i, R psi_j> v_j     den_i = sum_j <phi_i, psi_j>     out_i = num_i / max(den_i, eps)

With decay each term is multiplied by e^(D_i - D_j), where D is log decay summed from the chunk's first token.
The state that leaves a chunk is decayed to its last token. ADD: out_i = num_i / (den_i + eps).

If there are too few heads to fill the GPU, a sequence is cut into segments (segments.py). transition.py computes the
state before each one, and the scans of all segments run side by side.

Axis letters are linrope's, except that s counts segments; the variable s is a tile of the state. bh numbers all query
heads of a batch, bg all key/value heads.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linrope_kernels import tiles
from linrope_kernels.angles import Phases, make_tables, new_table
from linrope_kernels.decay import chunk_decay, decay_parts, decay_tile
from linrope_kernels.launch import (
    NO_STATE,
    State,
    blocks_of,
    cut,
    launch,
    most_segments,
    new_like,
    new_state,
    new_states,
    scans_states,
    tokens_of,
)
from linrope_kernels.memory import (
    Chunk,
    Pairs,
    load_features,
    load_rotation,
    load_states,
    load_values,
    load_write,
    mask_features,
    places_of,
    program_of,
    rows_of,
    seen,
    segment_span,
    store_states,
    store_values,
)
from linrope_kernels.pieces import (
    add_products,
    carry_z,
    divisor,
    dot,
    dot_parts,
    feature_map,
    is_raw,
    not_future,
    operand,
    read_state,
    rotate,
    sum_of_products,
    through_registers,
)
from linrope_kernels.transition import segment_states


@triton.jit
def load_keys(
    k, tokens, keys, row_mask, rotation, w0, decay, write,
    MAP: tl.constexpr, DOT: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """psi in float32, and as operands psi^ = R psi and w psi^ e^(D_end - D), which the state takes up.

    write multiplies psi^ and the scores, so that the values go straight to the matrix unit.

    row_mask: the keys whose psi is not 0; None: all. rotation: the queries', which keys without a table of their own
    share.
    """
    if tokens.key_table is not None:
        rotation = load_rotation(tokens.key_table, keys, w0, PAIRS)
    psi = feature_map(load_features(k, keys, w0, PAIRS), MAP)
    psi = mask_features(psi, row_mask, w0, PAIRS)
    psi_hat = rotate(psi, rotation, PAIRS.P)
    psi_to_end = psi_hat if decay is None else psi_hat * decay.to_end
    psi_to_end = psi_to_end if write is None else psi_to_end * write[:, None]
    return psi, operand(psi_hat, DOT), operand(psi_to_end, DOT)


@triton.jit(do_not_specialize=["n", "h", "segments", "length"])
def scan_fwd_kernel(
    q, k, v,  # Rows (b, n, h, f), (b, m, g, f), (b, m, g, e)
    tokens,  # Tokens
    before,  # states (b g, s, f, e) float32, (b g, s, f) float64 before each segment; None: 0
    out,  # Rows (b, n, h, e)
    DEN,  # (b, h, n) float32
    end,  # states (b g, f, e), (b g, f) after the last segment; None: not wanted
    n, h, group, segments, length, eps,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
    MAP: tl.constexpr, INTERLEAVED: tl.constexpr, ADD: tl.constexpr,
    CAUSAL: tl.constexpr, NORMALIZE: tl.constexpr,
    DOT: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BE: tl.constexpr,
    WP: tl.constexpr, EP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out and, if wanted, den and the last state; one program per (query head, segment, value block)."""
    PAIRS: tl.constexpr = Pairs(F, P, INTERLEAVED, W)
    block, segment, bh = program_of((E + EP * BE - 1) // (EP * BE), segments)
    batch, head, kv_head, bg = places_of(bh, h, group)
    e0 = block * EP * BE
    first, last, packed_index = segment_span(tokens.spans, segment, length, n)
    state_index = bg * segments + segment if CAUSAL else bg + packed_index * (h // group)
    s, z = load_states(before, state_index, 0, e0, WP, EP, BE, E, PAIRS)
    # In bfloat16 the z of a call that returns none is float32, which takes half of the registers.
    Z: tl.constexpr = tl.float32 if DOT == "bf16" and end[1] is None else tl.float64
    sums = ()
    for w in tl.static_range(WP):
        sums = sums + (z[w].to(Z),)
    z = sums
    for chunk_start in tl.range(first, last, C, num_stages=STAGES):
        rows = chunk_start + tl.arange(0, C)
        inside = rows < last
        queries, keys = Chunk(batch, head, rows, inside), Chunk(batch, kv_head, rows, inside)
        decay = None if tokens.log.pointer is None else chunk_decay(tokens.log, keys, DOT, False)
        psi, psi_hat, psi_to_end, phi_hat = (), (), (), ()
        if CAUSAL:
            visible, sums = seen(tokens.mask, keys, n), ()
            write = None if tokens.write.pointer is None else load_write(tokens.write, visible)
            # Keys after the last token have no values and no query sees them, so that only the last z needs the mask.
            masked: tl.constexpr = tokens.mask is not None or end[1] is not None or is_raw(MAP, P)
            row_mask = visible.inside if masked else None
            for w in tl.static_range(WP):
                rotation = load_rotation(tokens.table, keys, w * W, PAIRS)
                psi_w, hat, to_end = load_keys(
                    k, tokens, keys, row_mask, rotation, w * W, decay, write, MAP, DOT, PAIRS
                )
                psi_w, z_w = carry_z(psi_w, z[w], tl.arange(0, C) == 0, decay)
                psi, sums = psi + (operand(psi_w, DOT),), sums + (z_w,)
                psi_hat, psi_to_end = psi_hat + (hat,), psi_to_end + (to_end,)
            z = sums
        den_scores, den = tl.zeros([C, C], tl.float32), tl.zeros([C], tl.float32)
        for w in tl.static_range(WP):
            x = load_features(q, queries, w * W, PAIRS)
            if not CAUSAL:
                x = through_registers(x, inside)
            phi = feature_map(x, MAP)
            phi_hat = phi_hat + (
                operand(rotate(phi, load_rotation(tokens.table, keys, w * W, PAIRS), P), DOT),
            )
            if NORMALIZE and CAUSAL:
                den_scores = dot(operand(phi, DOT), tl.trans(psi[w]), den_scores, DOT)
            elif NORMALIZE:
                den += sum_of_products(phi, z[w].to(tl.float32)[None, :], 1)
        if CAUSAL:
            scores = dot_parts(phi_hat, psi_hat, DOT)
            if decay is not None:  # a tile for both products
                tile = decay_tile(decay.D, DOT, False)
                scores, den_scores = scores * tile, den_scores * tile
            if write is not None:
                scores = scores * write[None, :]
            scores = operand(tl.where(not_future(C, False), scores, 0.0), DOT)
        if NORMALIZE:
            if CAUSAL:
                den = tl.sum(tl.where(not_future(C, False), den_scores, 0.0), 1)
            if DEN is not None and block == 0:
                tl.store(DEN + bh.to(tl.int64) * n + rows, den, mask=inside)
            inv_den = 1 / divisor(den, eps, ADD)
        values = ()
        for i in tl.static_range(EP):
            e = e0 + i * BE + tl.arange(0, BE)
            num = read_state(phi_hat, s[i], DOT)
            if CAUSAL:
                values = values + (operand(load_values(v, visible, e, E, BE), DOT),)
                num = dot(scores, values[i], num if decay is None else num * decay.from_start, DOT)
            if NORMALIZE:
                num = num * inv_den[:, None]
            store_values(out, num, queries, e, E, BE)
        if CAUSAL:
            s = add_products(s if decay is None else decay_parts(s, decay), values, psi_to_end, DOT)

    if CAUSAL and tokens.spans is None and end[0] is not None and segments == 1 and bh % group == 0:
        store_states(end, bg, s, z, 0, e0, block == 0, BE, E, PAIRS)


def reads_out(call: Any) -> bool:
    """True if the backward pass reads out, because no program has all feature pairs."""
    if call.q is None:
        return False
    return bool(call.normalize) and blocks_of(call, "dq")[0] > 1


def saved_segments(call: Any) -> int:
    """States per sequence and head that the forward pass saves, none for a single segment; symbolic if n is."""
    most = most_segments(call)
    if most == 1 or not call.causal or call.cu_seqlens is not None:
        return 0
    number = tiles.segments(call.k.shape[1], most)[0]
    return number if number > 1 else 0


def new_tables(call: Any) -> list[Tensor]:
    """Empty tables of cos and sin, as the forward pass saves them; it saves none if angles come from data."""
    if call.angle_steps is not None or not call.pairs or call.q is None:
        return []
    sides = [(call.positions, call.q)]
    if call.key_positions is not None:
        sides.append((call.key_positions, call.k))
    return [new_table(call, positions, None, x.shape[1]) for positions, x in sides]


def new_sums(call: Any) -> list[Tensor]:
    """Empty den (b, h, n) and, unless it is cheap to recompute, a state, which the forward pass saves.

    A bidirectional call saves the state of all keys; a causal one with few heads saves the states before its segments.
    """
    if call.q is None:
        return []
    b, n, h, _ = call.q.shape
    saved = [call.q.new_empty(b, h, n, dtype=torch.float32)] if call.normalize else []
    if not call.causal:
        return [*saved, *new_state(call, None)]
    number = saved_segments(call)
    return [*saved, *new_states(call, number)] if number else saved


def empty_saved(call: Any) -> list[Tensor]:
    """Empty tensors for all that the forward pass saves."""
    return [*new_tables(call), *new_sums(call)]


def unpack_sums(call: Any, saved: list[Tensor]) -> tuple[Tensor | None, State | None]:
    """Splits the tensors of new_sums into den and the state or states."""
    den, *states = saved if call.normalize else (None, *saved)
    return den, (states[0], states[1]) if states else None  # type: ignore[return-value]


def attend_fwd(
    call: Any, phases: Phases | None, start: State | None, save: bool
) -> tuple[Tensor | None, State | None, list[Tensor]]:
    """out (b, n, h, e), the last state if wanted, and if ``save`` the tensors that empty_saved describes.

    phases: the angles if they come from data.
    """
    table, key_table = make_tables(call, phases)
    end, key_segments = new_state(call, start) if call.return_state else None, cut(call, call.k.shape[1])
    if call.q is None:
        segment_states(call, key_segments, key_table, start, None, end)
        return None, end, []
    saved = new_sums(call) if save else []
    den, states = unpack_sums(call, saved) if save else (None, None)
    b, n, h, _ = call.q.shape
    segments = key_segments if n == call.k.shape[1] else cut(call, n)
    states_before = start
    if not call.causal:
        states_before = states or end or new_state(call, None)
        segment_states(call, key_segments, key_table, start, None, states_before)
        if end is not None and end is not states_before:
            end = end[0].copy_(states_before[0]), end[1].copy_(states_before[1])
    elif scans_states(segments):
        states_before = states or new_states(call, segments.number)
        segment_states(call, segments, key_table, start, states_before, end)
    out = new_like(call.v, segments, b, n, h, call.v.shape[3])
    launch(
        call, scan_fwd_kernel, "scan_fwd", b * h * segments.number,
        rows_of(call.q), rows_of(call.k), rows_of(call.v),
        tokens_of(call, table, key_table if call.causal else None, segments),
        states_before or NO_STATE, rows_of(out), den, end or NO_STATE,
        n, h, call.group, segments.number, segments.length, call.eps, CAUSAL=call.causal,
    )  # fmt: skip
    if save and phases is None and table is not None:
        saved = [table, *([] if key_table is None or key_table is table else [key_table]), *saved]
    return out, end, saved
