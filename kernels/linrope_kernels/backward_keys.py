"""dk and dv: a scan from the last chunk to the first, with the state's gradient T on chip. Equations in backward.py."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from linrope_kernels.backward import weighed
from linrope_kernels.decay import (
    chunk_decay,
    decay_parts,
)
from linrope_kernels.forward import load_keys
from linrope_kernels.memory import (
    Chunk,
    Pairs,
    load_features,
    load_rotation,
    load_states,
    load_values,
    load_write,
    mask_features,
    program_of,
    seen,
    segment_span,
    store_angle_gradients,
    store_features,
    store_states,
    store_values,
)
from linrope_kernels.pieces import (
    add_products,
    angle_gradients,
    divisor,
    dot,
    dot_parts,
    feature_map,
    is_raw,
    operand,
    partial_sums,
    read_state,
    rotate,
    rotate_back,
    slope,
    spread_parts,
    sum_in_rows,
    sum_of_products,
    through_registers,
    totals,
)


class QueryTiles(NamedTuple):
    """A chunk's queries of one head, as operands in parts of pairs and, for dout, of values."""

    d_outputs: Any
    phi_hat: Any  # R phi / den
    phi_to_start: Any  # phi^ e^D, which T takes up
    of_den: Any  # delta phi / den; () without dk or a normalizer


