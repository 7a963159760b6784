"""Runs a program over a grid, on PyTorch's tensors."""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# The last two enter their opcodes where they are imported.
from tests.kernels.ptx import arithmetic, tensor_core  # noqa: F401
from tests.kernels.ptx.machine import Machine, decode
from tests.kernels.ptx.memory import Array, GlobalMemory
from tests.kernels.ptx.operands import build
from tests.kernels.ptx.parse import Program
from tests.kernels.ptx.transfers import access_size

THREADS_AT_ONCE = 2048  # so many make the work per instruction worth its overhead in Python


class Launch(NamedTuple):
    kernel: str
    programs: int
    instructions: int
    seconds: float
    reads_of_copies: int  # by Hopper's matrix unit: of what cp.async brought, as it is


@dataclass
class Report:
    """What went wrong, (kernel, what, where) -> how often; and what ran."""

    findings: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    launches: list[Launch] = field(default_factory=list)


class Kernel:
    """PTX, ready to run; ``shared``: bytes that a program of the grid has."""

    def __init__(self, ptx: str, shared: int) -> None:
        self.program, self.shared = Program(ptx), shared
        self.steps = decode(self.program, build)
        self.granules = {
            space: min((x for x in sizes if x is not None), default=16)
            for space in ("global", "shared")
            for sizes in [[access_size(x, space) for x in self.program.code]]
        }

    @property
    def barriers(self) -> list[int]:
        return [i for i, x in enumerate(self.program.code) if (x.name, x.qualifiers) == ("bar", ("sync",))]

    def run(
        self, values: list[Any], programs: int, report: Report, left_out: frozenset[int] = frozenset()
    ) -> None:
        """values: a tensor or a number for each parameter; left_out: barriers that do nothing."""
        begin, executed, copies = time.perf_counter(), 0, 0
        machine: Machine | None = None

        def find(kind: str) -> None:
            assert machine is not None
            machine.report(kind)

        storages: dict[int, Array] = {}
        for x in values:
            if isinstance(x, Tensor):
                storages.setdefault(x.untyped_storage().data_ptr(), storage_bytes(x))
        tensors = [(at % 256, x) for at, x in storages.items()]
        memory = GlobalMemory(tensors, self.granules["global"], find)
        placed = dict(zip(storages, memory.addresses))
        bits = [to_bits(x, placed) for x in values]
        # Triton adds parameters for memory that no kernel asks for.
        bits += [0] * (len(self.program.params) - len(bits))
        arguments = dict(zip(self.program.params, bits, strict=True))
        at_once = max(1, THREADS_AT_ONCE // self.program.threads)
        for first in range(0, programs, at_once):
            numbers = range(first, min(first + at_once, programs))
            machine = Machine(
                self.program, self.steps, memory, arguments, numbers, self.shared, self.granules["shared"],
                report.findings, left_out,
            )  # fmt: skip
            machine.run()
            executed += machine.executed
            copies += machine.shared.reads_of_copies
        memory.write_back()
        seconds = time.perf_counter() - begin
        report.launches.append(Launch(self.program.name, programs, executed, seconds, copies))


def storage_bytes(x: Tensor) -> Array:
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).numpy()


def to_bits(x: Any, placed: dict[int, int]) -> int:
    if isinstance(x, Tensor):
        start = x.untyped_storage().data_ptr()
        return placed[start] + x.data_ptr() - start
    if isinstance(x, float):
        return int(np.float32(x).view(np.uint32))
    return int(x)
