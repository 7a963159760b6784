"""From an instruction's text to a function that runs it: the table of opcodes, and access to operands."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.kernels.ptx.machine import UNSIGNED, Array, Machine, Mask, Run
from tests.kernels.ptx.parse import (
    Address,
    Fault,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Register,
    Special,
)

DTYPES: dict[str, Any] = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16,
    "s16": np.int16, "f16": np.float16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32,
    "f32": np.float32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64,
}  # fmt: skip
Read = Callable[[Machine], Array]
Write = Callable[[Machine, Array, Mask], None]
Builder = Callable[[Instruction], Run]
_OPCODES: dict[str, tuple[frozenset[str], Builder]] = {}


def opcode(name: str, qualifiers: str = "") -> Callable[[Builder], Builder]:
    """Enters a builder for instructions of that name with no other qualifiers than these."""

    def enter(builder: Builder) -> Builder:
        _OPCODES[name] = frozenset(qualifiers.split()), builder
        return builder

    return enter


def build(instruction: Instruction) -> Run:
    known, builder = _OPCODES.get(instruction.name, (frozenset(), None))
    unknown = [x for x in instruction.qualifiers if x not in known]
    if builder is None or unknown:
        raise Fault(f"not covered: {'.'.join([instruction.name, *unknown])}, in {instruction}")
    return builder(instruction)


def bits_of(kind: str) -> int:
    return 1 if kind == "pred" else 16 if kind == "bf16" else int(kind.lstrip("busf"))


def source(operand: Operand, kind: str) -> Read:
    """Reads an operand as numbers of that type; bfloat16 as float32, which has all of its numbers."""
    if kind == "bf16":
        bits = source(operand, "b16")
        return lambda m: from_bf16(bits(m))
    dtype = DTYPES[kind]
    if isinstance(operand, Register):
        if operand.bits != bits_of(kind):
            raise Fault(f"{operand.name} has {operand.bits} bits, read as {kind}")
        number = operand.number
        return lambda m: m.read(number).view(dtype)
    if isinstance(operand, Negated):
        number = operand.register.number
        return lambda m: ~m.read(number)
    if isinstance(operand, Immediate):
        value = operand.value
        if kind == "pred":
            return lambda m: m.constant(int(value != 0), 1)
        return lambda m: m.constant(value, bits_of(kind)).view(dtype)
    if isinstance(operand, Special):
        return _special(operand.name, dtype)
    raise Fault(f"no operand to read: {operand}")


def _special(name: str, dtype: Any) -> Read:
    if name == "%tid.x":
        return lambda m: m.thread.astype(np.uint32).view(dtype)
    if name == "%ctaid.x":
        return lambda m: m.number.astype(np.uint32).view(dtype)
    raise Fault(f"not covered: {name}")


def target(operand: Operand) -> Write:
    """Writes numbers of the register's width."""
    if operand == "_":
        return lambda m, value, mask: None
    if not isinstance(operand, Register):
        raise Fault(f"no operand to write: {operand}")
    number, unsigned, bits = operand.number, np.dtype(UNSIGNED[operand.bits]), operand.bits

    def write(m: Machine, value: Array, mask: Mask) -> None:
        if value.dtype.itemsize != unsigned.itemsize:
            raise Fault(f"{operand.name} has {bits} bits, written with {value.dtype}")
        m.write(number, np.ascontiguousarray(value).view(unsigned), mask)

    return write


def address(operand: Operand) -> Read:
    if not isinstance(operand, Address) or isinstance(operand.base, str):
        raise Fault(f"no address: {operand}")
    offset = operand.offset
    if isinstance(operand.base, Immediate):
        value = operand.base.value + offset
        return lambda m: m.constant(value, 64).view(np.int64)
    number, wrap = operand.base.number, (1 << 32) - 1 if operand.base.bits == 32 else -1
    return lambda m: m.read(number).astype(np.int64) + offset & wrap


def registers(operand: Operand) -> tuple[Operand, ...]:
    """Of a vector {a, b, ..}, or of one register."""
    return operand if type(operand) is tuple else (operand,)


def elementwise(f: Callable[..., Array], kind: str) -> Builder:
    """A builder for d = f(a, b, ..), all of one type; bf16x2 are two numbers of a register."""

    def halves(bits: Array) -> Array:
        return from_bf16(np.ascontiguousarray(bits).view(np.uint16).reshape(-1, 2))

    def of_two(instruction: Instruction) -> Run:
        write = target(instruction.operands[0])
        reads = [source(x, "b32") for x in instruction.operands[1:]]
        return lambda m, mask: write(
            m, to_bf16(f(*[halves(read(m)) for read in reads])).view(np.uint32)[:, 0], mask
        )

    def builder(instruction: Instruction) -> Run:
        write = target(instruction.operands[0])
        reads = [source(x, kind) for x in instruction.operands[1:]]
        to_bits = to_bf16 if kind == "bf16" else None

        def run(m: Machine, mask: Mask) -> None:
            value = f(*[read(m) for read in reads])
            write(m, value if to_bits is None else to_bits(value), mask)

        return run

    return of_two if kind == "bf16x2" else builder


def from_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x: Array) -> Array:
    """float32 to the bits of bfloat16, to the nearest, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)
