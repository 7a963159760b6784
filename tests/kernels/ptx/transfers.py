"""Loads, stores, cp.async, matrices of a warp's rows, exchange between lanes, barriers."""

import numpy as np

from tests.kernels.ptx.machine import UNSIGNED, Array, Machine, Mask, Run
from tests.kernels.ptx.operands import DTYPES, Write, address, bits_of, opcode, registers, source, target
from tests.kernels.ptx.parse import Address, Fault, Immediate, Instruction, Operand, Register

KINDS = "b8 u8 s8 b16 u16 s16 f16 b32 u32 s32 f32 b64 u64 s64 f64"


def access_size(instruction: Instruction, space: str) -> int | None:
    """How many bytes a thread reads or writes at once in that memory; None: it does not, or 16 at least."""
    name, qualifiers = instruction.name, instruction.qualifiers
    if name in ("ld", "st") and qualifiers[0] == space:
        vector = next((int(x[1]) for x in qualifiers if x in ("v2", "v4")), 1)
        return vector * bits_of(qualifiers[-1]) // 8
    if name == "cp" and len(instruction.operands) > 2:
        return _constant(instruction.operands[2])
    return None


def _constant(operand: Operand) -> int:
    if not isinstance(operand, Immediate):
        raise Fault(f"covered only for constants: {operand}")
    return operand.value


def _threads(m: Machine, mask: Mask) -> Array:
    return np.arange(m.size) if mask is None else np.flatnonzero(mask)


@opcode("ld", f"param global shared v2 v4 {KINDS}")
def load(instruction: Instruction) -> Run:
    if instruction.qualifiers[0] == "param":
        return _load_parameter(instruction)
    to, of = instruction.operands
    kind, writes, at = (
        instruction.qualifiers[-1],
        [_widening(x, instruction) for x in registers(to)],
        address(of),
    )
    size = len(writes) * bits_of(kind) // 8
    space, dtype = instruction.qualifiers[0], DTYPES[kind]

    def run(m: Machine, mask: Mask) -> None:
        who = _threads(m, mask)
        found = np.zeros((m.size, size), np.uint8)
        if space == "global":
            where = m.memory.locate(at(m)[who], size)
            found[who] = m.memory.load_for(where, size, m.warp[who], m.number[who])
        else:
            where = m.shared.locate(at(m)[who], size, m.place[who])
            found[who] = m.shared.load(where, size, m.warp[who])
        values = found.view(dtype)
        for i, write in enumerate(writes):
            write(m, values[:, i], mask)

    return run


def _widening(operand: Operand, instruction: Instruction) -> Write:
    """Into a wider register a number is extended, with the sign if its type has one."""
    write, kind = target(operand), instruction.qualifiers[-1]
    if not isinstance(operand, Register) or operand.bits == bits_of(kind):
        return write
    wide = (
        {16: np.int16, 32: np.int32, 64: np.int64}[operand.bits] if kind[0] == "s" else UNSIGNED[operand.bits]
    )
    return lambda m, value, mask: write(m, value.astype(wide), mask)


def _load_parameter(instruction: Instruction) -> Run:
    to, of = instruction.operands
    assert isinstance(of, Address)
    name, kind, write = str(of.base), instruction.qualifiers[-1], _widening(to, instruction)
    if isinstance(of.base, Register):
        at, unsigned = address(of), UNSIGNED[bits_of(kind)]
        return lambda m, mask: write(m, m.parameters_at(at(m)).astype(unsigned).view(DTYPES[kind]), mask)
    if of.offset:
        raise Fault(f"not covered: a part of a parameter, in {instruction}")
    return lambda m, mask: write(m, m.constant(m.arguments[name], bits_of(kind)).view(DTYPES[kind]), mask)


@opcode("st", f"global shared v2 v4 {KINDS}")
def store(instruction: Instruction) -> Run:
    to, of = instruction.operands
    kind, at, space = instruction.qualifiers[-1], address(to), instruction.qualifiers[0]
    unsigned = UNSIGNED[bits_of(kind)]
    reads = [source(x, f"b{x.bits}" if isinstance(x, Register) else kind) for x in registers(of)]

    def run(m: Machine, mask: Mask) -> None:
        who = _threads(m, mask)
        values = [np.ascontiguousarray(read(m)[who]) for read in reads]
        if values[0].dtype.itemsize < np.dtype(unsigned).itemsize:
            raise Fault("a register narrower than what is stored")
        data = np.stack([x.astype(unsigned, copy=False) for x in values], 1).view(np.uint8)
        if space == "global":
            where = m.memory.locate(at(m)[who], data.shape[1])
            m.memory.store_for(where, data, m.warp[who], m.number[who])
        else:
            where = m.shared.locate(at(m)[who], data.shape[1], m.place[who])
            m.shared.store(where, data, m.warp[who])

    return run


