"""The RMS norm of the heads' outputs with a gate and a skip connection: kernels and their launchers.

    u = (out + D v) f(z);    u = weight u rsqrt(mean(u^2) + eps);    y = (u + D v) f(z)

where D v and f(z) each stand either before or after the norm. b batch, n tokens, h heads, g heads of v, e values.

A tile has R rows of BE values: T tokens, for each GB heads of v, for each the RP >= h / g heads that share it. A
token's values are several blocks, of heads and then of columns, if they do not fit a tile. A program goes through LOOP
of them: those that share a norm. With more than one, it reads them twice, for their mean and for the result.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from linrope_kernels.memory import Rows
from linrope_kernels.partial_sums import sum_rows
from linrope_kernels.pieces import gate_and_slope, rounded_products, sum_of_products
from linrope_kernels.start import start_kernel
from linrope_kernels.tiles import power_of_two, power_of_two_from_16

BLOCK = 1024  # elements of a tile: 8 per thread, 16 bytes of bfloat16
WHOLE = {"head": 8192, "all": 4096}  # most elements of a tile with all values of a norm: more would spill
LOOPED = 4096  # elements of other tiles of a norm: several tokens, whose sums go to memory together
WARPS = 4096  # in all programs of the backward pass together: about 8 programs of 4 warps on each H100 multiprocessor


class Inputs(NamedTuple):
    out: Rows  # (b, n, h, e); of all Rows the last stride is 1
    gate: Rows  # (b, n, h, e); pointer None: absent, as for all others
    v: Rows  # (b, n, g, e)
    skip: Rows  # D (h,)
    weight: Rows  # (h, e), with both strides


class Shape(NamedTuple):
    """The constants of a tile."""

    HEADS: int
    GROUP: int  # h / g
    E: int
    COLUMNS: int  # blocks of columns
    T: int
    GB: int
    RP: int
    BE: int


class How(NamedTuple):
    """The constants of a call."""

    OVER_ALL: bool
    GATE_FIRST: bool
    SKIP_FIRST: bool
    ACTIVATION: str


class Place(NamedTuple):
    """Where a tile lies in (b, n, heads, e)."""

    batch: Any  # int64
    token: Any  # (R,) int64
    head: Any  # (R,) int64
    kv_head: Any  # (R,) int64
    e: Any  # (BE,)
    exists: Any  # (R,)
    inside: Any  # (R, BE)


@triton.jit
def place_of(tile, row_tiles, n, block, SHAPE: tl.constexpr):
    """A block of a tile's tokens. row_tiles: those of the n tokens of a batch row."""
    batch, first_token = (tile // row_tiles).to(tl.int64), (tile % row_tiles).to(tl.int64) * SHAPE.T
    row = tl.arange(0, SHAPE.T * SHAPE.GB * SHAPE.RP)
    token, member = first_token + row // (SHAPE.GB * SHAPE.RP), row % SHAPE.RP
    kv_head = block // SHAPE.COLUMNS * SHAPE.GB + row // SHAPE.RP % SHAPE.GB
    head = kv_head * SHAPE.GROUP + member
    e = block % SHAPE.COLUMNS * SHAPE.BE + tl.arange(0, SHAPE.BE)
    exists = (member < SHAPE.GROUP) & (head < SHAPE.HEADS) & (token < n)
    inside = exists[:, None] & (e < SHAPE.E)[None, :]
    return Place(batch, token, head.to(tl.int64), kv_head.to(tl.int64), e, exists, inside)


@triton.jit
def pointers(x, place, head):
    """(R, BE): into x, Rows (b, n, heads, e)."""
    row = place.batch * x.strides[0] + place.token * x.strides[1] + head * x.strides[2]
    return x.pointer + row[:, None] + place.e[None, :]


@triton.jit
def load(x, place, head):
    """(R, BE) in float32; 0 outside."""
    return tl.load(pointers(x, place, head), mask=place.inside, other=0).to(tl.float32)


@triton.jit
def store(x, place, head, values):
    tl.store(pointers(x, place, head), values.to(x.pointer.dtype.element_ty), mask=place.inside)


@triton.jit
def before_norm(x, place, HOW: tl.constexpr):
    """p = out (+ D v), u = p (f(z)), v, D (R, 1), f(z) and its slope; the last four are 0, 0, 1, 0 if absent."""
    p = load(x.out, place, place.head)
    v, skip, factor, slope = 0.0, 0.0, 1.0, 0.0
    if x.v.pointer is not None:
        v = load(x.v, place, place.kv_head)
        at = x.skip.pointer + place.head * x.skip.strides[0]
        skip = tl.load(at, mask=place.exists, other=0).to(tl.float32)[:, None]
        if HOW.SKIP_FIRST:
            p += skip * v
    u = p
    if x.gate.pointer is not None:
        factor, slope = gate_and_slope(load(x.gate, place, place.head), HOW.ACTIVATION)
        if HOW.GATE_FIRST:
            u = p * factor
    return p, u, v, skip, factor, slope


@triton.jit
def load_weight(x, place):
    """(R, BE) in float32."""
    rows = x.weight.pointer + (place.head * x.weight.strides[0])[:, None]
    at = rows + (place.e * x.weight.strides[1])[None, :]
    return tl.load(at, mask=place.inside, other=0).to(tl.float32)


@triton.jit
def part_of_mean(x, y, SHAPE: tl.constexpr, HOW: tl.constexpr):
    """(R,): what each row adds to the mean of x y over a norm's values.

    The division comes first, as the compiler knows that adding 0 (``rounded_products``) does not change a square.
    """
    size: tl.constexpr = SHAPE.HEADS * SHAPE.E if HOW.OVER_ALL else SHAPE.E
    return sum_of_products(x, y * (1 / size), 1)


@triton.jit
def mean_of(parts, SHAPE: tl.constexpr, HOW: tl.constexpr):
    """The mean over a norm's values, in each of its rows."""
    if HOW.OVER_ALL:
        heads: tl.constexpr = SHAPE.GB * SHAPE.RP
        total = tl.sum(tl.reshape(parts, [SHAPE.T, heads]), 1)
        return tl.reshape(tl.broadcast_to(total[:, None], [SHAPE.T, heads]), [SHAPE.T * heads])
    else:
        return parts


@triton.jit(do_not_specialize=["row_tiles", "n"])
def norm_fwd_kernel(
    x,  # Inputs
    y,  # Rows (b, n, h, e)
    row_tiles, n, eps,  # row_tiles: of T tokens, per batch row
    HEADS: tl.constexpr, GROUP: tl.constexpr, E: tl.constexpr, COLUMNS: tl.constexpr,
    T: tl.constexpr, GB: tl.constexpr, RP: tl.constexpr, BE: tl.constexpr,
    OVER_ALL: tl.constexpr, GATE_FIRST: tl.constexpr, SKIP_FIRST: tl.constexpr, ACTIVATION: tl.constexpr,
    PROGRAMS: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """PROGRAMS share the blocks of a tile of tokens."""
    SHAPE: tl.constexpr = Shape(HEADS, GROUP, E, COLUMNS, T, GB, RP, BE)
    HOW: tl.constexpr = How(OVER_ALL, GATE_FIRST, SKIP_FIRST, ACTIVATION)
    tile, first = tl.program_id(0) // PROGRAMS, tl.program_id(0) % PROGRAMS * LOOP
    if x.weight.pointer is not None and LOOP > 1:
        squares = tl.zeros([T * GB * RP], tl.float32)
        for block in range(first, first + LOOP):
            u = before_norm(x, place_of(tile, row_tiles, n, block, SHAPE), HOW)[1]
            squares += part_of_mean(u, u, SHAPE, HOW)
        scale = tl.rsqrt(mean_of(squares, SHAPE, HOW) + eps)
    for block in range(first, first + LOOP):
        place = place_of(tile, row_tiles, n, block, SHAPE)
        _, u, v, skip, factor, _ = before_norm(x, place, HOW)
        if x.weight.pointer is not None:
            if LOOP == 1:
                scale = tl.rsqrt(mean_of(part_of_mean(u, u, SHAPE, HOW), SHAPE, HOW) + eps)
            u = load_weight(x, place) * (u * scale[:, None])
        if x.v.pointer is not None and not SKIP_FIRST:
            u += skip * v
        if x.gate.pointer is not None and not GATE_FIRST:
            u *= factor
        store(y, place, place.head, u)


@triton.jit
def write_sum(SUM, x, mask, earlier):
    """Writes x. earlier: whether to add it to the number at SUM, which this program's threads stored; None: never."""
    if earlier is not None:
        tl.debug_barrier()  # one thread stored the number, and several may load it
        x += tl.load(SUM, mask=mask & earlier, other=0)
        tl.debug_barrier()
    tl.store(SUM, x, mask=mask)


@triton.jit
def write_sums(
    weight_sums, weight_products, skip_sums, skip_products, block, part, earlier,
    SHAPE: tl.constexpr, ONE_TOKEN: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """The sums over a tile's tokens of what a block adds to the gradients of weight and D."""
    heads: tl.constexpr = SHAPE.GB * SHAPE.RP
    place = place_of(part * 0, 1, 1, block, ONE_TOKEN)  # token 0 has the same heads and columns as any other
    if weight_sums is not None:
        sums = tl.sum(tl.reshape(weight_products, [SHAPE.T, heads, SHAPE.BE]), 0)
        if SHARED:
            at = weight_sums + tl.program_id(0).to(tl.int64) * SHAPE.E + place.e
            write_sum(at, tl.sum(sums, 0), place.e < SHAPE.E, earlier)
        else:
            at = weight_sums + (part * SHAPE.HEADS + place.head)[:, None] * SHAPE.E + place.e[None, :]
            write_sum(at, sums, place.inside, earlier)
    if skip_sums is not None:
        sums = tl.sum(tl.reshape(skip_products, [SHAPE.T, heads]), 0)
        row = part * SHAPE.COLUMNS + block % SHAPE.COLUMNS
        write_sum(skip_sums + row * SHAPE.HEADS + place.head, sums, place.exists, earlier)


@triton.jit(do_not_specialize=["all_tiles", "tiles", "row_tiles", "n"])
def norm_bwd_kernel(
    x, dy, d_out, d_gate, d_v,  # Inputs, and Rows as those of out, gate and v
    weight_sums,  # float32 sums over the tokens of each part, (parts, h, e), or with SHARED (parts PROGRAMS, e)
    skip_sums,  # (parts COLUMNS, h) float32 likewise
    all_tiles, tiles, row_tiles, n, eps,  # tiles: per part
    HEADS: tl.constexpr, GROUP: tl.constexpr, E: tl.constexpr, COLUMNS: tl.constexpr,
    T: tl.constexpr, GB: tl.constexpr, RP: tl.constexpr, BE: tl.constexpr,
    OVER_ALL: tl.constexpr, GATE_FIRST: tl.constexpr, SKIP_FIRST: tl.constexpr, ACTIVATION: tl.constexpr,
    PROGRAMS: tl.constexpr, LOOP: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """With r = rsqrt(mean(u^2) + eps) and g the gradient of weight u r: du = r (g weight - u r mean(g weight u r)).

    SHARED: one weight for all heads. The sums of a single block stay in registers, those of several go to memory.
    """
    SHAPE: tl.constexpr = Shape(HEADS, GROUP, E, COLUMNS, T, GB, RP, BE)
    KV_SHAPE: tl.constexpr = Shape(HEADS // GROUP, 1, E, COLUMNS, T, GB, 1, BE)
    HOW: tl.constexpr = How(OVER_ALL, GATE_FIRST, SKIP_FIRST, ACTIVATION)
    ONE_TOKEN: tl.constexpr = Shape(HEADS, GROUP, E, COLUMNS, 1, GB, RP, BE)
    part, first = (tl.program_id(0) // PROGRAMS).to(tl.int64), tl.program_id(0) % PROGRAMS * LOOP
    weight_products = tl.zeros([T * GB * RP, BE], tl.float32)
    skip_products = tl.zeros([T * GB * RP], tl.float32)
    first_tile = tl.program_id(0) // PROGRAMS * tiles
    for tile in range(first_tile, tl.minimum(first_tile + tiles, all_tiles)):
        if x.weight.pointer is not None and LOOP > 1:
            squares, products = tl.zeros([T * GB * RP], tl.float32), tl.zeros([T * GB * RP], tl.float32)
            for block in range(first, first + LOOP):
                place = place_of(tile, row_tiles, n, block, SHAPE)
                _, u, _, _, factor, _ = before_norm(x, place, HOW)
                g = load(dy, place, place.head)
                if not GATE_FIRST:
                    g *= factor
                squares += part_of_mean(u, u, SHAPE, HOW)
                products += part_of_mean(g * load_weight(x, place), u, SHAPE, HOW)
            scale = tl.rsqrt(mean_of(squares, SHAPE, HOW) + eps)
            mean = mean_of(products, SHAPE, HOW) * scale
        for block in range(first, first + LOOP):
            if LOOP > 1:  # memory has the sums so far
                weight_products = tl.zeros([T * GB * RP, BE], tl.float32)
                skip_products = tl.zeros([T * GB * RP], tl.float32)
            place = place_of(tile, row_tiles, n, block, SHAPE)
            p, u, v, skip, factor, slope = before_norm(x, place, HOW)
            gradient = load(dy, place, place.head)
            g = gradient
            if x.gate.pointer is not None and not GATE_FIRST:
                g = gradient * factor
            d_skip_term, result = g, u
            if x.weight.pointer is not None:
                weight = load_weight(x, place)
                if LOOP == 1:
                    scale = tl.rsqrt(mean_of(part_of_mean(u, u, SHAPE, HOW), SHAPE, HOW) + eps)
                    mean = mean_of(part_of_mean(g * weight, u, SHAPE, HOW), SHAPE, HOW) * scale
                normal = u * scale[:, None]
                result = weight * normal
                weight_products += g * normal
                g = (g * weight - normal * mean[:, None]) * scale[:, None]
            if x.gate.pointer is not None:
                if GATE_FIRST:
                    dz = g * p * slope
                    g *= factor
                else:
                    if x.v.pointer is not None and not SKIP_FIRST:
                        result += skip * v
                    dz = result * slope * gradient
                store(d_gate, place, place.head, dz)
            store(d_out, place, place.head, g)
            if x.v.pointer is not None:
                if SKIP_FIRST:
                    d_skip_term = g
                skip_products += sum_of_products(d_skip_term, v, 1)
                dv = tl.reshape(rounded_products(d_skip_term * skip), [T * GB, RP, BE])
                kv_place = place_of(tile, row_tiles, n, block, KV_SHAPE)
                store(d_v, kv_place, kv_place.head, tl.sum(dv, 1))
            if LOOP > 1:
                write_sums(
                    weight_sums, weight_products, skip_sums, skip_products, block, part, tile > first_tile,
                    SHAPE, ONE_TOKEN, SHARED,
                )  # fmt: skip
    if LOOP == 1:
        write_sums(
            weight_sums, weight_products, skip_sums, skip_products, first, part, None, SHAPE, ONE_TOKEN, SHARED
        )  # fmt: skip


class Plan(NamedTuple):
    shape: Shape
    programs: int  # for the blocks of a token
    loop: int
    warps: int


@cache
def plan_of(h: int, group: int, e: int, norm: bool, over_all: bool) -> Plan:
    """The tiles of h heads of e values, in groups that share a head of v; over_all: one norm of all.

    It depends on these arguments alone, so a token's result has the same bits whatever else is in the call.
    """
    kv_heads, rows, values = h // group, power_of_two(group), power_of_two_from_16(e)
    most, elements = max(1, BLOCK // (rows * values)), BLOCK
    if over_all:
        most = power_of_two(kv_heads)
    if norm and most * rows * values > WHOLE["all" if over_all else "head"]:
        elements, most = LOOPED, max(1, BLOCK // (rows * values))
    if not norm or elements == LOOPED:
        values = min(values, max(16, BLOCK // rows))
    kv_block = min(power_of_two(kv_heads), most)
    tokens = max(1, elements // (kv_block * rows * values))
    columns, head_blocks = -(-e // values), -(-kv_heads // kv_block)
    loop = columns * head_blocks if over_all else columns if norm else 1
    warps = min(16, tokens * kv_block * rows * values // 256)
    shape = Shape(h, group, e, columns, tokens, kv_block, rows, values)
    return Plan(shape, columns * head_blocks // loop, loop, warps)


def _plan(call: Any) -> Plan:
    (h, e), norm = call.out.shape[2:], call.weight is not None
    return plan_of(h, 1 if call.v is None else h // call.v.shape[2], e, norm, norm and call.over_heads)


def _rows(x: Tensor | None, e: int) -> Rows:
    """x (b, n, heads, e) or (b, n, heads e) as the former."""
    if x is None:
        return Rows(None, (0, 0, 0))
    x = x if x.stride(-1) == 1 else x.contiguous()
    return Rows(x, x.stride()[:3] if x.ndim == 4 else (*x.stride()[:2], e))


def _start(
    kernel: Any, call: Any, plan: Plan, tiles: int, others: list[Tensor | None], *args: Any, **constants: Any
) -> None:
    """Starts plan.programs for each tile or part. others: tensors shaped as out, gate or v."""
    e, weight, skip = plan.shape.E, call.weight, call.skip
    inputs = Inputs(
        _rows(call.out, e), _rows(call.gate, e), _rows(call.v, e),
        Rows(skip, (0,) if skip is None else skip.stride()),
        Rows(weight, (0, 0) if weight is None else (0, *weight.stride())[-2:]),
    )  # fmt: skip
    start_kernel(
        kernel, tiles * plan.programs, inputs, *(_rows(x, e) for x in others), *args, call.eps, **plan.shape._asdict(),
        OVER_ALL=weight is not None and call.over_heads, GATE_FIRST=call.gate is not None and call.gate_first,
        SKIP_FIRST=call.skip_first, ACTIVATION=call.gate_activation, PROGRAMS=plan.programs, LOOP=plan.loop,
        **constants, num_warps=plan.warps,
    )  # fmt: skip


def norm_fwd(call: Any) -> Tensor:
    """y (b, n, h e). call: the record of linrope/ops/norm.py, whose fields this package only reads."""
    b, n, h, e = call.out.shape
    y: Tensor = call.out.new_empty(b, n, h * e)
    if y.numel():
        plan = _plan(call)
        row_tiles = -(-n // plan.shape.T)
        _start(norm_fwd_kernel, call, plan, b * row_tiles, [y], row_tiles, n)
    return y


def norm_bwd(call: Any, dy: Tensor) -> list[Tensor | None]:
    """The gradients of out, weight, gate, v and skip, each in its dtype."""
    inputs = call.out, call.weight, call.gate, call.v, call.skip
    gradients = [None if x is None else x.new_empty(x.shape) for x in inputs]
    if not dy.numel():
        return [None if x is None else x.zero_() for x in gradients]
    d_out, d_weight, d_gate, d_v, d_skip = gradients
    (b, n, h, _), plan = call.out.shape, _plan(call)
    row_tiles = -(-n // plan.shape.T)
    tiles = -(-b * row_tiles * plan.programs * plan.warps // WARPS)
    parts = -(-b * row_tiles // tiles)
    weight_sums = skip_sums = None
    shared = call.weight is not None and call.weight.ndim == 1
    if call.weight is not None:
        rows = parts * plan.programs if shared else parts
        weight_sums = dy.new_empty(rows, call.weight.numel(), dtype=torch.float32)
    if call.skip is not None:
        skip_sums = dy.new_empty(parts * plan.shape.COLUMNS, h, dtype=torch.float32)
    _start(
        norm_bwd_kernel, call, plan, parts, [dy, d_out, d_gate, d_v], weight_sums, skip_sums,
        b * row_tiles, tiles, row_tiles, n, SHARED=shared,
    )  # fmt: skip
    sum_rows(weight_sums, d_weight, skip_sums, d_skip)
    return gradients