@triton.jit
def load_queries(
    q, dout, DEN, DELTA, rows, token, rotations, dz, w0, e0, decay, eps,
    EP: tl.constexpr, E: tl.constexpr, MAP: tl.constexpr, ADD: tl.constexpr, OF_DEN: tl.constexpr,
    DOT: tl.constexpr, BE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """QueryTiles, and dz with their terms. rows: a Chunk. token: its indices in DEN and DELTA (b, h, n)."""
    phi_hat, phi_to_start, of_den, dz_after, d_outputs = (), (), (), (), ()
    for w in tl.static_range(len(rotations)):
        phi = feature_map(load_features(q, rows, w0 + w * PAIRS.W, PAIRS), MAP)
        # After the last token dout and delta are 0, so that phi need not be.
        phi = mask_features(phi, rows.inside if is_raw(MAP, PAIRS.P) else None, w0 + w * PAIRS.W, PAIRS)
        if DEN is not None:
            phi *= (1 / divisor(tl.load(DEN + token, mask=rows.inside, other=1), eps, ADD))[:, None]
        hat = rotate(phi, rotations[w], PAIRS.P)
        phi_hat = phi_hat + (operand(hat, DOT),)
        phi_to_start = phi_to_start + (operand(hat if decay is None else hat * decay.from_start, DOT),)
        if OF_DEN:
            terms = phi * tl.load(DELTA + token, mask=rows.inside, other=0)[:, None]
            of_den = of_den + (operand(terms, DOT),)
            terms = terms if decay is None else terms * decay.from_start
            dz_after = dz_after + (dz[w] + partial_sums(terms),)
    for i in tl.static_range(EP):
        values = load_values(dout, rows, e0 + i * BE + tl.arange(0, BE), E, BE)
        d_outputs = d_outputs + (operand(values, DOT),)
    return QueryTiles(d_outputs, phi_hat, phi_to_start, of_den), dz_after if OF_DEN else dz


@triton.jit
def d_values_of_state(psi_hat, t_i, decay, DOT: tl.constexpr):
    """T^T psi^ for the part of the values whose state parts are t_i[w]."""
    product = read_state(psi_hat, t_i, DOT)
    return product if decay is None else product * decay.to_end


@triton.jit
def d_keys_of_state(values, t, w: tl.constexpr, decay, write, DOT: tl.constexpr):
    """T w v for the part w of the pairs."""
    product = tl.zeros([values[0].shape[0], t[0][w].shape[1]], tl.float32)
    for i in tl.static_range(len(values)):
        product = dot(values[i], operand(t[i][w], DOT), product, DOT)
    product = product if write is None else product * write[:, None]
    return product if decay is None else product * decay.to_end


@triton.jit
def add_to_values(d_values, queries, psi_hat, t, decay, DOT: tl.constexpr):
    """dv with the terms of a query head. d_values: () for none so far; t: T after the chunk."""
    scores, after = weighed(dot_parts(psi_hat, queries.phi_hat, DOT), decay, None, DOT, True), ()
    for i in tl.static_range(len(t)):
        if len(d_values) == 0:
            before = d_values_of_state(psi_hat, t[i], decay, DOT)
        else:
            before = d_values[i]
        after = after + (dot(scores, queries.d_outputs[i], before, DOT),)
    return after


@triton.jit
def add_to_keys(dpsi, queries, inside, values, t, decay, write, DOT: tl.constexpr):
    """R dpsi with the terms of a query head but for those of the normalizer; arguments as in add_to_values."""
    C: tl.constexpr = values[0].shape[0]
    d_scores, after = tl.zeros([C, C], tl.float32), ()
    for i in tl.static_range(len(t)):  # the values are an async copy, so dout must not be one as well
        d_outputs = through_registers(queries.d_outputs[i], inside)
        d_scores = dot(values[i], tl.trans(d_outputs), d_scores, DOT)
    d_scores = d_scores if write is None else d_scores * write[:, None]  # rounded as in dq: they cancel in da
    d_scores = weighed(d_scores, decay, None, DOT, True)
    for w in tl.static_range(len(queries.phi_hat)):
        if len(dpsi) == 0:
            before = d_keys_of_state(values, t, w, decay, write, DOT)
        else:
            before = dpsi[w]
        after = after + (dot(d_scores, queries.phi_hat[w], before, DOT),)
    return after


@triton.jit
def add_to_sums(dpsi, of_den, decay, end, DOT: tl.constexpr):
    """The normalizer's part of dpsi, sum_{i>=j} delta_i phi_i / den_i, added to dpsi (its parts)."""
    C: tl.constexpr = of_den[0].shape[0]
    after = ()
    ones = weighed(tl.full([C, C], 1.0, tl.float32), decay, end, DOT, True)
    for w in tl.static_range(len(of_den)):
        after = after + (dot(ones, of_den[w], dpsi[w], DOT),)
    return after


@triton.jit(do_not_specialize=["m", "g", "segments", "length"])
def dkv_kernel(
    q, k, v, tokens,  # all as in scan_fwd_kernel
    after,  # T (b g, s, f, e), dz (b g, s, f): the state's gradient after each segment; None: 0
    dout, DEN, DELTA,
    dk, dv,  # Rows (b, m, g, f), (b, m, g, e); None: not wanted
    terms,  # Terms of the keys
    d_start,  # (b g, f, e), (b g, f): the gradient of the first state; None: not wanted
    m, g, group, segments, length, eps,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
    MAP: tl.constexpr, INTERLEAVED: tl.constexpr, ADD: tl.constexpr,
    CAUSAL: tl.constexpr, NORMALIZE: tl.constexpr,
    DOT: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BE: tl.constexpr,
    WP: tl.constexpr, EP: tl.constexpr, STAGES: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """dk, dv, or both; one program per (key/value head, segment, block of pairs for dk or of values for dv).

    A program of dk reads all values, one of dv all pairs, and one of both computes all of a head. GROUPED: a key/value
    head may have several query heads.
    """
    PAIRS: tl.constexpr = Pairs(F, P, INTERLEAVED, W)
    DK: tl.constexpr = dk.pointer is not None
    DV: tl.constexpr = dv.pointer is not None
    BLOCKS: tl.constexpr = ((F + 1) // 2 + WP * W - 1) // (WP * W)
    VALUE_BLOCKS: tl.constexpr = (E + EP * BE - 1) // (EP * BE)
    block, segment, bg = program_of(BLOCKS * VALUE_BLOCKS, segments)
    w0, e0 = block % BLOCKS * (WP * W), block // BLOCKS * (EP * BE)
    batch, kv_head, bg = (bg // g).to(tl.int64), bg % g, bg.to(tl.int64)
    first, end, packed_index = segment_span(tokens.spans, segment, length, m)
    state_index = bg * segments + segment if CAUSAL else bg + packed_index * g
    t, dz = load_states(after, state_index, w0, e0, WP, EP, BE, E, PAIRS)
    dz = spread_parts(dz, DOT)
    chunks = tl.cdiv(end - first, C)
    start = first + chunks * C
    for _ in tl.range(0, chunks, num_stages=STAGES):
        start -= C
        rows = start + tl.arange(0, C)
        inside = rows < end
        keys = Chunk(batch, kv_head.to(tl.int64), rows, inside)
        decay = None if tokens.log.pointer is None else chunk_decay(tokens.log, keys, DOT, True)
        visible = seen(tokens.mask, keys, m)
        write = None if tokens.write.pointer is None else load_write(tokens.write, visible)
        row_mask = visible.inside if tokens.mask is not None or is_raw(MAP, P) else None
        x, values, psi_hat, rotations = (), (), (), ()
        for w in tl.static_range(WP):
            rotations = rotations + (load_rotation(tokens.table, keys, w0 + w * W, PAIRS),)
            if DK:
                x = x + (load_features(k, keys, w0 + w * W, PAIRS),)
            if DV:
                psi_hat = psi_hat + (
                    load_keys(
                        k, tokens, keys, row_mask, rotations[w], w0 + w * W, None, None, MAP, DOT, PAIRS
                    )[1],
                )
        if DK:
            for i in tl.static_range(EP):
                e = e0 + i * BE + tl.arange(0, BE)
                values_i = operand(load_values(v, visible, e, E, BE), DOT)
                values = values + (values_i if CAUSAL else through_registers(values_i, visible.inside),)
        t_after, dz_after = t, dz
        if decay is not None:
            t, dz = decay_parts(t, decay), decay_parts((dz,), decay)[0]
        d_values, dpsi, dpsi_den = (), (), ()
        if GROUPED:
            for i in tl.static_range(EP if DV else 0):
                d_values = d_values + (d_values_of_state(psi_hat, t_after[i], decay, DOT),)
            for w in tl.static_range(WP if DK else 0):
                dpsi = dpsi + (d_keys_of_state(values, t_after, w, decay, write, DOT),)
                dpsi_den = dpsi_den + (tl.zeros([C, 2 * W], tl.float32),)
            if CAUSAL:
                for r in range(group):
                    head = Chunk(batch, (kv_head * group + r).to(tl.int64), rows, inside)
                    queries, dz = load_queries(
                        q, dout, DEN, DELTA, head, (bg * group + r) * m + rows, rotations, dz, w0, e0, decay, eps,
                        EP, E, MAP, ADD, DK and NORMALIZE, DOT, BE, PAIRS,
                    )  # fmt: skip
                    if DV:
                        d_values = add_to_values(d_values, queries, psi_hat, t_after, decay, DOT)
                    if DK:
                        dpsi = add_to_keys(dpsi, queries, inside, values, t_after, decay, write, DOT)
                    if DK and NORMALIZE:
                        dpsi_den = add_to_sums(dpsi_den, queries.of_den, decay, end, DOT)
                    t = add_products(t, queries.d_outputs, queries.phi_to_start, DOT)
        else:
            queries, dz = load_queries(
                q, dout, DEN, DELTA, keys, bg * m + rows, rotations, dz, w0, e0, decay, eps,
                EP, E, MAP, ADD, DK and NORMALIZE, DOT, BE, PAIRS,
            )  # fmt: skip
            if DV:
                d_values = add_to_values(d_values, queries, psi_hat, t_after, decay, DOT)
            if DK:
                dpsi = add_to_keys(dpsi, queries, inside, values, t_after, decay, write, DOT)
            t = add_products(t, queries.d_outputs, queries.phi_to_start, DOT)
        token = (batch * m + rows) * g + kv_head
        if DV:
            d_write = tl.zeros([C], tl.float32)
            for i in tl.static_range(EP):
                e = e0 + i * BE + tl.arange(0, BE)
                d_values_i = tl.where(visible.inside[:, None], d_values[i], 0.0)
                if write is not None:
                    d_write += sum_of_products(
                        load_values(v, visible, e, E, BE).to(tl.float32), d_values_i, 1
                    )
                    d_values_i *= write[:, None]
                store_values(dv, d_values_i, keys, e, E, BE)
            if write is not None:
                tl.store(terms.write + token * VALUE_BLOCKS + block // BLOCKS, d_write, mask=inside)
        if DK:
            psi_dpsi = tl.zeros([C], tl.float32)
            of_rows, of_keys = (), ()
            for w in tl.static_range(WP):
                rotation = rotations[w]
                if tokens.key_table is not None:
                    rotation = load_rotation(tokens.key_table, keys, w0 + w * W, PAIRS)
                dpsi_w = rotate_back(dpsi[w], rotation, P)
                if terms.angles is not None:
                    d_angles = angle_gradients(feature_map(x[w], MAP), dpsi_w)
                    d_angles = tl.where(visible.inside[:, None], d_angles, 0.0)
                    store_angle_gradients(terms.angles, d_angles, token, inside, w0 + w * W, P)
                of_den = sum_in_rows(dz_after[w], C, DOT)
                of_rows = of_rows + (dpsi_w + (of_den if decay is None else of_den * decay.to_end),)
            if GROUPED:
                for w in tl.static_range(WP):
                    of_keys = of_keys + (dpsi_den[w] + of_rows[w],)
            elif NORMALIZE:
                of_keys = add_to_sums(of_rows, queries.of_den, decay, end, DOT)
            else:
                of_keys = of_rows
            for w in tl.static_range(WP):
                if terms.log is not None:
                    psi_dpsi += sum_of_products(feature_map(x[w], MAP), of_keys[w], 1)
                d_features = tl.where(visible.inside[:, None], of_keys[w] * slope(x[w], MAP), 0.0)
                store_features(dk, d_features, keys, w0 + w * W, PAIRS)
            if terms.log is not None:
                psi_dpsi = tl.where(visible.inside, psi_dpsi, 0.0)
                tl.store(terms.log + token * BLOCKS + block, psi_dpsi, mask=inside)

    if DK and CAUSAL and tokens.spans is None and d_start[0] is not None and segments == 1:
        store_states(d_start, bg, t, totals(dz), w0, e0, True, BE, E, PAIRS)