@opcode("cp", "async ca cg shared global commit_group wait_group wait_all L2::128B")
def copy_async(instruction: Instruction) -> Run:
    what = instruction.qualifiers[1]
    if what == "commit_group":
        return lambda m, mask: m.shared.copies.commit(m.whole_programs(mask))
    if what == "wait_group":
        keep = _constant(instruction.operands[0])
        return lambda m, mask: m.shared.wait_for_copies(m.whole_programs(mask), keep)
    if what == "wait_all":

        def wait(m: Machine, mask: Mask) -> None:
            m.shared.copies.commit(m.whole_programs(mask))
            m.shared.wait_for_copies(m.whole_programs(mask), 0)

        return wait
    to, of, *sizes = instruction.operands
    size = _constant(sizes[0])
    at, origin = address(to), address(of)
    taken = source(sizes[1], "u32") if len(sizes) > 1 else None

    def run(m: Machine, mask: Mask) -> None:
        who = _threads(m, mask)
        where = m.shared.locate(at(m)[who], size, m.place[who])
        data = np.zeros((len(who), size), np.uint8)
        full = np.full(len(who), True) if taken is None else taken(m)[who] == size
        if taken is not None and (~full & (taken(m)[who] != 0)).any():
            raise Fault("not covered: cp.async of a part")
        if full.any():  # what is not taken is 0, and its address is not looked at
            some = who[full]
            found = m.memory.locate(origin(m)[some], size)
            data[full] = m.memory.load_for(found, size, m.warp[some], m.number[some])
        m.shared.copy(where, data, m.warp[who], m.place[who])

    return run


@opcode("bar", "sync warp")
def barrier(instruction: Instruction) -> Run:
    if instruction.qualifiers == ("warp", "sync"):
        return lambda m, mask: m.check_whole_warps(mask)  # lanes never part here
    if instruction.operands != (Immediate(0),):
        raise Fault(f"not covered: another barrier than 0, in {instruction}")
    return lambda m, mask: m.barrier(mask)


@opcode("fence", "proxy async shared")
def fence(instruction: Instruction) -> Run:
    return lambda m, mask: m.shared.fence(m.whole_programs(mask))


@opcode("bra", "uni")
def branch(instruction: Instruction) -> Run:
    return lambda m, mask: None  # the machine does it


@opcode("ret")
def end(instruction: Instruction) -> Run:
    return lambda m, mask: None  # likewise


@opcode("shfl", "sync bfly up down idx b32")
def shuffle(instruction: Instruction) -> Run:
    """From another lane of the warp; where there is none the lane's own."""
    how = instruction.qualifiers[1]
    operands = instruction.operands
    clamp = 0 if how == "up" else 31
    if operands[3:] != (Immediate(clamp), Immediate(-1)) or type(operands[0]) is tuple:
        raise Fault(f"not covered: {instruction}")
    read, by, write = source(operands[1], "b32"), source(operands[2], "u32"), target(operands[0])

    def run(m: Machine, mask: Mask) -> None:
        m.check_whole_warps(mask)
        lane, b = m.lane, by(m).astype(np.int64)
        other = {"bfly": lane ^ b, "idx": b & 31, "up": lane - b, "down": lane + b}[how]
        other = np.where((other < 0) | (other > 31), lane, other)
        write(m, read(m)[m.first_thread + other], mask)

    return run


# ---- Matrices of 8 x 8 values of 16 bits. Lane 8 i + r has the address of matrix i's row r; lane l holds, of
# each matrix, the values 2 (l % 4) and 2 (l % 4) + 1 of row l // 4 (.trans: of column l // 4).


def _rows(m: Machine, at: Array, count: int, mask: Mask) -> Array:
    """The threads whose addresses count."""
    m.check_whole_warps(mask)
    who = m.lane < 8 * count
    return np.flatnonzero(who if mask is None else who & mask)


@opcode("ldmatrix", "sync aligned m8n8 x1 x2 x4 trans shared b16")
def load_matrix(instruction: Instruction) -> Run:
    to, of = instruction.operands
    writes, at, trans = [target(x) for x in registers(to)], address(of), "trans" in instruction.qualifiers
    count = len(writes)

    def run(m: Machine, mask: Mask) -> None:
        addresses = at(m)
        who = _rows(m, addresses, count, mask)
        where = m.shared.locate(addresses[who], 16, m.place[who])
        rows = m.shared.load(where, 16, m.warp[who]).view(np.uint16).reshape(-1, count, 8, 8)
        if trans:
            rows = rows.transpose(0, 1, 3, 2)
        words = np.zeros((m.size // 32, count, 32), np.uint32)
        here = np.full(m.size // 32, True) if mask is None else mask[::32]
        words[here] = np.ascontiguousarray(rows).view(np.uint32).reshape(-1, count, 32)
        for i, write in enumerate(writes):
            write(m, words[:, i].reshape(-1), mask)

    return run


@opcode("stmatrix", "sync aligned m8n8 x1 x2 x4 trans shared b16")
def store_matrix(instruction: Instruction) -> Run:
    to, of = instruction.operands
    reads, at, trans = (
        [source(x, "b32") for x in registers(of)],
        address(to),
        "trans" in instruction.qualifiers,
    )
    count = len(reads)

    def run(m: Machine, mask: Mask) -> None:
        addresses = at(m)
        who = _rows(m, addresses, count, mask)
        here = np.full(m.size // 32, True) if mask is None else mask[::32]
        words = np.stack([read(m).reshape(-1, 32)[here] for read in reads], 1)
        rows = np.ascontiguousarray(words).view(np.uint16).reshape(-1, count, 8, 8)
        if trans:
            rows = rows.transpose(0, 1, 3, 2)
        data = np.ascontiguousarray(rows).view(np.uint8).reshape(-1, 16)
        where = m.shared.locate(addresses[who], 16, m.place[who])
        m.shared.store(where, data, m.warp[who])

    return run
