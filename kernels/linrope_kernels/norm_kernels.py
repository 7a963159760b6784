"""Kernels of the RMS norm of the heads' outputs with a gate and a skip connection:

    u = (out + D v) silu(z);    u = weight u rsqrt(mean(u^2) + eps);    y = (u + D v) silu(z)

where D v and silu(z) stand either before or after the norm. b batch, n tokens, h heads, g heads of v, e values.

A tile has R rows of BE values: T tokens, for each GB heads of v, for each the RP >= h / g heads that share it.
"""

import triton
import triton.language as tl

from linrope_kernels.pieces import silu_and_slope


@triton.jit
def heads_of(
    block, HEADS: tl.constexpr, GROUP: tl.constexpr, T: tl.constexpr, GB: tl.constexpr, RP: tl.constexpr
):
    """For each row (R,) of a block of heads: its token in the tile, its head, its head of v, and whether it exists."""
    row = tl.arange(0, T * GB * RP)
    kv_head, member = block * GB + row // RP % GB, row % RP
    head = kv_head * GROUP + member
    return row // (GB * RP), head, kv_head, (member < GROUP) & (head < HEADS)


@triton.jit
def load_rows(X, strides, batch, token, head, e, inside):
    """A tile (R, BE) in float32 of X (b, n, heads, e), whose last stride is 1; 0 outside."""
    offset = batch * strides[0] + token * strides[1] + head.to(tl.int64) * strides[2]
    return tl.load(X + offset[:, None] + e[None, :], mask=inside, other=0).to(tl.float32)


@triton.jit
def before_norm(
    OUT, out_strides, GATE, gate_strides, V, v_strides, SKIP, skip_stride,
    batch, token, head, kv_head, e, exists, inside,
    GATE_FIRST: tl.constexpr, SKIP_FIRST: tl.constexpr,
):  # fmt: skip
    """p = out (+ D v), u = p (silu(z)), v, D v, silu(z) and its slope; the last four are 0, 0, 1, 0 if absent."""
    p = load_rows(OUT, out_strides, batch, token, head, e, inside)
    v, skip_term, factor, slope = 0.0, 0.0, 1.0, 0.0
    if V is not None:
        v = load_rows(V, v_strides, batch, token, kv_head, e, inside)
        skip_term = v * tl.load(SKIP + head * skip_stride, mask=exists, other=0).to(tl.float32)[:, None]
        if SKIP_FIRST:
            p += skip_term
    u = p
    if GATE is not None:
        factor, slope = silu_and_slope(load_rows(GATE, gate_strides, batch, token, head, e, inside))
        if GATE_FIRST:
            u = p * factor
    return p, u, v, skip_term, factor, slope


@triton.jit
def load_weight(WEIGHT, strides, head, e, inside):
    """(R, BE) of the weight (h, e), in float32."""
    at = WEIGHT + (head * strides[0])[:, None] + (e * strides[1])[None, :]
    return tl.load(at, mask=inside, other=0).to(tl.float32)


@triton.jit
def over_heads(x, OVER_ALL: tl.constexpr, T: tl.constexpr):
    """With OVER_ALL each token's sum of x (R,) over its heads, in each of its rows; else x."""
    if OVER_ALL:
        heads: tl.constexpr = x.shape[0] // T
        total = tl.sum(tl.reshape(x, [T, heads]), 1)
        return tl.reshape(tl.broadcast_to(total[:, None], [T, heads]), [T * heads])
    else:
        return x


