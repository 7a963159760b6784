"""What is launched, and what the compiler makes of it, on a machine with no GPU.

    PYTHONPATH=kernels python -m linrope_kernel_tools.report --dim 64 128 --decay

The launchers run on tensors without memory; each kernel that they would start is compiled from the very
arguments that it would get, as Triton specialises on strides, multiples of 16 and constants. Registers,
spills and shared memory are facts. Cycles come from cycle_model.py and were never compared with a GPU.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from linrope_kernels import gradients, launch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from linrope_kernel_tools import cycle_model

# Shared memory per program, in bytes: CUDA C++ Programming Guide, table of technical specifications.
SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
DTYPES = {"bf16": (torch.bfloat16, "bf16"), "fp16": (torch.float16, "tf32"), "fp32": (torch.float32, "ieee")}
FEW_HEADS, MANY_HEADS = (1, 65_536, 8), (8, 2048, 64)  # b, n, h: cut into segments, and not
SHAPES = ((4, 8192, 16), (1, 65_536, 8), (8, 2048, 16), (8, 2048, 64))
LAUNCH = 2e-6  # seconds that a launch takes beside its work
PROLOGUE = 3000  # cycles before a program's first chunk and after its last


class _NoGPU:
    """In place of Triton's driver."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps what it compiled for each device

    def get_current_stream(self, device: int = 0) -> int:
        return 0


class Launch(NamedTuple):
    """One start of a kernel that did not take place."""

    kernel: Any
    programs: int
    given: dict[str, Any]  # its arguments and constants by name
    compiled: Any

    @property
    def name(self) -> str:
        name = str(self.kernel.__name__).removesuffix("_kernel")
        if name == "dkv":
            return "dk" if self.given["WANT_DK"] else "dv"
        return name + ("_bwd" if self.given.get("REVERSE") else "")


@contextmanager
def recorded(capability: int) -> Iterator[list[Launch]]:
    """What would be launched inside, compiled for a GPU of that capability and an H200's size."""
    launches: list[Launch] = []

    def getitem(kernel: Any, grid: tuple[int, ...]) -> Any:
        def start(*given: Any, **constants: Any) -> None:
            compiled = kernel.warmup(*given, grid=grid, **constants)
            by_name = dict(zip(kernel.arg_names, given)) | constants
            launches.append(Launch(kernel, grid[0], by_name, compiled))

        return start

    before = JITFunction.__getitem__, launch._device
    JITFunction.__getitem__ = getitem
    launch._device = lambda x: launch._Device(capability, cycle_model.MULTIPROCESSORS)
    driver.set_active(_NoGPU(capability))
    try:
        yield launches
    finally:
        JITFunction.__getitem__, launch._device = before
        if torch.cuda.is_available():
            driver.reset_active()


