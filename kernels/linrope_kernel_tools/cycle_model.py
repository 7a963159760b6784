"""Models a kernel's main loop on one Hopper multiprocessor from its machine code; no GPU is needed.

The model follows one of the multiprocessor's four quarters, with a quarter of the shared resources, cycle by
cycle. Each warp issues its instructions in order, as soon as the stall counts and scoreboards in the code
allow it and the required unit is free. Latencies and rates come from published microbenchmarks.
Bank conflicts, instruction fetch and any drift between the quarters are ignored, and every load is assumed to
miss the caches. **The model was never compared with a measurement**: trust the order of variants, not the
figures.
"""

import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import triton

CLOCK = 1.7e9  # Hz
MULTIPROCESSORS = 132
BANDWIDTH = 4.3e12  # bytes per second of a copy on an H200
BYTES_PER_CYCLE = BANDWIDTH / CLOCK / MULTIPROCESSORS / 4  # for one quarter
SHARED_MEMORY = 233_472  # bytes per multiprocessor; each program takes 1024 more than it asks for
REGISTERS = 65_536  # per multiprocessor

# Unit -> (prefixes of its instructions' names, cycles for which one instruction occupies a quarter's unit,
# latency of results that a scoreboard announces). An instruction belongs to the first unit that matches.
UNITS: dict[str, tuple[tuple[str, ...], int, int]] = {
    "wgmma": (("HGMMA", "UTC"), 0, 40),
    "mma": (("HMMA", "QMMA"), 8, 33),
    "sync": (("BAR", "WARP", "DEPBAR", "LDGDEPBAR", "FENCE", "MEMBAR", "SYNCS", "ERRBAR"), 1, 20),
    "shared": (("LDS", "STS", "ATOMS"), 4, 29),
    "local": (("LDL", "STL"), 4, 33),
    "global": (("LDG", "STG", "LDGSTS", "UBLK", "UTMA"), 4, 12),
    "shuffle": (("SHFL", "REDUX", "VOTE"), 4, 24),
    "branch": (("BRA", "BSSY", "BSYNC", "CALL", "RET", "EXIT", "NOP"), 1, 1),
    "fp64": (("DADD", "DMUL", "DFMA", "DSETP"), 2, 20),
    "special": (("MUFU", "F2F.", "F2I", "I2F."), 8, 22),  # exp2, reciprocals, float64 to float32
    "imad": (("IMAD",), 2, 6),
    "fma": (("FFMA", "FADD", "FMUL", "HADD2", "HMUL2", "HFMA2"), 1, 4),
    "uniform": (("R2UR", "S2R", "S2UR", "CS2R", "U"), 1, 12),
    "alu": (("",), 2, 6),  # integers, comparisons, selections, rounding to 16 bits
}  # fmt: skip
# Units that share a port.
PORT = {"local": "memory port", "shared": "memory port", "global": "memory port", "shuffle": "memory port"}
PORT |= {"imad": "fma"}
MEMORY_LATENCY = 700  # from HBM


@dataclass(frozen=True)
class Instruction:
    name: str
    arguments: str
    stall: int  # cycles until the warp's next instruction may issue
    sets: int  # scoreboard that is set until the result is ready; 7: none
    reads: int  # scoreboard that is set until the operands have been read; 7: none
    waits: int  # a bit for each scoreboard that must be clear
    unit: str
    bytes: int  # moved by each thread; 4 if the instruction moves none


class Code(NamedTuple):
    instructions: list[Instruction]
    loops: list[tuple[int, int]]  # first and last instruction
    registers: int  # per thread


