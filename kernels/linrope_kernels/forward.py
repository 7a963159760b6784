"""Causal and bidirectional eq. 19: a scan over the chunks of a segment, with the state on chip.

    num_i = sum_j <R phi_i, R psi_j> v_j     den_i = sum_j <phi_i, psi_j>     out_i = num_i / max(den_i, eps)

With decay each term is multiplied by e^(D_i - D_j), where D is log decay summed from the chunk's first token.
The state that leaves a chunk is decayed to its last token. ADD: out_i = num_i / (den_i + eps).

If there are too few heads to fill the GPU, a sequence is cut into segments: ``states`` computes the state of
each segment alone, ``prefix`` sums those of all earlier segments, and the scans of all segments run side by
side. Packed sequences are also cut at their boundaries; SPANS, a table on the device, holds each segment's
tokens.

Axis letters are linrope's, except that s counts segments; the variable s is a tile of the state. bh numbers all query
heads of a batch, bg all key/value heads.
"""

import triton
import triton.language as tl

from linrope_kernels.decay import as_columns, as_rows, decay_state, exponent, load_decay, power, state_factor
from linrope_kernels.pieces import (
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
    rounded_products,
    segment_span,
    store_state,
    store_values,
    store_z,
    sum_of_products,
    through_registers,
)


