"""Arithmetic, logic, comparisons, conversions.

Approximate instructions (ex2.approx, rcp.approx, div.full ..) are computed exactly here: what they lose on a
GPU is not seen.
"""

from collections.abc import Callable

import numpy as np

from tests.kernels.ptx.machine import UNSIGNED, Array, Machine, Mask, Run
from tests.kernels.ptx.operands import (
    DTYPES,
    Read,
    bits_of,
    elementwise,
    from_bf16,
    opcode,
    registers,
    source,
    target,
    to_bf16,
)
from tests.kernels.ptx.parse import Fault, Immediate, Instruction, Operand, Register

INTEGERS = "b16 u16 s16 b32 u32 s32 b64 u64 s64"
FLOATS = "f16 bf16 f32 f64"


def flushed(x: Array) -> Array:
    """.ftz: float32's subnormal numbers are 0."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def simple(name: str, qualifiers: str, f: Callable[..., Array]) -> None:
    """Enters an opcode that does the same to numbers of each type."""

    @opcode(name, qualifiers)
    def builder(instruction: Instruction) -> Run:
        ftz = "ftz" in instruction.qualifiers

        def g(*x: Array) -> Array:
            return flushed(f(*map(flushed, x))) if ftz else f(*x)

        return elementwise(g, instruction.qualifiers[-1])(instruction)


def fused(x: Array, y: Array, z: Array) -> Array:
    """x y + z, rounded once; of float64 twice, of narrower ones in float64 and then to their own."""
    if x.dtype == np.float64:
        return x * y + z
    return (x.astype(np.float64) * y + z).astype(x.dtype)


def quotient(x: Array, y: Array) -> Array:
    """To the nearest; of integers towards 0."""
    if x.dtype.kind == "f":
        return x / y
    safe = np.where(y == 0, 1, y).astype(y.dtype)
    floor = x // safe
    return floor + ((floor < 0) & (floor * safe != x)).astype(x.dtype)


def remainder(x: Array, y: Array) -> Array:
    return np.fmod(x, np.where(y == 0, 1, y).astype(y.dtype))


simple("add", f"{INTEGERS} {FLOATS} rn ftz", np.add)
simple("sub", f"{INTEGERS} {FLOATS} bf16x2 rn ftz", np.subtract)
simple("fma", f"{FLOATS} rn ftz", fused)
simple("neg", f"s16 s32 s64 {FLOATS} ftz", np.negative)
simple("abs", f"s32 s64 {FLOATS} ftz", np.abs)
simple("div", "s32 u32 s64 u64 f32 f64 rn full approx ftz", quotient)
simple("rem", "s32 u32 s64 u64", remainder)
simple("and", "pred b16 b32 b64", np.bitwise_and)
simple("or", "pred b16 b32 b64", np.bitwise_or)
simple("xor", "pred b16 b32 b64", np.bitwise_xor)
simple("not", "pred b16 b32 b64", np.invert)
simple("ex2", "approx ftz f32", np.exp2)
simple("lg2", "approx ftz f32", np.log2)
simple("rcp", "approx ftz rn f32 f64", np.reciprocal)
simple("sqrt", "approx ftz rn f32 f64", np.sqrt)
simple("rsqrt", "approx ftz f32 f64", lambda x: np.reciprocal(np.sqrt(x)))


def extreme(name: str, number: Callable[..., Array], nan: Callable[..., Array]) -> None:
    @opcode(name, "s16 u16 s32 u32 s64 u64 f32 f64 f16 bf16 NaN")
    def builder(instruction: Instruction) -> Run:
        passes = "NaN" in instruction.qualifiers or "f" not in instruction.qualifiers[-1]
        return elementwise(nan if passes else number, instruction.qualifiers[-1])(instruction)


extreme("min", np.fmin, np.minimum)
extreme("max", np.fmax, np.maximum)


def with_wide(name: str, f: Callable[..., Array]) -> None:
    """mul and mad: .lo keeps the width, .wide doubles it, .hi keeps the upper half of that."""

    @opcode(name, f"lo hi wide rn ftz {INTEGERS} {FLOATS}")
    def builder(instruction: Instruction) -> Run:
        kind = instruction.qualifiers[-1]
        high = "hi" in instruction.qualifiers
        if not high and "wide" not in instruction.qualifiers:
            return elementwise(f, kind)(instruction)
        wide = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}[kind]
        factors = [source(x, kind) for x in instruction.operands[1:3]]
        rest = [source(x, wide) for x in instruction.operands[3:]]
        write, dtype = target(instruction.operands[0]), DTYPES[wide]

        def run(m: Machine, mask: Mask) -> None:
            value = f(*[x(m).astype(dtype) for x in factors], *[x(m) for x in rest])
            write(m, (value >> dtype(bits_of(kind))).astype(DTYPES[kind]) if high else value, mask)

        return run


with_wide("mul", np.multiply)
with_wide("mad", lambda x, y, z: x * y + z)


# ---- Bits


def shift(name: str, f: Callable[[Array, Array], Array]) -> None:
    """Shifts beyond the width leave 0, or the sign."""

    @opcode(name, INTEGERS)
    def builder(instruction: Instruction) -> Run:
        kind = instruction.qualifiers[-1]
        read, by, width = (
            source(instruction.operands[1], kind),
            source(instruction.operands[2], "u32"),
            bits_of(kind),
        )
        write, signed = target(instruction.operands[0]), kind[0] == "s" and name == "shr"

        def run(m: Machine, mask: Mask) -> None:
            x, n = read(m), by(m)
            value = f(x, np.minimum(n, width - 1).astype(x.dtype))
            write(m, value if signed else np.where(n >= width, x.dtype.type(0), value), mask)

        return run


shift("shl", np.left_shift)
shift("shr", np.right_shift)


def number(operand: object) -> int:
    if not isinstance(operand, Immediate):
        raise Fault(f"covered only for constants: {operand}")
    return operand.value


@opcode("bfe", "u32 s32 u64")
def bit_field_extract(instruction: Instruction) -> Run:
    kind = instruction.qualifiers[0]
    start, length = (number(x) for x in instruction.operands[2:])

    def extract(x: Array) -> Array:
        wide = np.uint64 if kind == "u64" else np.int64
        field = x.astype(wide) >> wide(start) & wide((1 << length) - 1)
        if kind == "s32" and length:
            field -= (field >> length - 1 & 1) << length
        return field.astype(x.dtype)

    return elementwise(extract, kind)(instruction._replace(operands=instruction.operands[:2]))


@opcode("bfi", "b32")
def bit_field_insert(instruction: Instruction) -> Run:
    start, length = (number(x) for x in instruction.operands[3:])
    field = np.uint32(((1 << length) - 1) << start & 0xFFFFFFFF)

    def insert(x: Array, y: Array) -> Array:
        return (x << np.uint32(start)) & field | y & ~field

    return elementwise(insert, "b32")(instruction._replace(operands=instruction.operands[:3]))


@opcode("prmt", "b32")
def permute_bytes(instruction: Instruction) -> Run:
    def permute(x: Array, y: Array, selector: Array) -> Array:
        given = np.stack([x, y], 1).view(np.uint8)
        chosen = selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & np.uint32(15)
        found = np.take_along_axis(given, (chosen & 7).astype(np.int64), 1)
        sign = np.where(found & 128, 255, 0)
        return np.where(chosen & 8, sign, found).astype(np.uint8).view(np.uint32)[:, 0]

    return elementwise(permute, "b32")(instruction)


@opcode("lop3", "b32")
def logic_of_three(instruction: Instruction) -> Run:
    table = number(instruction.operands[4])

    def combine(x: Array, y: Array, z: Array) -> Array:
        out = np.zeros_like(x)
        for i in range(8):
            if table >> i & 1:
                out |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
        return out

    return elementwise(combine, "b32")(instruction._replace(operands=instruction.operands[:4]))


# ---- Moves and conversions


@opcode("mov", f"pred {INTEGERS} f32 f64")
def move(instruction: Instruction) -> Run:
    """Also packs a vector into a register, takes one apart, and takes a parameter's address."""
    to, of = instruction.operands
    kind = instruction.qualifiers[0]
    if kind == "pred":
        return elementwise(lambda x: x, "pred")(instruction)
    if isinstance(of, str):
        write = target(to)
        return lambda m, mask: write(m, m.constant(m.address_of_parameter(of), 64), mask)
    whole = f"b{bits_of(kind)}"
    part = f"b{bits_of(kind) // max(len(registers(to)), len(registers(of)))}"
    reads = [_part(x, part) for x in of] if type(of) is tuple else [source(of, whole)]
    writes = [target(x) for x in registers(to)]

    def run(m: Machine, mask: Mask) -> None:
        values = reads[0](m) if len(reads) == 1 else np.stack([read(m) for read in reads], 1)
        parts = np.ascontiguousarray(values).view(DTYPES[part if len(writes) > 1 else whole])
        parts = parts.reshape(m.size, -1)
        for i, write in enumerate(writes):
            write(m, parts[:, i], mask)

    return run


