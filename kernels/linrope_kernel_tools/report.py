"""Compiles, without a GPU, the kernels that a call would launch, and reports on the compiled code.

    PYTHONPATH=kernels python -m linrope_kernel_tools.report --dim 64 128 --decay

The launchers run on tensors without memory. Each kernel that they would start is compiled from the very
arguments that it would get, since Triton specialises on strides, multiples of 16 and constants. Registers,
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
FEW_HEADS = (1, 65_536, 8)  # b, n, h: so few that sequences are cut into segments
SHAPES = ((4, 8192, 16), (1, 65_536, 8), (8, 2048, 16), (8, 2048, 64))
LAUNCH = 2e-6  # overhead of a launch, in seconds
PROLOGUE = 3000  # a program's cycles before its first chunk and after its last


class _NoGPU:
    """Replaces Triton's driver."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton caches compiled kernels per device

    def get_current_stream(self, device: int = 0) -> int:
        return 0


class Launch(NamedTuple):
    """A kernel that was compiled but not started."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]  # and constants, by name
    compiled: Any

    @property
    def name(self) -> str:
        name = str(self.kernel.__name__).removesuffix("_kernel")
        if name == "dkv":
            return "dk" if self.arguments["WANT_DK"] else "dv"
        return name + ("_bwd" if self.arguments.get("REVERSE") else "")


@contextmanager
def recorded(capability: int) -> Iterator[list[Launch]]:
    """Records the launches inside the block, compiled for a GPU of that capability with an H200's size."""
    launches: list[Launch] = []

    def getitem(kernel: Any, grid: tuple[int, ...]) -> Any:
        def start(*arguments: Any, **constants: Any) -> None:
            compiled = kernel.warmup(*arguments, grid=grid, **constants)
            by_name = dict(zip(kernel.arg_names, arguments)) | constants
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
    """A call with shape (b, n, h), d features and d values per head, on tensors without memory."""
    b, n, h = shape
    tensor_dtype, dot = DTYPES[dtype]
    q, k, v = torch.empty(3, b, n, h, d, dtype=tensor_dtype, device="meta")
    log = torch.empty(b, n, h, device="meta") if decay else None
    theta, first = (torch.empty(1, 1, x, dtype=torch.int64, device="meta") for x in (d // 2, 1))
    return launch.Call(
        q=q, k=k, v=v, log_decay=log, theta=theta, positions=first[0], layout=layout, dot=dot
    )  # fmt: skip


def launches(
    call: launch.Call, capability: int, *, backward: bool = True
) -> tuple[list[Launch], list[Launch]]:
    """The launches of the forward pass and of the backward pass."""
    with recorded(capability) as forward:
        out, _, saved = launch.attend_fwd(call, None, want_end=False, save=backward)
    with recorded(capability) as backward_launches:
        if backward:
            assert out is not None
            gradients.attend_bwd(
                call, None, saved, out if call.reads_out else None, torch.empty_like(out), None
            )
    return forward, backward_launches


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
    matrix: int  # number of instructions for Hopper's and Blackwell's matrix units
    mma_sync: int  # number of those for older units
    loop: dict[str, int]  # instructions of the main loop, counted by unit
    bytes: float  # moved by the main loop per token and program, cached loads included
    programs: int  # that run on one multiprocessor at once
    cycles: float | None  # modelled, per 64 tokens and program, on Hopper
    limits: dict[str, float]  # fractions of these cycles, by what the warps wait for


def report(x: Launch, dim: int, dtype: str, capability: int, modelled: bool = True) -> Report:
    code, loop = _code(x.compiled.asm["cubin"])
    warps, arguments = x.compiled.metadata.num_warps, x.arguments
    chunk, shared = arguments.get("C", 1), x.compiled.metadata.shared
    programs, timing = cycle_model.resident(code.registers, shared, warps), None
    if modelled and capability == 90 and "STAGES" in arguments:
        timing = _model(x.compiled.asm["cubin"], warps, programs)
    counts = Counter(instruction.unit for instruction in loop)
    ptx = x.compiled.asm["ptx"]
    return Report(
        x.name, dim, dtype, capability,
        chunk, arguments.get("W", 0), arguments.get("BE", 0), warps, arguments.get("STAGES", 1),
        code.registers, sum(i.bytes for i in code.instructions if i.unit == "local"), shared,
        len(re.findall(r"wgmma\.mma_async|tcgen05\.mma", ptx)), len(re.findall(r"\bmma\.sync", ptx)),
        dict(counts.most_common()), cycle_model.moved(loop) * warps / chunk, programs,
        timing and timing.cycles * 64 / chunk, timing.limits if timing else {},
    )  # fmt: skip


@cache
def _code(cubin: bytes) -> tuple[cycle_model.Code, list[cycle_model.Instruction]]:
    """The disassembled kernel, and its main loop."""
    code = cycle_model.machine_code(cubin)
    return code, cycle_model.main_loop(code)


@cache
def _model(cubin: bytes, warps: int, programs: int) -> cycle_model.Modelled:
    return cycle_model.model(_code(cubin)[1], warps, programs)


def seconds(x: Launch) -> float:
    """The modelled time of a launch on an H200."""
    if "STAGES" not in x.arguments:  # table_fwd and prefix only move memory
        tensors = [x.arguments.get(name) for name in ("TABLE", "S", "Z")]
        moved = sum(t.nbytes for t in tensors if t is not None)
        return float(LAUNCH + (1 if "TABLE" in x.arguments else 2) * moved / cycle_model.BANDWIDTH)
    registers = _code(x.compiled.asm["cubin"])[0].registers
    warps = x.compiled.metadata.num_warps
    most = cycle_model.resident(registers, x.compiled.metadata.shared, warps)
    chunks: int = -(-x.arguments["length"] // x.arguments["C"])

    def wave(programs: int) -> float:
        if not programs:
            return 0.0
        return PROLOGUE + chunks * programs * _model(x.compiled.asm["cubin"], warps, programs).cycles

    full, rest = divmod(x.programs, most * cycle_model.MULTIPROCESSORS)
    cycles = full * wave(most) + wave(-(-rest // cycle_model.MULTIPROCESSORS))
    return LAUNCH + cycles / cycle_model.CLOCK


def floors(shape: tuple[int, int, int], d: int) -> tuple[float, float]:
    """The least time in seconds, forward and backward: q, k, v and out moved once; in two passes backward."""
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
    """A report on every kernel of the table, as launched for few heads: forward, backward and decoding."""
    for d in dims:
        for dtype in dtypes:
            for capability in capabilities:
                call = call_of(FEW_HEADS, d, dtype, decay, layout)
                forward, backward = launches(call, capability)
                with recorded(capability) as step:
                    state = launch.new_state(call, None)
                    launch.step_fwd(_one_token(call), state, state, None)
                for x in {x.name: x for x in (*forward, *backward, *step)}.values():
                    if "BE" in x.arguments:
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
        largest = [f"{why} {fraction:.0%}" for why, fraction in list(x.limits.items())[:3]]
        modelled = f"{x.cycles:>6.0f}  {', '.join(largest)}"
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
    """Modelled times of whole calls, as fractions of the least time."""
    for shape in SHAPES:
        passes = launches(call_of(shape, d, "bf16", decay), 90)
        shares = [floor / sum(map(seconds, each)) for floor, each in zip(floors(shape, d), passes)]
        parts = [" ".join(f"{x.name} {1e6 * seconds(x):.0f}" for x in each) for each in passes]
        yield (
            f"{shape!s:<15} {d:>3} {'decay' if decay else '':<5} forward {shares[0]:.0%}, "
            f"backward {shares[1]:.0%} of the least time; us: {parts[0]} | {parts[1]}"
        )


def predictions(shapes: list[Any], d: int, decay: bool) -> Iterator[dict[str, Any]]:
    """Modelled seconds of the forward and backward pass for each shape, in bfloat16 on an H200."""
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
    parser.add_argument("--decay", action="store_true", help="pass log_decay for each token and head")
    parser.add_argument(
        "--calls", action="store_true", help="model the time of whole calls, in bfloat16 on an H200"
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    parser.add_argument(
        "--no-model", action="store_true", help="skip the modelled cycles, which double the time"
    )
    parser.add_argument(
        "--shape",
        type=int,
        nargs=3,
        action="append",
        metavar=("B", "N", "H"),
        help="of a call, for --calls --json",
    )
    options = parser.parse_args()
    if options.calls:
        for d in options.dim:
            if options.json:
                for times in predictions([tuple(x) for x in options.shape or SHAPES], d, options.decay):
                    print(json.dumps(times), flush=True)
                continue
            for line in show_calls(d, options.decay):
                print(line, flush=True)
        return
    if not options.json:
        print(
            f"Triton {triton.__version__}; cycles: modelled, per 64 tokens and program, on a multiprocessor"
        )
        print(HEADER)
    selected = options.dim, options.dtype, options.capability, options.decay, options.layout
    for x in entries(*selected, modelled=not options.no_model):
        print(json.dumps(x._asdict()) if options.json else show(x), flush=True)


if __name__ == "__main__":
    main()