def machine_code(cubin: bytes) -> Code:
    """Disassembles a kernel that ptxas compiled."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text, usage = (
            subprocess.run(
                [tools / tool, option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for tool, option in (("nvdisasm", "-hex"), ("cuobjdump", "-res-usage"))
        )
    text = text[text.index("\t.text.") :]
    labels: dict[str, int] = {}
    code: list[Instruction] = []
    loops: list[tuple[int, int]] = []
    lines = iter(text.splitlines())
    for line in lines:
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        parsed = re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);?\s*/\*", line)
        if not parsed:
            continue
        control = int(re.findall(r"0x([0-9a-f]{16})", next(lines))[0], 16)
        code.append(_instruction(parsed[1], parsed[2], control))
        label = re.search(r"`\((\.L_x_\d+)\)", parsed[2])
        if parsed[1].startswith("BRA") and label and labels.get(label[1], len(code)) < len(code) - 1:
            loops.append((labels[label[1]], len(code) - 1))
    registers = re.search(r"REG:(\d+)", usage)
    assert registers, usage
    return Code(code, loops, int(registers[1]))


def _instruction(name: str, arguments: str, control: int) -> Instruction:
    unit = next(unit for unit, (names, _, _) in UNITS.items() if name.startswith(names))
    width = re.search(r"\.(128|64|U8|S8|U16|S16)\b", name)
    sizes = {"128": 16, "64": 8, "U8": 1, "S8": 1, "U16": 2, "S16": 2}
    moved = sizes[width[1]] if width else 4
    if name.startswith(("LDSM", "STSM")):
        moved = 4 * int(name[-1]) if name[-1].isdigit() else 4
    stall, sets, reads, waits = (
        (control >> at) & mask for at, mask in ((41, 15), (46, 7), (49, 7), (52, 63))
    )
    return Instruction(name, arguments, max(1, stall), sets, reads, waits, unit, moved)


def main_loop(code: Code) -> list[Instruction]:
    """The loop with most matrix products, the longest of several; all instructions if there is no loop."""
    if not code.loops:
        return code.instructions

    def size(loop: tuple[int, int]) -> tuple[int, int]:
        products = [x for x in code.instructions[slice(*loop)] if x.unit in ("wgmma", "mma")]
        return len(products), loop[1] - loop[0]

    first, last = max(code.loops, key=size)
    return code.instructions[first : last + 1]


def moved(loop: list[Instruction]) -> int:
    """Bytes that a warp moves to and from memory in each iteration."""
    return 32 * sum(x.bytes for x in loop if x.unit == "global")


def resident(registers: int, shared: int, warps: int) -> int:
    """The number of programs that run on a multiprocessor at once."""
    per_warp = -(-registers // 8) * 8 * 32
    return max(1, min(REGISTERS // per_warp // warps, SHARED_MEMORY // (shared + 1024), 64 // warps))


class Modelled(NamedTuple):
    cycles: float  # per program and iteration, on a multiprocessor that runs as many programs as fit
    limits: dict[str, float]  # fractions of the time: "issue", or what all warps wait for


@dataclass
class _Warp:
    program: int
    at: int = 0
    iterations: int = 0
    free: float = 0  # when the warp's next instruction may issue, as far as stall counts go
    why: str = "stall"  # what the warp waits for until then
    scoreboards: list[tuple[float, str]] = field(default_factory=lambda: [(0.0, "stall")] * 6)
    copies: list[float] = field(default_factory=list)  # when each group of copies to shared memory arrives
    copy: float = 0  # when the group under way arrives
    products: list[float] = field(default_factory=list)  # when each group of matrix products is done
    ends: list[float] = field(default_factory=list)  # when each iteration ended


def model(
    loop: list[Instruction], warps: int, programs: int, iterations: int = 6, warm_up: int = 3
) -> Modelled:
    """The cycles of a loop in its steady state, with ``programs`` programs of ``warps`` warps each."""
    quarter = _Quarter([_Warp(p, free=137 * p) for p in range(programs) for _ in range(warps // 4)])
    while any(warp.iterations < iterations for warp in quarter.warps):
        quarter.issue(loop, iterations)
    ends = sorted(end for warp in quarter.warps for end in warp.ends)
    steady = ends[-1] - ends[warm_up * len(quarter.warps) - 1]
    total = sum(quarter.spent.values())
    limits = {why: cycles / total for why, cycles in quarter.spent.most_common()}
    return Modelled(steady / (iterations - warm_up) / programs, limits)


class _Quarter:
    def __init__(self, warps: list[_Warp]) -> None:
        self.warps, self.last, self.cycle = warps, 0, -1.0
        self.busy: dict[str, float] = defaultdict(float)  # unit or port -> busy until
        self.memory = 0.0  # this quarter's share of the bandwidth is taken until then
        self.waiting: dict[int, list[_Warp]] = {}  # program -> its warps that wait at a barrier
        self.spent: Counter[str] = Counter()

    def issue(self, loop: list[Instruction], iterations: int) -> None:
        """Issues the first ready instruction. Ties go to the warp that issued last, then the youngest."""
        held = [warp for at_barrier in self.waiting.values() for warp in at_barrier]
        ready = []
        for i, warp in enumerate(self.warps):
            if warp.iterations < iterations and not any(warp is other for other in held):
                when, why = self.earliest(warp, loop[warp.at])
                ready.append((max(when, self.cycle + 1), i != self.last, -i, why))
        when, _, i, why = min(ready)
        self.spent["issue"] += 1
        self.spent[why] += int(when - self.cycle - 1)
        self.cycle, self.last, warp = when, -i, self.warps[-i]
        self.start(warp, loop[warp.at])
        warp.at += 1
        if warp.at == len(loop):
            warp.at, warp.iterations = 0, warp.iterations + 1
            warp.ends.append(when)

    def earliest(self, warp: _Warp, x: Instruction) -> tuple[float, str]:
        """When the warp may issue x, and what it waits for until then."""
        bounds = [(warp.free, warp.why), (self.busy[PORT.get(x.unit, x.unit)], x.unit)]
        bounds += [board for i, board in enumerate(warp.scoreboards) if x.waits >> i & 1]
        if x.name.startswith("DEPBAR") and (pending := re.search(r"SB0, 0x([0-9a-f]+)", x.arguments)):
            bounds += [(end, "copies") for end in warp.copies[: len(warp.copies) - int(pending[1], 16)]]
        if x.name.startswith("WARPGROUP.DEPBAR") and (
            pending := re.search(r"gsb0, 0x([0-9a-f]+)", x.arguments)
        ):
            bounds += [(end, "wgmma") for end in warp.products[: len(warp.products) - int(pending[1], 16)]]
        return max(bounds)

    def start(self, warp: _Warp, x: Instruction) -> None:
        now, (_, busy, latency) = self.cycle, UNITS[x.unit]
        done = now + latency
        port = PORT.get(x.unit, x.unit)
        if port == "memory port":
            self.busy[port] = now + max(busy, x.bytes)
            done = self.busy[port] + latency
        elif x.unit == "wgmma":
            done = self.multiply(warp, x)
        elif x.unit not in ("sync", "branch", "uniform"):
            self.busy[port] = now + (1 if x.name.startswith("IMAD.MOV") else busy)
        if x.unit == "global":
            self.memory = max(now, self.memory) + 32 * x.bytes / BYTES_PER_CYCLE
            arrives = self.memory + MEMORY_LATENCY
            done = arrives if x.name.startswith("LDG.") else now + 12
            if x.name.startswith("LDGSTS"):
                warp.copy = arrives
        if x.name.startswith("LDGDEPBAR"):
            warp.copies = [*warp.copies[-7:], max(warp.copy, now)]
            warp.copy = 0
        for board, end in ((x.sets, done), (x.reads, now + 12)):
            if board < 6:
                warp.scoreboards[board] = max(warp.scoreboards[board], (end, x.unit))
        warp.free, warp.why = now + x.stall, "stall"
        if x.name.startswith(("FENCE", "MEMBAR")):
            warp.free, warp.why = max(warp.free, now + 16), "sync"
        if x.name.startswith("BAR") and "ARV" not in x.name:
            self.arrive(warp)

    def multiply(self, warp: _Warp, x: Instruction) -> float:
        """When a warp's product is done, a quarter of 64 rows by n columns. Operands use the memory port."""
        n = int(re.search(r"64x(\d+)x", x.name)[1])  # type: ignore[index]
        from_shared = x.arguments.split(",")[1].lstrip().startswith("gdesc")
        port = n // 4 + (16 if from_shared else 0)
        begin = max(self.cycle, self.busy["memory port"] - 16)
        self.busy["memory port"] = max(self.busy["memory port"], begin + port)
        self.busy["wgmma"] = begin + max(n // 2, port)
        end = self.busy["wgmma"] + UNITS["wgmma"][2]
        if "gsb0" in x.arguments:
            warp.products = [*warp.products[-7:], end]
        return end

    def arrive(self, warp: _Warp) -> None:
        """Lets the warp wait at a barrier; the program's last warp to arrive releases them all."""
        arrived = [*self.waiting.pop(warp.program, []), warp]
        if len(arrived) < sum(other.program == warp.program for other in self.warps):
            self.waiting[warp.program] = arrived
        else:
            for other in arrived:
                other.free, other.why = max(other.free, self.cycle + 20), "sync"