def _part(operand: Operand, kind: str) -> Read:
    """Of a vector that becomes one register: the compiler leaves parts undefined that nobody will read."""
    if not isinstance(operand, Register):
        return source(operand, kind)
    number, bits = operand.number, operand.bits
    return lambda m: m.read(number, undefined=m.constant(-1, bits))  # NaN, in most formats


@opcode("selp", f"{INTEGERS} f16 f32 f64")
def select(instruction: Instruction) -> Run:
    kind = f"b{bits_of(instruction.qualifiers[0])}"
    x, y = (source(operand, kind) for operand in instruction.operands[1:3])
    which, write = source(instruction.operands[3], "pred"), target(instruction.operands[0])
    return lambda m, mask: write(m, np.where(which(m), x(m), y(m)), mask)


@opcode("cvt", "rn rz rna rni rzi rmi rpi sat ftz bf16 bf16x2 f16x2 tf32 u8 s8 " + f"{INTEGERS} {FLOATS}")
def convert(instruction: Instruction) -> Run:
    *how, to, of = instruction.qualifiers
    if "sat" in how or "ftz" in how or ("rz" in how):
        raise Fault(f"not covered: {how}, in {instruction}")
    if to.endswith("x2"):
        return _convert_two(instruction)
    if to == "tf32":
        return _convert_to_tf32(instruction)
    operand, write = instruction.operands[1], target(instruction.operands[0])
    # An integer's register may be wider than its type: then its lower part is meant.
    wide = isinstance(operand, Register) and operand.bits > bits_of(of)
    read = source(operand, f"b{operand.bits}" if wide and isinstance(operand, Register) else of)
    rounded = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    rounds = next((rounded[x] for x in how if x in rounded), None)
    register = instruction.operands[0]
    assert isinstance(register, Register)

    def run(m: Machine, mask: Mask) -> None:
        x = read(m)
        if wide:
            x = x.astype(UNSIGNED[bits_of(of)]).view(DTYPES[of])
        if rounds is not None:
            x = rounds(x)
        if to == "bf16":
            return write(m, to_bf16(x.astype(np.float32)), mask)
        dtype = DTYPES[to]
        if x.dtype.kind == "f" and to[0] != "f":
            if rounds is None:
                raise Fault("a conversion to an integer that does not say how it rounds")
            x = _saturated(x, dtype)
        x = x.astype(dtype)
        if x.dtype.itemsize * 8 < register.bits:
            x = x.astype({16: np.int16, 32: np.int32, 64: np.int64}[register.bits])
        write(m, x, mask)

    return run