@triton.jit(do_not_specialize=["n", "h", "segments", "length"])
def scan_fwd_kernel(
    Q, q_strides,  # (b, n, h, f)
    K, k_strides,  # (b, m, g, f)
    V, v_strides,  # (b, m, g, e)
    MASK,  # (b, m) bool
    Q_TABLE, q_table_strides,  # (1 or b, 1 or g, n, 2 P): cos and sin
    K_TABLE, k_table_strides,  # (1 or b, 1 or g, m, 2 P); None: Q_TABLE is for the keys too
    LOG, log_strides,  # (b or 1, n, g or 1) float32 or float64: log decay; stride 0 along axes of length 1
    SPANS,  # (s, 3) int32: first token, last + 1, packed sequence; None: not packed
    S, Z,  # (b g, s, f, e) float32, (b g, s, f) float64: the state before each segment; None: 0
    OUT, out_strides,  # (b, n, h, e)
    DEN,  # (b, h, n) float32
    S_END, Z_END,  # (b g, f, e), (b g, f); None: not wanted
    n, h, group, segments, length, eps,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
    MAP: tl.constexpr, INTERLEAVED: tl.constexpr, ADD: tl.constexpr,
    CAUSAL: tl.constexpr, NORMALIZE: tl.constexpr,
    DOT: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out and, if wanted, den and the last state; one program per (query head, segment, value block)."""
    BLOCKS: tl.constexpr = (E + BE - 1) // BE
    block = tl.program_id(0) % BLOCKS
    segment = tl.program_id(0) // BLOCKS % segments
    bh = tl.program_id(0) // BLOCKS // segments
    batch, kv_head = (bh // h).to(tl.int64), bh % h // group
    bg = (bh // group).to(tl.int64)

    Q += batch * q_strides[0] + (bh % h).to(tl.int64) * q_strides[2]
    K += batch * k_strides[0] + kv_head.to(tl.int64) * k_strides[2]
    V += batch * v_strides[0] + kv_head.to(tl.int64) * v_strides[2]
    OUT += batch * out_strides[0] + (bh % h).to(tl.int64) * out_strides[2]
    if MASK is not None:
        MASK += batch * n
    if DEN is not None:
        DEN += bh.to(tl.int64) * n
    if P > 0:
        Q_TABLE += batch * q_table_strides[0] + kv_head.to(tl.int64) * q_table_strides[1]
    if K_TABLE is not None:
        K_TABLE += batch * k_table_strides[0] + kv_head.to(tl.int64) * k_table_strides[1]

    c = tl.arange(0, C)
    f = feature_offsets(0, F, P, INTERLEAVED, W)
    e = block * BE + tl.arange(0, BE)
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
        rotation = load_rotation(Q_TABLE, rows, inside, 0, F, P, INTERLEAVED, C, W)
        key_rotation = rotation
        if CAUSAL:
            unmasked = inside
            if MASK is not None:
                unmasked = inside & (tl.load(MASK + rows, mask=inside, other=0) != 0)
            if K_TABLE is not None:
                key_rotation = load_rotation(K_TABLE, rows, inside, 0, F, P, INTERLEAVED, C, W)
            k = load_features(K, rows, inside, k_strides, 0, F, P, INTERLEAVED, C, W)
            psi = mask_features(feature_map(k, MAP), unmasked, 0, F, W)
            psi_hat = rotate(psi, key_rotation, P)
            psi_to_end = operand(psi_hat if LOG is None else psi_hat * to_end, DOT)
            psi_hat = operand(psi_hat, DOT)
            psi, z = carry_z(psi, z, c == 0, decay)
            psi = operand(psi, DOT)
            v = operand(load_values(V, rows, unmasked, v_strides, e, E, BE), DOT)
        q = load_features(Q, rows, inside, q_strides, 0, F, P, INTERLEAVED, C, W)
        if not CAUSAL:
            q = through_registers(q, inside)
        phi = feature_map(q, MAP)
        phi_hat = operand(rotate(phi, rotation, P), DOT)
        if LOG is not None:  # a tile for both products; its registers are free again when the state is read
            decay_tile = power(D_rows, as_columns(exponent(D, DOT)), DOT)
            scores = dot(phi_hat, tl.trans(psi_hat), tl.zeros([C, C], tl.float32), DOT) * decay_tile
        if NORMALIZE:
            if CAUSAL:
                den_scores = dot(operand(phi, DOT), tl.trans(psi), tl.zeros([C, C], tl.float32), DOT)
                if LOG is not None:
                    den_scores = den_scores * decay_tile
                den = tl.sum(tl.where(not_future, den_scores, 0.0), 1)
            else:
                den = sum_of_products(phi, z.to(tl.float32)[None, :], 1)
            if DEN is not None and block == 0:
                tl.store(DEN + rows, den, mask=inside)
        num = dot(phi_hat, tl.trans(operand(s, DOT)), tl.zeros([C, BE], tl.float32), DOT)
        if CAUSAL:
            if LOG is None:
                scores = dot(phi_hat, tl.trans(psi_hat), tl.zeros([C, C], tl.float32), DOT)
            else:
                num = num * from_start
                s = decay_state(s, over_chunk)
            scores = tl.where(not_future, scores, 0.0)
            num = dot(operand(scores, DOT), v, num, DOT)
            s = dot(tl.trans(v), psi_to_end, s, DOT)
        if NORMALIZE:
            num = num / divisor(den, eps, ADD)[:, None]
        store_values(OUT, num, rows, inside, out_strides, e, E, BE)

    if CAUSAL and SPANS is None and S_END is not None and segments == 1 and bh % group == 0:
        store_state(S_END, bg, s, f, e, F, E)
        if block == 0:
            store_z(Z_END, bg, z, f, F)


@triton.jit(do_not_specialize=["m", "g", "segments", "length"])
def states_kernel(
    X, x_strides,  # (b, m, heads, f): k; REVERSE: q
    Y, y_strides,  # (b, m, heads, e): v; REVERSE: dout
    MASK,  # (b, m) bool
    DEN, DELTA,  # (b, h, m) float32; REVERSE only
    TABLE, table_strides,  # (1 or b, 1 or g, m, 2 P)
    LOG, log_strides, SPANS,
    S, Z,  # (b g, s, f, e), (b g, s, f)
    TOTALS,  # (b g, s) float64: log decay summed over each segment
    m, g, group, segments, length, eps,
    F: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
    MAP: tl.constexpr, INTERLEAVED: tl.constexpr, ADD: tl.constexpr,
    NORMALIZE: tl.constexpr, REVERSE: tl.constexpr,
    DOT: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The state of each segment alone: S = sum R psi v^T, z = sum psi; one program per (b g, segment, block).

    REVERSE: their gradients, T = sum R phi dout^T / den and dz = sum delta phi / den over all query heads.

    With decay S and z are decayed to the segment's last token, T and dz to the token before the segment. The
    scan starts at that edge and moves away from it: the log decay between a chunk and the edge is then known,
    and nothing that was added to the state has to decay any further.
    """
    BLOCKS: tl.constexpr = (E + BE - 1) // BE
    block = tl.program_id(0) % BLOCKS
    segment = tl.program_id(0) // BLOCKS % segments
    bg = tl.program_id(0) // BLOCKS // segments
    batch, kv_head = (bg // g).to(tl.int64), bg % g
    bg = bg.to(tl.int64)

    X += batch * x_strides[0]
    Y += batch * y_strides[0]
    if MASK is not None:
        MASK += batch * m
    if P > 0:
        TABLE += batch * table_strides[0] + kv_head.to(tl.int64) * table_strides[1]

    c = tl.arange(0, C)
    f = feature_offsets(0, F, P, INTERLEAVED, W)
    e = block * BE + tl.arange(0, BE)
    s, z = tl.zeros([BE, 2 * W], tl.float32), tl.zeros([2 * W], tl.float64)
    first, end, _ = segment_span(SPANS, segment, length, m)
    if LOG is not None:
        LOG += batch * log_strides[0] + kv_head.to(tl.int64) * log_strides[2]
    log_to_edge = tl.full([], 0, tl.float64)
    chunks = tl.cdiv(end - first, C)
    for i in tl.range(0, chunks, num_stages=STAGES):
        rows = first + (i if REVERSE else chunks - 1 - i) * C + c
        inside = rows < end
        unmasked = inside
        if MASK is not None:
            unmasked = inside & (tl.load(MASK + rows, mask=inside, other=0) != 0)
        rotation = load_rotation(TABLE, rows, inside, 0, F, P, INTERLEAVED, C, W)
        if LOG is not None:
            D, D_end = load_decay(LOG, log_strides, rows, inside, DOT)
            to_edge = exponent(log_to_edge + (D if REVERSE else D_end - D), DOT)
            factor = power(to_edge, (0, 0), DOT)[:, None]
            log_to_edge += D_end
        for r in range(group if REVERSE else 1):
            head = (kv_head * group + r if REVERSE else kv_head).to(tl.int64)
            x = load_features(X + head * x_strides[2], rows, inside, x_strides, 0, F, P, INTERLEAVED, C, W)
            y = load_values(Y + head * y_strides[2], rows, unmasked, y_strides, e, E, BE)
            x = mask_features(feature_map(x, MAP), unmasked, 0, F, W)
            if LOG is not None:
                x = x * factor
            token = (bg * group + r) * m + rows
            if REVERSE and NORMALIZE:
                x *= (1 / divisor(tl.load(DEN + token, mask=inside, other=1), eps, ADD))[:, None]
            x_hat = rotate(x, rotation, P)
            if REVERSE and NORMALIZE:
                x = x * tl.load(DELTA + token, mask=inside, other=0)[:, None]
            s = dot(tl.trans(operand(y, DOT)), operand(x_hat, DOT), s, DOT)
            if NORMALIZE or not REVERSE:
                z += tl.sum(rounded_products(x), 0).to(tl.float64)

    state_index = bg * segments + segment
    store_state(S, state_index, s, f, e, F, E)
    if block == 0:
        store_z(Z, state_index, z, f, F)
        if LOG is not None:
            tl.store(TOTALS + state_index, log_to_edge)


@triton.jit(do_not_specialize=["g", "segments"])
def prefix_kernel(
    TOTALS,  # (b g, s) float64: log decay summed over each segment; None: no decay
    FIRST_SPANS,  # (sequences + 1,) int32: the first segment of each packed sequence; None: not packed
    S, Z,  # (b g, s, f, e), (b g, s, f)
    S_START, Z_START,  # (b g, f, e), (b g, f): the first state (REVERSE: gradient of the last); None: 0
    S_END, Z_END,  # the sum over all segments; None: not wanted
    g, segments,
    F: tl.constexpr, E: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replaces each segment's own state with the state before it (REVERSE: after it), in place and in order."""
    BLOCKS: tl.constexpr = (F * E + BLOCK - 1) // BLOCK
    block = tl.program_id(0) % BLOCKS
    bg = (tl.program_id(0) // BLOCKS).to(tl.int64)
    elements = block * BLOCK + tl.arange(0, BLOCK)
    f = elements % BLOCK  # the first block does z as well
    inside, has_z = elements < F * E, elements < (F if block == 0 else 0)
    s, z = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float64)
    if S_START is not None:
        s = tl.load(S_START + bg * F * E + elements, mask=inside, other=0)
        z = tl.load(Z_START + bg * F + f, mask=has_z, other=0).to(tl.float64)
    first, end, base = 0, segments, bg * segments
    if FIRST_SPANS is not None:
        FIRST_SPANS += bg // g
        first, end, base = tl.load(FIRST_SPANS), tl.load(FIRST_SPANS + 1), bg % g * segments
    for segment in range(first, end):
        index = base + (first + end - 1 - segment if REVERSE else segment)
        s_segment = tl.load(S + index * F * E + elements, mask=inside, other=0)
        z_segment = tl.load(Z + index * F + f, mask=has_z, other=0)
        tl.store(S + index * F * E + elements, s, mask=inside)
        tl.store(Z + index * F + f, z, mask=has_z)
        if TOTALS is not None:
            total = tl.load(TOTALS + index)
            s, z = decay_state(s, state_factor(total)), z * tl.exp(total)
        s += s_segment
        z += z_segment
    if S_END is not None:
        tl.store(S_END + bg * F * E + elements, s, mask=inside)
        tl.store(Z_END + bg * F + f, z.to(Z_END.dtype.element_ty), mask=has_z)