def call_of(
    shape: tuple[int, int, int], d: int, dtype: str, decay: bool = False, layout: str = "interleaved"
) -> launch.Call:
    """A call (b, n, h) of heads of d features and d values, without memory."""
    b, n, h = shape
    kind, dot = DTYPES[dtype]
    q, k, v = torch.empty(3, b, n, h, d, dtype=kind, device="meta")
    log = torch.empty(b, n, h, device="meta") if decay else None
    turns, first = (torch.empty(1, 1, x, dtype=torch.int64, device="meta") for x in (d // 2, 1))
    return launch.Call(
        q=q, k=k, v=v, log_decay=log, theta=turns, positions=first[0], layout=layout, dot=dot
    )  # fmt: skip


def launches(
    call: launch.Call, capability: int, *, backward: bool = True
) -> tuple[list[Launch], list[Launch]]:
    """Of the forward and of the backward pass."""
    with recorded(capability) as forward:
        out, _, saved = launch.attend_fwd(call, None, want_end=False, save=backward)
    with recorded(capability) as after:
        if backward:
            assert out is not None
            gradients.attend_bwd(
                call, None, saved, out if call.reads_out else None, torch.empty_like(out), None
            )
    return forward, after


class Report(NamedTuple):
    kernel: str
    dim: int
    dtype: str
    capability: int
    chunk: int
    pairs: int
    values: int
    warps: int
    stages: int
    registers: int
    spills: int  # bytes stored to and loaded from local memory, per thread
    shared: int  # bytes per program
    matrix: int  # instructions of Hopper's and Blackwell's matrix units
    mma_sync: int  # those of older units
    loop: dict[str, int]  # instructions of the main loop by unit
    bytes: float  # that the main loop moves per token and program, all loads counted
    programs: int  # on one multiprocessor at once
    cycles: float | None  # modelled, per 64 tokens and program, on Hopper
    limits: dict[str, float]  # what that time goes to


def report(x: Launch, dim: int, dtype: str, capability: int, modelled: bool = True) -> Report:
    code, loop = _code(x.compiled.asm["cubin"])
    warps, given = x.compiled.metadata.num_warps, x.given
    chunk, shared = given.get("C", 1), x.compiled.metadata.shared
    programs, found = cycle_model.resident(code.registers, shared, warps), None
    if modelled and capability == 90 and "STAGES" in given:
        found = _model(x.compiled.asm["cubin"], warps, programs)
    counts = Counter(instruction.unit for instruction in loop)
    ptx = x.compiled.asm["ptx"]
    return Report(
        x.name, dim, dtype, capability,
        chunk, given.get("W", 0), given.get("BE", 0), warps, given.get("STAGES", 1),
        code.registers, sum(i.bytes for i in code.instructions if i.unit == "local"), shared,
        len(re.findall(r"wgmma\.mma_async|tcgen05\.mma", ptx)), len(re.findall(r"\bmma\.sync", ptx)),
        dict(counts.most_common()), cycle_model.moved(loop) * warps / chunk, programs,
        found and found.cycles * 64 / chunk, found.limits if found else {},
    )  # fmt: skip


@cache
def _code(cubin: bytes) -> tuple[cycle_model.Code, list[cycle_model.Instruction]]:
    """All, and the main loop."""
    code = cycle_model.machine_code(cubin)
    return code, cycle_model.main_loop(code)


@cache
def _model(cubin: bytes, warps: int, programs: int) -> cycle_model.Modelled:
    return cycle_model.model(_code(cubin)[1], warps, programs)


def seconds(x: Launch) -> float:
    """Modelled time of a launch on an H200."""
    if "STAGES" not in x.given:  # the table of angles, and sums of states: they move memory
        moved = sum(t.nbytes for name, t in x.given.items() if name in ("TABLE", "S", "Z") and t is not None)
        return float(LAUNCH + (1 if "TABLE" in x.given else 2) * moved / cycle_model.BANDWIDTH)
    registers = _code(x.compiled.asm["cubin"])[0].registers
    warps = x.compiled.metadata.num_warps
    most = cycle_model.resident(registers, x.compiled.metadata.shared, warps)
    chunks: int = -(-x.given["length"] // x.given["C"])

    def wave(programs: int) -> float:
        if not programs:
            return 0.0
        return PROLOGUE + chunks * programs * _model(x.compiled.asm["cubin"], warps, programs).cycles

    full, rest = divmod(x.programs, most * cycle_model.MULTIPROCESSORS)
    cycles = full * wave(most) + wave(-(-rest // cycle_model.MULTIPROCESSORS))
    return LAUNCH + cycles / cycle_model.CLOCK


def floors(shape: tuple[int, int, int], d: int) -> tuple[float, float]:
    """Seconds that moving the least bytes takes: q, k, v, out once; backward in two passes."""
    b, n, h = shape
    return tuple(b * n * h * x / cycle_model.BANDWIDTH for x in (8 * d, 22 * d + 12))  # type: ignore[return-value]


def entries(
    dims: list[int],
    dtypes: list[str],
    capabilities: list[int],
    decay: bool = False,
    layout: str = "interleaved",
    modelled: bool = True,
) -> Iterator[Report]:
    """Every kernel of the table, as launched where heads are few, forward, backward and decoding."""
    for d in dims:
        for dtype in dtypes:
            for capability in capabilities:
                call = call_of(FEW_HEADS, d, dtype, decay, layout)
                forward, backward = launches(call, capability)
                with recorded(capability) as step:
                    state = launch.new_state(call, None)
                    launch.step_fwd(_one_token(call), state, state, None)
                for x in {x.name: x for x in (*forward, *backward, *step)}.values():
                    if "BE" in x.given:
                        yield report(x, d, dtype, capability, modelled)


def _one_token(call: launch.Call) -> launch.Call:
    assert call.q is not None
    log = None if call.log_decay is None else call.log_decay[:, :1]
    return replace(call, q=call.q[:, :1], k=call.k[:, :1], v=call.v[:, :1], log_decay=log)


def show(x: Report) -> str:
    units = ("fma", "alu", "imad", "special", "shared", "global", "wgmma", "sync", "local")
    loop = " ".join(f"{x.loop.get(unit, 0):>4}" for unit in units)
    modelled = ""
    if x.cycles:
        most = [f"{why} {part:.0%}" for why, part in list(x.limits.items())[:3]]
        modelled = f"{x.cycles:>6.0f}  {', '.join(most)}"
    return (
        f"{x.kernel:<10} {x.dim:>3} {x.dtype:>4} {x.capability:>3} {x.chunk:>3} {x.pairs:>3} {x.values:>3} "
        f"{x.warps:>2} {x.stages:>2} {x.registers:>4} {x.spills:>6} {x.shared:>6} {x.programs:>4} "
        f"{x.bytes:>5.0f} {sum(x.loop.values()):>5} {loop} {modelled}"
    )


HEADER = (
    "kernel     dim type  sm   C   W  BE  w  s regs spills shared prog bytes  loop"
    "  fma  alu imad spec shrd glob wgmm sync locl cycles  where the time goes"
)


def show_calls(d: int, decay: bool) -> Iterator[str]:
    """Modelled shares of the floor, of whole calls."""
    for shape in SHAPES:
        passes = launches(call_of(shape, d, "bf16", decay), 90)
        shares = [floor / sum(map(seconds, each)) for floor, each in zip(floors(shape, d), passes)]
        parts = [" ".join(f"{x.name} {1e6 * seconds(x):.0f}" for x in each) for each in passes]
        yield (
            f"{shape!s:<15} {d:>3} {'decay' if decay else '':<5} forward {shares[0]:.0%}, "
            f"backward {shares[1]:.0%} of the floor; us: {parts[0]} | {parts[1]}"
        )


def predictions(shapes: list[Any], d: int, decay: bool) -> Iterator[dict[str, Any]]:
    """Modelled seconds of the forward and the backward pass of such calls, in bfloat16 on an H200."""
    for shape in shapes:
        forward, backward = launches(call_of(shape, d, "bf16", decay), 90)
        times = {"forward": sum(map(seconds, forward)), "backward": sum(map(seconds, backward))}
        yield {"shape": [*shape, d], "decay": decay} | times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, nargs="+", default=[90])
    parser.add_argument("--dtype", nargs="+", default=["bf16"], choices=DTYPES)
    parser.add_argument("--dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--layout", default="interleaved", choices=["interleaved", "half"])
    parser.add_argument("--decay", action="store_true", help="with log_decay for each token and head")
    parser.add_argument(
        "--calls", action="store_true", help="modelled time of whole calls, in bfloat16 on an H200"
    )
    parser.add_argument("--json", action="store_true", help="a line of JSON for each, and no table")
    parser.add_argument("--no-model", action="store_true", help="without modelled times, which take as long")
    parser.add_argument(
        "--shape", type=int, nargs=3, action="append", metavar=("B", "N", "H"), help="of --calls --json"
    )
    options = parser.parse_args()
    if options.calls:
        for d in options.dim:
            if options.json:
                for found in predictions([tuple(x) for x in options.shape or SHAPES], d, options.decay):
                    print(json.dumps(found), flush=True)
                continue
            for line in show_calls(d, options.decay):
                print(line, flush=True)
        return
    if not options.json:
        print(
            f"Triton {triton.__version__}; cycles: modelled, per 64 tokens and program, on a multiprocessor"
        )
        print(HEADER)
    given = options.dim, options.dtype, options.capability, options.decay, options.layout
    for x in entries(*given, modelled=not options.no_model):
        print(json.dumps(x._asdict()) if options.json else show(x), flush=True)


if __name__ == "__main__":
    main()
