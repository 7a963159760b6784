"""Global and shared memory: bounds, alignment, and who touched what since the last barrier.

A granule is the least number of bytes that any instruction of the kernel reads or writes at once; races are
looked for granule by granule. Warps, and programs of the grid, are numbered through the whole launch.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.kernels.ptx.parse import Fault

Array = NDArray[Any]
NOBODY, SEVERAL = -1, -2
Report = Callable[[str], None]


class Watch:
    """Who wrote and who read each granule; what two of them do to one granule is a race until forget()."""

    def __init__(self, granules: int, who: str, report: Report) -> None:
        self.who, self.report = who, report
        self.writer = np.full(granules, NOBODY, np.int32)
        self.reader = np.full(granules, NOBODY, np.int32)
        self._touched: list[tuple[Array, Array]] = []

    def read(self, at: Array, owner: Array) -> None:
        """at: (k, granules), owner: (k,)."""
        self._touched.append((at, owner))
        owner = owner[:, None]
        writer, before = self.writer[at], self.reader[at]
        if ((writer != NOBODY) & (writer != owner)).any():
            self.report(f"reads what another {self.who} wrote")
        after = np.where((before == NOBODY) | (before == owner), owner, SEVERAL)
        self.reader[at] = after
        lost = self.reader[at] != after  # several owners read one granule in this instruction
        self.reader[at[lost]] = SEVERAL

    def write(self, at: Array, owner: Array, changes: Array) -> None:
        """changes (k, granules): whether other bytes were there. Writing the same again does no harm."""
        self._touched.append((at, owner))
        owner = owner[:, None]
        writer, reader = self.writer[at], self.reader[at]
        if ((writer != NOBODY) & (writer != owner) & changes).any():
            self.report(f"writes over what another {self.who} wrote")
        if ((reader != NOBODY) & (reader != owner) & changes).any():
            self.report(f"writes over what another {self.who} reads")
        self.writer[at] = owner

    def read_by_all(self, at: Array) -> None:
        """By a unit that belongs to no warp."""
        if (self.writer[at] != NOBODY).any():
            self.report("the matrix unit reads what was written since the last barrier")
        self.reader[at] = SEVERAL
        self._touched.append((at, np.full(len(at), SEVERAL)))

    def forget(self, chosen: Callable[[Array], Array] | None = None) -> None:
        """What the chosen owners did (None: all): they passed a barrier."""
        rest = []
        for at, owner in self._touched:
            if chosen is not None:
                over = chosen(owner) | (owner == SEVERAL)
                if not over.all():
                    rest.append((at[~over], owner[~over]))
                    at = at[over]
            self.writer[at] = NOBODY
            self.reader[at] = NOBODY
        self._touched = rest


class Groups:
    """Asynchronous work, committed in groups and waited for; each program of the grid by itself."""

    def __init__(self, programs: int) -> None:
        self._committed = np.zeros(programs, np.int64)
        self._running: list[tuple[Array, Array, tuple[Array, ...]]] = []

    def start(self, program: Array, *work: Array) -> None:
        """Row i of ``work`` belongs to program[i]."""
        self._running.append((self._committed[program], program, work))

    def commit(self, chosen: Array) -> None:
        self._committed += chosen

    def wait(self, chosen: Array, keep: int) -> list[tuple[Array, tuple[Array, ...]]]:
        """(program, work) of all but the last ``keep`` groups of the chosen programs, in order."""
        limit = np.where(chosen, self._committed - keep, 0)
        done, running = [], []
        for group, program, work in self._running:
            over = group < limit[program]
            if over.any():
                done.append((program[over], tuple(x[over] for x in work)))
            if not over.all():
                running.append((group[~over], program[~over], tuple(x[~over] for x in work)))
        self._running = running
        return done

    @property
    def running(self) -> list[tuple[Array, ...]]:
        return [work for _, _, work in self._running]


class Memory:
    """Bytes, all of them 0xff (NaN) where nothing was written."""

    name = "memory"

    def __init__(self, size: int, granule: int, report: Report) -> None:
        size = -(-size // 256) * 256  # a whole number of accesses of any size
        self.bytes = np.full(size, 0xFF, np.uint8)
        self.granule = granule
        self.warps = Watch(size // granule, "warp", report)
        self.report = report

    def check(self, at: Array, size: int, inside: bool) -> None:
        if not inside:
            raise Fault(f"{self.name} memory: out of bounds")
        if (at % size).any():
            raise Fault(f"{self.name} memory: {size} bytes at an address that is no multiple of {size}")

    def granules(self, at: Array, size: int) -> Array:
        return at[:, None] // self.granule + np.arange(max(1, size // self.granule))

    def load(self, at: Array, size: int, warp: Array) -> Array:
        """(k, size) bytes from the addresses at (k,), for threads of those warps."""
        self.warps.read(self.granules(at, size), warp)
        return self.bytes.reshape(-1, size)[at // size]

    def store(self, at: Array, data: Array, warp: Array) -> Array:
        """data (k, size) bytes; returns which granules change."""
        size = data.shape[1]
        rows, view = at // size, self.bytes.reshape(-1, size)
        changes = (view[rows] != data).reshape(len(at), -1, self.granule).any(2)
        self.warps.write(self.granules(at, size), warp, changes)
        view[rows] = data
        if (view[rows] != data).any():
            self.report("two threads write different values to one address in one instruction")
        return changes


class GlobalMemory(Memory):
    """What lies in the arguments' storages, side by side, with gaps between; the rest must not be touched."""

    name, BASE = "global", 1 << 32

    def __init__(self, tensors: list[tuple[int, Array]], granule: int, report: Report) -> None:
        """(address modulo 256, bytes) of each storage; ``addresses`` is where they are here."""
        self._storages, size = [], 256
        for remainder, data in tensors:
            self._storages.append((size + remainder, data))
            size = -(-(size + remainder + data.size + 256) // 256) * 256
        super().__init__(size, granule, report)
        self.valid = np.zeros(self.bytes.size, bool)
        for start, data in self._storages:
            self.bytes[start : start + data.size] = data
            self.valid[start : start + data.size] = True
        self.addresses = [self.BASE + start for start, _ in self._storages]
        self.programs = Watch(self.bytes.size // granule, "program of the grid", report)

    def write_back(self) -> None:
        for start, data in self._storages:
            data[:] = self.bytes[start : start + data.size]

    def locate(self, address: Array, size: int) -> Array:
        at = address.astype(np.int64) - self.BASE
        inside = bool(((at >= 0) & (at < self.bytes.size)).all())
        self.check(at, size, inside and bool(self.valid.reshape(-1, size)[at // size].all()))
        return at

    def load_for(self, at: Array, size: int, warp: Array, program: Array) -> Array:
        self.programs.read(self.granules(at, size), program)
        return self.load(at, size, warp)

    def store_for(self, at: Array, data: Array, warp: Array, program: Array) -> None:
        changes = self.store(at, data, warp)
        self.programs.write(self.granules(at, data.shape[1]), program, changes)


class SharedMemory(Memory):
    """Of several programs that run at once, side by side; with cp.async and the matrix unit's view of it."""

    name = "shared"
    STORED, COPIED = 1, 2

    def __init__(self, size: int, programs: int, granule: int, report: Report) -> None:
        self.size, self.stride = size, -(-max(size, 1) // 256) * 256
        super().__init__(self.stride * programs, granule, report)
        number = self.bytes.size // granule
        self.on_its_way = np.zeros(number, bool)  # cp.async has not been waited for
        self.unfenced = np.zeros(number, np.uint8)  # written, with no fence.proxy.async since
        self.copied = np.zeros(number, bool)  # as cp.async brought it
        self.reads_of_copies = 0  # by the matrix unit
        self.copies, self.products = Groups(programs), Groups(programs)

    def locate(self, address: Array, size: int, place: Array) -> Array:
        """Of programs that are ``place`` in the row of those that run at once."""
        at = address.astype(np.int64)
        self.check(at, size, bool(((at >= 0) & (at + size <= self.size)).all()))
        return at + place * self.stride

    def load(self, at: Array, size: int, warp: Array) -> Array:
        if self.on_its_way[self.granules(at, size)].any():
            self.report("reads what cp.async has not brought yet")
        return super().load(at, size, warp)

    def store(self, at: Array, data: Array, warp: Array) -> Array:
        granules = self.granules(at, data.shape[1])
        if self.on_its_way[granules].any():
            self.report("writes where cp.async is about to write")
        self.unfenced[granules] = self.STORED
        self.copied[granules] = False
        return super().store(at, data, warp)

    def copy(self, at: Array, data: Array, warp: Array, place: Array) -> None:
        """cp.async: ``data`` will be there once the copy is waited for."""
        granules = self.granules(at, data.shape[1])
        if self.on_its_way[granules].any():
            self.report("writes where cp.async is about to write")
        self.warps.write(granules, warp, np.ones(granules.shape, bool))
        self.on_its_way[granules] = True
        self.copies.start(place, at, data, warp)

    def wait_for_copies(self, chosen: Array, keep: int) -> None:
        for _, (at, data, warp) in self.copies.wait(chosen, keep):
            granules = self.granules(at, data.shape[1])
            self.on_its_way[granules] = False
            self.bytes.reshape(-1, data.shape[1])[at // data.shape[1]] = data
            # Its thread sees it now, other warps after the next barrier.
            self.warps.write(granules, warp, np.zeros(granules.shape, bool))
            self.unfenced[granules] = self.COPIED
            self.copied[granules] = True

    def fence(self, chosen: Array) -> None:
        self.unfenced.reshape(len(chosen), -1)[chosen] = 0

    def read_by_matrix_unit(self, at: Array, size: int) -> tuple[Array, Array]:
        """(the values' bits, the granules) at the addresses ``at`` (k, values)."""
        granules = at // self.granule
        if self.on_its_way[granules].any():
            self.report("the matrix unit reads what cp.async has not brought yet")
        for kind, name in ((self.STORED, "st.shared"), (self.COPIED, "cp.async")):
            if (self.unfenced[granules] == kind).any():
                self.report(f"no fence.proxy.async between {name} and the matrix unit")
        self.reads_of_copies += int(self.copied[granules].any())
        self.warps.read_by_all(granules)
        bits = self.bytes.view({2: np.uint16, 4: np.uint32}[size])
        return bits[at // size], granules

    def barrier(self, over: Callable[[Array], Array] | None) -> None:
        """As Watch.forget."""
        self.warps.forget(over)
        for granules, *_ in self.products.running:  # no barrier ends these
            self.warps.read_by_all(granules)
