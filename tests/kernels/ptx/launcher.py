"""In the place of Triton's launcher: compiles for a GPU that is not there, and runs the PTX in this process.

After install() ``linear_rope_attention`` and ``gated_norm`` with backend="triton" take CPU tensors and compute with
the compiled kernels. Python must have been started with Triton's interpreter off.
"""

from typing import Any

from linrope_kernels import launch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from linrope.backends import triton as backend
from tests.kernels.ptx.grid import Kernel, Report
from tests.kernels.ptx.parse import Fault
from tests.kernels.without_gpu import NoDriver


class Emulator:
    """A GPU of one compute capability."""

    def __init__(self) -> None:
        self.report = Report()
        self.last: dict[str, tuple[Kernel, list[Any], int]] = {}  # the last launch of each kernel
        self._kernels: dict[str, Kernel] = {}

    def start(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], named: dict[str, Any]) -> None:
        compiled = kernel.warmup(*args, grid=grid, **named)
        if compiled.hash not in self._kernels:
            self._kernels[compiled.hash] = Kernel(compiled.asm["ptx"], compiled.metadata.shared)
        if len(grid) != 1:
            raise Fault(f"not covered: a grid of {grid}")
        given = dict(zip(kernel.arg_names, args)) | named
        values: list[Any] = []
        for name, kind in compiled.src.signature.items():
            flatten(kind, given[name], values)
        ready = self._kernels[compiled.hash]
        self.last[ready.program.name] = ready, values, grid[0]
        ready.run(values, grid[0], self.report)


def flatten(kind: Any, value: Any, found: list[Any]) -> None:
    """What the launcher hands over of an argument: constants are compiled in."""
    if isinstance(kind, tuple):
        for inner, x in zip(kind, value, strict=True):
            flatten(inner, x, found)
    elif kind != "constexpr":
        found.append(value)


def install(capability: int) -> Emulator:
    """For the rest of this process."""
    emulator = Emulator()

    def item(kernel: Any, grid: tuple[int, ...]) -> Any:
        return lambda *args, **named: emulator.start(kernel, grid, args, named)

    driver.set_active(NoDriver(capability))
    JITFunction.__getitem__ = item
    launch._device = lambda x: launch._Device(capability, 1)
    backend.why_not = backend.why_not_call = backend.why_not_on = lambda *_: None
    return emulator
