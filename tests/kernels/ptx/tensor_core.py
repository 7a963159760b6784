"""Products of matrices: mma.sync of a warp, wgmma of four warps with operands in shared memory.

Products are exact and sums are rounded to float32 once per instruction: a GPU's own rounding is another.
Of a warp lane 4 i + j has, of each 8 rows, row i, and there the columns that belong to j.
"""

import re
from functools import lru_cache

import numpy as np

from tests.kernels.ptx.machine import Array, Machine, Mask, Run
from tests.kernels.ptx.operands import from_bf16, opcode, registers, source, target
from tests.kernels.ptx.parse import Fault, Immediate, Instruction, Operand

KINDS = {"bf16": 2, "f16": 2, "tf32": 4}


def values(bits: Array, kind: str) -> Array:
    """Numbers as the matrix unit reads them; tf32 cuts off float32's last 13 digits."""
    if kind == "tf32":
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)
    halves = np.ascontiguousarray(bits).view(np.uint16)
    return from_bf16(halves) if kind == "bf16" else halves.view(np.float16).astype(np.float32)


def lanes(m: Machine, operand: Operand) -> Array:
    """(registers, warps, 8, 4) uint32 of all threads."""
    stacked = np.stack([source(x, "b32")(m) for x in registers(operand)])
    return stacked.reshape(len(stacked), -1, 8, 4)


def left(m: Machine, operand: Operand, kind: str) -> Array:
    """(warps, 16, k): registers go down 8 rows, then to the right."""
    x = values(lanes(m, operand)[..., None], kind)  # (registers, warps, 8, 4, 1 or 2)
    columns = len(x) // 2
    x = x.reshape(columns, 2, *x.shape[1:]).transpose(2, 1, 3, 0, 4, 5)
    return x.reshape(x.shape[0], 16, -1)


def right(m: Machine, operand: Operand, kind: str) -> Array:
    """(warps, k, 8): rows of 8 are columns here."""
    x = values(lanes(m, operand)[..., None], kind).transpose(1, 0, 3, 4, 2)
    return x.reshape(x.shape[0], -1, 8)


def accumulator(m: Machine, operand: Operand) -> Array:
    """(warps, 16, columns) float32: two columns, then 8 rows down, then 8 columns to the right."""
    x = lanes(m, operand).view(np.float32)
    x = x.reshape(-1, 2, 2, *x.shape[1:]).transpose(3, 1, 4, 0, 5, 2)  # (warps, 2, 8, blocks, 4, 2)
    return x.reshape(x.shape[0], 16, -1)


def put_accumulator(m: Machine, operand: Operand, x: Array, mask: Mask) -> None:
    x = x.reshape(len(x), 2, 8, -1, 4, 2).transpose(3, 1, 5, 0, 2, 4)
    for bits, register in zip(x.reshape(-1, m.size), registers(operand), strict=True):
        target(register)(m, np.ascontiguousarray(bits), mask)


@opcode("mma", "sync aligned m16n8k16 m16n8k8 row col f32 bf16 f16 tf32")
def multiply_in_a_warp(instruction: Instruction) -> Run:
    *_, shape, rows, columns, sums, kind, other, result = instruction.qualifiers
    if (shape, kind) not in (("m16n8k16", "bf16"), ("m16n8k16", "f16"), ("m16n8k8", "tf32")):
        raise Fault(f"not covered: {instruction}")
    if (rows, columns, sums, other, result) != ("row", "col", "f32", kind, "f32"):
        raise Fault(f"not covered: {instruction}")
    d, a, b, c = instruction.operands

    def run(m: Machine, mask: Mask) -> None:
        m.check_whole_warps(mask)
        product = left(m, a, kind).astype(np.float64) @ right(m, b, kind).astype(np.float64)
        put_accumulator(m, d, (accumulator(m, c) + product).astype(np.float32), mask)

    return run


# ---- Hopper's matrix unit


@opcode("wgmma", "fence commit_group wait_group mma_async sync aligned f32 bf16 tf32 "
        + " ".join(f"m64n{8 * n}k{k}" for n in range(1, 33) for k in (8, 16)))  # fmt: skip
def matrix_unit(instruction: Instruction) -> Run:
    what = instruction.qualifiers[0]
    if what == "mma_async":
        return _multiply_in_four_warps(instruction)
    if what == "fence":
        # Which registers it guards only ptxas can say: LLVM copies some of them after the fence.
        return lambda m, mask: None
    if what == "commit_group":
        return lambda m, mask: m.shared.products.commit(m.whole_programs(mask))
    keep = instruction.operands[0]
    assert isinstance(keep, Immediate)
    return lambda m, mask: wait(m, m.whole_programs(mask), keep.value)