@triton.jit(do_not_specialize=["n", "tokens", "tiles"])
def norm_fwd_kernel(
    OUT, out_strides,  # (b, n, h, e), like GATE and V with a last stride of 1
    GATE, gate_strides,  # (b, n, h, e); None: no gate
    V, v_strides,  # (b, n, g, e); None: no skip connection
    SKIP, skip_stride,  # D (h,)
    WEIGHT, weight_strides,  # (h, e); None: no norm
    Y,  # (b, n, h, e) contiguous
    n, tokens, tiles, eps,  # tokens: b n; tiles: of T tokens, per program
    HEADS: tl.constexpr, GROUP: tl.constexpr, E: tl.constexpr, OVER_ALL: tl.constexpr,
    GATE_FIRST: tl.constexpr, SKIP_FIRST: tl.constexpr, BLOCKS: tl.constexpr, LOOP: tl.constexpr,
    T: tl.constexpr, GB: tl.constexpr, RP: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """BLOCKS programs share a token's heads; each goes through LOOP blocks of them, for their mean and once more."""
    SIZE: tl.constexpr = HEADS * E if OVER_ALL else E
    first, part, e = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS, tl.arange(0, BE)
    first_token = part.to(tl.int64) * tiles * T
    for tile in range(tiles):
        if WEIGHT is not None and LOOP > 1:
            squares = tl.zeros([T * GB * RP], tl.float32)
            for block in range(LOOP):
                row, head, kv_head, exists = heads_of(block, HEADS, GROUP, T, GB, RP)
                index = first_token + tile * T + row
                inside = (exists & (index < tokens))[:, None] & (e < E)[None, :]
                u = before_norm(
                    OUT, out_strides, GATE, gate_strides, V, v_strides, SKIP, skip_stride,
                    index // n, index % n, head, kv_head, e, exists, inside, GATE_FIRST, SKIP_FIRST,
                )[1]  # fmt: skip
                squares += tl.sum(u * u, 1)
            scale = tl.rsqrt(over_heads(squares, OVER_ALL, T) / SIZE + eps)
        for block in range(first, first + LOOP):
            row, head, kv_head, exists = heads_of(block, HEADS, GROUP, T, GB, RP)
            index = first_token + tile * T + row
            inside = (exists & (index < tokens))[:, None] & (e < E)[None, :]
            _, u, _, skip_term, factor, _ = before_norm(
                OUT, out_strides, GATE, gate_strides, V, v_strides, SKIP, skip_stride,
                index // n, index % n, head, kv_head, e, exists, inside, GATE_FIRST, SKIP_FIRST,
            )  # fmt: skip
            if WEIGHT is not None:
                if LOOP == 1:
                    scale = tl.rsqrt(over_heads(tl.sum(u * u, 1), OVER_ALL, T) / SIZE + eps)
                u = load_weight(WEIGHT, weight_strides, head, e, inside) * (u * scale[:, None])
            if V is not None and not SKIP_FIRST:
                u += skip_term
            if GATE is not None and not GATE_FIRST:
                u *= factor
            at = Y + ((index * HEADS + head) * E)[:, None] + e[None, :]
            tl.store(at, u.to(Y.dtype.element_ty), mask=inside)


@triton.jit
def add_to(SUM, x, mask, times):
    """Adds x to the number at SUM, which this program's threads stored in an earlier iteration.

    If ``times`` is 0, stores x as it is.
    """
    tl.debug_barrier()  # another thread may have stored the number
    tl.store(SUM, x + tl.load(SUM, mask=mask & (times > 0), other=0), mask=mask)


@triton.jit(do_not_specialize=["n", "tokens", "tiles"])
def norm_bwd_kernel(
    OUT, out_strides, GATE, gate_strides, V, v_strides, SKIP, skip_stride, WEIGHT, weight_strides,
    DY, dy_strides,  # (b, n, h, e), last stride 1
    D_OUT, D_GATE, D_V,  # contiguous, as OUT, GATE, V
    D_WEIGHT,  # float32 sums over each program's tokens, (parts, h, e), or with SHARED (parts BLOCKS, e)
    D_SKIP,  # (parts, h) float32 likewise
    n, tokens, tiles, eps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, E: tl.constexpr, OVER_ALL: tl.constexpr,
    GATE_FIRST: tl.constexpr, SKIP_FIRST: tl.constexpr, SHARED: tl.constexpr, BLOCKS: tl.constexpr,
    LOOP: tl.constexpr, T: tl.constexpr, GB: tl.constexpr, RP: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """With r = rsqrt(mean(u^2) + eps) and g the gradient of weight u r: du = r (g weight - u r mean(g weight u r)).

    SHARED: one weight for all heads. A single block of heads keeps its sums in registers, LOOP blocks in memory.
    """
    SIZE: tl.constexpr = HEADS * E if OVER_ALL else E
    first, part, e = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS, tl.arange(0, BE)
    first_token = part.to(tl.int64) * tiles * T
    weight_sums, skip_sums = tl.zeros([T * GB * RP, BE], tl.float32), tl.zeros([T * GB * RP, BE], tl.float32)
    if WEIGHT is not None and not SHARED:
        D_WEIGHT += part.to(tl.int64) * (HEADS * E)
    for tile in range(tiles):
        if WEIGHT is not None and LOOP > 1:
            squares, products = tl.zeros([T * GB * RP], tl.float32), tl.zeros([T * GB * RP], tl.float32)
            for block in range(LOOP):
                row, head, kv_head, exists = heads_of(block, HEADS, GROUP, T, GB, RP)
                index = first_token + tile * T + row
                inside = (exists & (index < tokens))[:, None] & (e < E)[None, :]
                _, u, _, _, factor, _ = before_norm(
                    OUT, out_strides, GATE, gate_strides, V, v_strides, SKIP, skip_stride,
                    index // n, index % n, head, kv_head, e, exists, inside, GATE_FIRST, SKIP_FIRST,
                )  # fmt: skip
                g = load_rows(DY, dy_strides, index // n, index % n, head, e, inside)
                if not GATE_FIRST:
                    g = g * factor
                squares += tl.sum(u * u, 1)
                products += tl.sum(g * load_weight(WEIGHT, weight_strides, head, e, inside) * u, 1)
            scale = tl.rsqrt(over_heads(squares, OVER_ALL, T) / SIZE + eps)
            mean = over_heads(products, OVER_ALL, T) * scale / SIZE
        for block in range(first, first + LOOP):
            row, head, kv_head, exists = heads_of(block, HEADS, GROUP, T, GB, RP)
            index = first_token + tile * T + row
            inside = (exists & (index < tokens))[:, None] & (e < E)[None, :]
            p, u, v, skip_term, factor, slope = before_norm(
                OUT, out_strides, GATE, gate_strides, V, v_strides, SKIP, skip_stride,
                index // n, index % n, head, kv_head, e, exists, inside, GATE_FIRST, SKIP_FIRST,
            )  # fmt: skip
            dy = load_rows(DY, dy_strides, index // n, index % n, head, e, inside)
            g = dy
            if GATE is not None and not GATE_FIRST:
                g = dy * factor
            d_skip_term, result = g, u
            if WEIGHT is not None:
                weight = load_weight(WEIGHT, weight_strides, head, e, inside)
                if LOOP == 1:
                    scale = tl.rsqrt(over_heads(tl.sum(u * u, 1), OVER_ALL, T) / SIZE + eps)
                    mean = over_heads(tl.sum(g * weight * u, 1), OVER_ALL, T) * scale / SIZE
                normal = u * scale[:, None]
                result = weight * normal
                if LOOP == 1:
                    weight_sums += g * normal
                else:
                    at = D_WEIGHT + (head * E)[:, None] + e[None, :]
                    add_to(at, g * normal, inside, tile)
                g = (g * weight - normal * mean[:, None]) * scale[:, None]
            at = ((index * HEADS + head) * E)[:, None] + e[None, :]
            if GATE is not None:
                if GATE_FIRST:
                    dz = g * p * slope
                    g = g * factor
                else:
                    if V is not None and not SKIP_FIRST:
                        result += skip_term
                    dz = result * slope * dy
                tl.store(D_GATE + at, dz.to(D_GATE.dtype.element_ty), mask=inside)
            tl.store(D_OUT + at, g.to(D_OUT.dtype.element_ty), mask=inside)
            if V is not None:
                if SKIP_FIRST:
                    d_skip_term = g
                if LOOP == 1:
                    skip_sums += d_skip_term * v
                else:
                    at = D_SKIP + part.to(tl.int64) * HEADS + head
                    add_to(at, tl.sum(d_skip_term * v, 1), exists, tile)
                D = tl.load(SKIP + head * skip_stride, mask=exists, other=0).to(tl.float32)
                dv = tl.sum(tl.reshape(d_skip_term * D[:, None], [T * GB, RP, BE]), 1)
                row, kv_head, _, exists = heads_of(block, HEADS // GROUP, 1, T, GB, 1)
                index = first_token + tile * T + row
                inside = (exists & (index < tokens))[:, None] & (e < E)[None, :]
                at = D_V + ((index * (HEADS // GROUP) + kv_head) * E)[:, None] + e[None, :]
                tl.store(at, dv.to(D_V.dtype.element_ty), mask=inside)

    if LOOP == 1:
        _, head, _, exists = heads_of(first, HEADS, GROUP, 1, GB, RP)
        if WEIGHT is not None:
            sums = tl.sum(tl.reshape(weight_sums, [T, GB * RP, BE]), 0)
            if SHARED:
                at = D_WEIGHT + tl.program_id(0).to(tl.int64) * E + e
                tl.store(at, tl.sum(sums, 0), mask=e < E)
            else:
                inside = exists[:, None] & (e < E)[None, :]
                tl.store(D_WEIGHT + (head * E)[:, None] + e[None, :], sums, mask=inside)
        if V is not None:
            sums = tl.sum(tl.reshape(tl.sum(skip_sums, 1), [T, GB * RP]), 0)
            tl.store(D_SKIP + part.to(tl.int64) * HEADS + head, sums, mask=exists)