def _convert_to_tf32(instruction: Instruction) -> Run:
    """float32's first 10 digits, rounded to nearest, ties away from 0."""
    if tuple(instruction.qualifiers[:-2]) != ("rna",):
        raise Fault(f"not covered: {instruction}")
    read, write = source(instruction.operands[1], "f32"), target(instruction.operands[0])

    def run(m: Machine, mask: Mask) -> None:
        x = read(m)
        rounded = (x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
        write(m, np.where(np.isnan(x), x.view(np.uint32), rounded), mask)

    return run


def _saturated(x: Array, dtype: type) -> Array:
    info = np.iinfo(dtype)
    x = np.nan_to_num(x.astype(np.float64), nan=0.0)
    largest = np.nextafter(float(info.max), 0) if info.bits == 64 else float(info.max)
    return np.clip(x, float(info.min), largest)


def _convert_two(instruction: Instruction) -> Run:
    """The second operand goes into the lower half."""
    high, low = (source(x, "f32") for x in instruction.operands[1:])
    write = target(instruction.operands[0])

    def narrow(x: Array) -> Array:
        if instruction.qualifiers[-2] == "bf16x2":
            return to_bf16(x)
        return x.astype(np.float16).view(np.uint16)

    def run(m: Machine, mask: Mask) -> None:
        halves = np.stack([narrow(low(m)), narrow(high(m))], 1)
        write(m, halves.view(np.uint32)[:, 0], mask)

    return run


# ---- Comparisons

ORDER: dict[str, Callable[..., Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
COMBINE: dict[str, Callable[..., Array]] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def compare(how: str, x: Array, y: Array) -> Array:
    """Of floating-point numbers: NaN compares false, with a "u" at the end true."""
    if x.dtype.kind != "f":
        return ORDER[how](x, y)
    nan = np.isnan(x) | np.isnan(y)
    if how in ("num", "nan"):
        return ~nan if how == "num" else nan
    if how in ORDER:
        return ORDER[how](x, y) & ~nan
    return ORDER[how[:-1]](x, y) | nan


@opcode(
    "setp",
    "eq ne lt le gt ge lo ls hi hs num nan equ neu ltu leu gtu geu and or xor ftz f16x2 bf16x2 "
    + f"{INTEGERS} {FLOATS}",
)
def set_predicate(instruction: Instruction) -> Run:
    how, kind = instruction.qualifiers[0], instruction.qualifiers[-1]
    joins = [COMBINE[x] for x in instruction.qualifiers if x in COMBINE]
    others = [source(x, "pred") for x in instruction.operands[3:]]
    if kind.endswith("x2"):
        return _compare_two(instruction)
    x, y = (source(operand, kind) for operand in instruction.operands[1:3])
    write = target(instruction.operands[0])

    def run(m: Machine, mask: Mask) -> None:
        found = compare(how, x(m), y(m))
        for join, other in zip(joins, others, strict=True):
            found = join(found, other(m))
        write(m, found, mask)

    return run


def _compare_two(instruction: Instruction) -> Run:
    """Two halves of a register, two predicates."""
    how, kind = instruction.qualifiers[0], instruction.qualifiers[-1]
    if len(instruction.qualifiers) > 2:
        raise Fault(f"not covered: {instruction}")
    reads = [source(x, "b32") for x in instruction.operands[1:]]
    writes = [target(x) for x in registers(instruction.operands[0])]

    def halves(bits: Array) -> Array:
        pairs = np.ascontiguousarray(bits).view(np.uint16).reshape(-1, 2)
        return from_bf16(pairs) if kind == "bf16x2" else pairs.view(np.float16)

    def run(m: Machine, mask: Mask) -> None:
        found = compare(how, *[halves(read(m)) for read in reads])
        for i, write in enumerate(writes):
            write(m, found[:, i], mask)

    return run