def wait(m: Machine, chosen: Array, keep: int) -> None:
    for program, (_, numbers) in m.shared.products.wait(chosen, keep):
        for number in numbers[0]:
            m.busy[number][program] -= 1
            if not m.busy[number].any():
                del m.busy[number]


def _multiply_in_four_warps(instruction: Instruction) -> Run:
    found = re.fullmatch(r"m64n(\d+)k(\d+)", instruction.qualifiers[3])
    assert found is not None
    n, k = map(int, found.groups())
    kind = instruction.qualifiers[-1]
    d, a, b, scale, *signs = instruction.operands
    flags = [x.value for x in signs if isinstance(x, Immediate)]
    in_registers = type(a) is tuple
    # after the two signs: whether an operand in shared memory is transposed; tf32 has no such thing
    transposed = flags[2:] if KINDS[kind] == 2 else [0, 0]
    transposed = [0, *transposed][-2:]
    if flags[:2] != [1, 1]:
        raise Fault(f"not covered: {instruction}")
    numbers = [x.number for x in registers(d)]  # type: ignore[union-attr]
    keep = source(scale, "pred")

    def run(m: Machine, mask: Mask) -> None:
        chosen = m.whole_programs(mask)
        groups = np.repeat(chosen, m.threads // 128)  # of four warps
        touched: list[Array] = []
        second = _in_shared(m, b, groups, (n, k), kind, bool(transposed[1]), touched)
        if in_registers:
            first = left(m, a, kind).reshape(-1, 64, k)[groups]
        else:
            first = _in_shared(m, a, groups, (64, k), kind, bool(transposed[0]), touched)
        adds = keep(m).reshape(-1, 128)[groups]
        sums = np.zeros((len(groups), 64, n))
        sums[groups] = first.astype(np.float64) @ second.transpose(0, 2, 1).astype(np.float64)
        busy, m.busy = m.busy, {}  # one product after another may add to the same registers
        if adds.any():
            if not adds.all():
                raise Fault("not covered: wgmma that adds in a part of the threads")
            sums = sums + accumulator(m, d).reshape(-1, 64, n)
        put_accumulator(m, d, sums.astype(np.float32).reshape(-1, 16, n), mask)
        m.busy = busy
        for number in numbers:
            m.busy.setdefault(number, np.zeros(m.programs, np.int64))
            m.busy[number] += chosen
        granules = np.concatenate([x.reshape(chosen.sum(), -1) for x in touched], 1)
        m.shared.products.start(np.flatnonzero(chosen), granules, np.tile(numbers, (len(granules), 1)))

    return run


def _in_shared(
    m: Machine, operand: Operand, groups: Array, shape: tuple[int, int], kind: str, transposed: bool,
    touched: list[Array],
) -> Array:  # fmt: skip
    """(groups, rows, k) of an operand that a descriptor tells; the granules go to ``touched``."""
    size = KINDS[kind]
    descriptors = source(operand, "b64")(m).reshape(-1, 128)[groups]
    if (descriptors != descriptors[:, :1]).any():
        raise Fault("wgmma: the threads' descriptors differ")
    at = np.stack([addresses(int(x), *shape, size, transposed) for x in descriptors[:, 0]])
    at = at.reshape(len(at), -1)
    if (at < 0).any() or (at + size > m.shared.size).any():
        raise Fault("wgmma: shared memory, out of bounds")
    place = m.place[::128][groups]
    bits, granules = m.shared.read_by_matrix_unit(at + place[:, None] * m.shared.stride, size)
    touched.append(granules)
    return values(bits, kind).reshape(len(at), *shape)


@lru_cache
def addresses(descriptor: int, rows: int, k: int, size: int, transposed: bool) -> Array:
    """(rows, k) in bytes, of a tile in one of the swizzled layouts of a wgmma descriptor."""
    start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    mode = descriptor >> 62 & 3
    if not mode or descriptor >> 49 & 7:
        raise Fault("not covered: a descriptor without swizzle, or with a base offset")
    width = 256 >> mode  # bytes in a row of the swizzled tile
    row, column = np.arange(rows)[:, None], np.arange(k)[None]
    if transposed:
        per = width // size
        at = row % per * size + row // per * leading + column % 8 * width + column // 8 * stride
    elif k * size > width:
        raise Fault("not covered: a descriptor with k beyond the swizzled row")
    else:
        at = row % 8 * width + row // 8 * stride + column * size
    at = at + start
    return at ^ (at >> 7 & width // 16 - 1) << 4
