"""Programs of a grid, several at once: all threads in lockstep, registers as arrays over threads.

Where threads part, those at the least instruction run until the others are reached. So no thread ever runs
ahead, and races do not show in results: memory.py finds them by bookkeeping.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.kernels.ptx.memory import Array, GlobalMemory, SharedMemory
from tests.kernels.ptx.parse import Fault, Instruction, Negated, Program

Mask = Array | None  # of threads; None: all of them
Run = Callable[["Machine", Mask], None]
UNSIGNED: dict[int, Any] = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


class Step(NamedTuple):
    run: Run
    guard: int | None  # number of a predicate
    negated: bool
    target: int | None  # of a branch
    instruction: Instruction


class Machine:
    """``numbers``: which programs of the grid; ``arguments``: the bits of each parameter."""

    def __init__(
        self, program: Program, steps: Sequence[Step], memory: GlobalMemory, arguments: dict[str, int],
        numbers: Sequence[int], shared: int, granule: int, findings: Counter[tuple[str, str, str]],
        left_out: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self.steps, self.memory, self.arguments, self.findings = steps, memory, arguments, findings
        self.kernel = program.name
        self.left_out = left_out  # barriers that do nothing
        count, threads = len(numbers), program.threads
        self.programs, self.threads, self.size = count, threads, count * threads
        self.thread = np.tile(np.arange(threads), count)
        self.lane = self.thread % 32
        self.place = np.repeat(np.arange(count), threads)  # which of the programs that run at once
        self.number = np.repeat(np.asarray(numbers), threads)
        self.warp = self.number * (threads // 32) + self.thread // 32
        self.first_thread = np.arange(self.size) // 32 * 32  # of each thread's warp
        self.registers: list[Array | None] = [None] * len(program.registers)
        self.names = list(program.registers)
        self.busy: dict[int, Array] = {}  # of registers: how many products in flight (programs,)
        self.shared = SharedMemory(shared, count, granule, self.report)
        self.executed = 0
        self._constants: dict[tuple[int, Any], Array] = {}
        self._first_number = numbers[0]
        memory.warps.forget()

    def report(self, kind: str) -> None:
        self.findings[self.kernel, kind, str(self.steps[self.at].instruction)] += 1

    # ---- Parameters, 8 bytes each

    def address_of_parameter(self, name: str) -> int:
        return 8 * [*self.arguments].index(name)

    def parameters_at(self, addresses: Array) -> Array:
        values = np.array([x % 2**64 for x in self.arguments.values()], np.uint64)
        return values.take(addresses // 8, mode="clip")  # a thread that waits may hold any address

    # ---- Registers. Their arrays are never written in place: two may share one.

    def read(self, number: int, *, undefined: Array | None = None) -> Array:
        """undefined: what a register that was never written holds; None: it must have been."""
        if self.busy and number in self.busy:
            self.report(f"{self.names[number]} is read while the matrix unit works on it")
        bits = self.registers[number]
        if bits is None:
            if undefined is not None:
                return undefined
            raise Fault(f"{self.names[number]} is read and was never written")
        return bits

    def write(self, number: int, bits: Array, mask: Mask) -> None:
        if self.busy and number in self.busy:
            self.report(f"{self.names[number]} is written while the matrix unit works on it")
        if mask is not None:
            before = self.registers[number]
            if before is None:
                before = np.invert(np.zeros_like(bits))  # NaN, in most formats
            bits = np.where(mask, bits, before)
        self.registers[number] = bits

    def constant(self, value: int, bits: int) -> Array:
        """value in every thread, as an unsigned number of that width."""
        key = value, bits
        if key not in self._constants:
            self._constants[key] = np.full(self.size, value % (1 << bits), UNSIGNED[bits])
        return self._constants[key]

    # ---- Threads

    def run(self) -> None:
        groups = [(0, np.ones(self.size, bool))]
        with np.errstate(all="ignore"):
            while groups:
                groups.sort(key=lambda group: group[0])
                pc, active = groups.pop(0)
                while groups and groups[0][0] == pc:
                    active = active | groups.pop(0)[1]
                groups += self._advance(pc, active, groups[0][0] if groups else len(self.steps) + 1)

    def _advance(self, pc: int, active: Array, until: int) -> list[tuple[int, Array]]:
        """Runs the active threads up to a branch that parts them, or to where others wait."""
        everyone = None if active.all() else active
        while pc < until:
            self.at = pc
            self.executed += 1
            step = self.steps[pc]
            mask = everyone
            if step.guard is not None:
                mask = (self.read(step.guard) ^ step.negated) & active
            if step.target is not None:
                if mask is None or np.array_equal(mask, active):
                    return [(step.target, active)]
                if mask.any():
                    return [(step.target, mask), (pc + 1, active & ~mask)]
            elif step.instruction.name == "ret":
                if mask is not None and not np.array_equal(mask, active):
                    raise Fault(f"covered only for all threads at once: {step.instruction}")
                return []
            elif mask is None or mask.any():
                try:
                    step.run(self, None if mask is None or mask.all() else mask)
                except Fault as fault:
                    raise Fault(f"{fault}, at {step.instruction}") from fault
            pc += 1
        return [(pc, active)]

    def whole_programs(self, mask: Mask) -> Array:
        """(programs,): which of them run; none by a part of its threads."""
        if mask is None:
            return np.ones(self.programs, bool)
        by_program = mask.reshape(self.programs, -1)
        if (by_program.any(1) != by_program.all(1)).any():
            raise Fault("only a part of the program's threads is here")
        return np.asarray(by_program.all(1))

    def check_whole_warps(self, mask: Mask) -> None:
        if mask is not None and (mask.reshape(-1, 32).any(1) != mask.reshape(-1, 32).all(1)).any():
            raise Fault("only a part of the warp is here")

    def barrier(self, mask: Mask) -> None:
        chosen = self.whole_programs(mask)
        if self.at in self.left_out:
            return
        warps, first = self.threads // 32, self._first_number

        def over(warp: Array) -> Array:
            return chosen[np.where(warp < 0, 0, warp // warps - first)]

        everyone = bool(chosen.all())
        self.shared.barrier(None if everyone else over)
        self.memory.warps.forget(None if everyone else over)


def decode(program: Program, builder: Callable[[Instruction], Run]) -> list[Step]:
    steps = []
    for instruction in program.code:
        guard, target = instruction.guard, None
        if instruction.name == "bra":
            target = program.labels[str(instruction.operands[0])]
        register = guard.register if isinstance(guard, Negated) else guard
        steps.append(
            Step(
                builder(instruction),
                None if register is None else register.number,
                isinstance(guard, Negated),
                target,
                instruction,
            )
        )
    return steps
