"""Compiles, without a GPU, the kernels that calls launch, and prints what they take: registers, spills, shared memory.

    PYTHONPATH=.:kernels python -m tests.kernels.without_gpu --dim 64 128 --capability 90 --decay
    PYTHONPATH=.:kernels python -m tests.kernels.without_gpu --dim 64 128 --erase --decay
    PYTHONPATH=.:kernels python -m tests.kernels.without_gpu --dim 64 128 --erase --by-unit

The launchers run on tensors without memory. Each kernel that they would start is compiled from the very arguments that
it would get, because Triton specializes on strides, multiples of 16 and constants.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from linrope_kernels import launch
from linrope_kernels.delta_backward import delta_bwd
from linrope_kernels.delta_forward import delta_fwd
from linrope_kernels.forward import attend_fwd, reads_out
from linrope_kernels.gradients import attend_bwd
from linrope_kernels.launch import new_state
from linrope_kernels.step import step_fwd
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from linrope.recurrence.call import Call

# Shared memory per program, in bytes: CUDA C++ Programming Guide, table of technical specifications.
SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
MULTIPROCESSORS = 132  # of an H100 or H200
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FEW_HEADS = (1, 65_536, 8)  # b, n, h: so few that sequences are cut into segments


class NoDriver:
    """What Triton asks of a GPU's driver before it compiles."""

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
    arguments: dict[str, Any]  # and constants, by name
    compiled: Any

    @property
    def name(self) -> str:
        name = str(self.kernel.__name__).removesuffix("_kernel")
        if name == "dkv":
            missing = [x for x in ("dk", "dv") if self.arguments[x].pointer is None]
            return {"dk": "dv", "dv": "dk"}[missing[0]] if missing else "dkv"
        if name == "chunk_scores" and self.arguments["keys"].erase.pointer is None:
            name += "_bwd"  # it solves nothing
        if name in ("chunk_scores", "chunk_scores_bwd", "delta_dqk") and self.arguments["UNITS"]:
            name += " by unit"
        return name + ("_bwd" if self.arguments.get("REVERSE") else "")


@contextmanager
def recorded(capability: int) -> Iterator[list[Launch]]:
    """Records the launches inside the block, compiled for a GPU of that capability with an H200's size."""
    launches: list[Launch] = []

    def getitem(kernel: Any, grid: tuple[int, ...]) -> Any:
        def start(*arguments: Any, **constants: Any) -> None:
            compiled = kernel.warmup(*arguments, grid=grid, **constants)
            launches.append(Launch(kernel, dict(zip(kernel.arg_names, arguments)) | constants, compiled))

        return start

    before = JITFunction.__getitem__, launch._device
    JITFunction.__getitem__ = getitem
    launch._device = lambda x: launch._Device(capability, MULTIPROCESSORS)
    driver.set_active(NoDriver(capability))
    try:
        yield launches
    finally:
        JITFunction.__getitem__, launch._device = before
        if torch.cuda.is_available():
            driver.reset_active()


def call_of(
    shape: tuple[int, int, int], d: int, dtype: torch.dtype, decay: bool = False, layout: str = "interleaved",
    erase: bool = False, by_unit: bool = False,
) -> Call:  # fmt: skip
    """A call with shape (b, n, h), d features and d values per head, on tensors without memory."""
    b, n, h = shape
    q, k, v = torch.empty(3, b, n, h, d, dtype=dtype, device="meta")
    gates = torch.empty(b, n, h, device="meta")
    log = torch.empty(b, n, h, d // 2, device="meta") if by_unit else gates if decay else None
    theta, first = (torch.empty(1, 1, x, dtype=torch.int64, device="meta") for x in (d // 2, 1))
    call = Call(
        q=q, k=k, v=v, log_decay=log, theta_turns=theta, positions=first[0], layout=layout, feature_map="elu+1"
    )  # fmt: skip
    if not erase:
        return replace(call, normalize=not by_unit)
    return replace(call, feature_map="silu", query_factor=1.0, normalize=False, write=gates, erase=gates)


def one_token(call: Call) -> Call:
    assert call.q is not None
    names = ("q", "k", "v", "log_decay", "write", "erase")
    return replace(call, **{name: None if (x := getattr(call, name)) is None else x[:, :1] for name in names})


def launches(call: Call, capability: int) -> list[Launch]:
    """The launches of a forward pass, a backward pass and a decoding step."""
    with recorded(capability) as found:
        if call.erase is not None or call.decays_by_unit:
            out, _, saved = delta_fwd(call, None, None, True)
            delta_bwd(call, None, None, saved, torch.empty_like(call.v), None)
        else:
            out, _, saved = attend_fwd(call, None, None, True)
            assert out is not None
            attend_bwd(call, None, None, saved, out if reads_out(call) else None, torch.empty_like(out), None)
        state = new_state(call, None)
        step_fwd(one_token(call), None, state, state, None)
    return found


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
    registers: int  # per thread
    spills: int  # bytes stored to and loaded from local memory, per thread
    shared: int  # bytes per program
    matrix: int  # number of instructions for Hopper's and Blackwell's matrix units
    mma_sync: int  # number of those for older units


def report(x: Launch, dim: int, dtype: str, capability: int) -> Report:
    registers, spills = registers_and_spills(x.compiled.asm["cubin"])
    arguments, metadata, ptx = x.arguments, x.compiled.metadata, x.compiled.asm["ptx"]
    return Report(
        x.name, dim, dtype, capability,
        arguments.get("C", 1), arguments.get("W", 0), arguments.get("BE", 0), metadata.num_warps,
        arguments.get("STAGES", 1), registers, spills, metadata.shared,
        len(re.findall(r"wgmma\.mma_async|tcgen05\.mma", ptx)), len(re.findall(r"\bmma\.sync", ptx)),
    )  # fmt: skip


def registers_and_spills(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes stored to and loaded from local memory, of a thread of a kernel that ptxas compiled."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        code, usage = (
            subprocess.run([tools / tool, *options, file.name], capture_output=True, text=True, check=True).stdout
            for tool, *options in (("nvdisasm",), ("cuobjdump", "-res-usage"))
        )  # fmt: skip
    registers = re.search(r"REG:(\d+)", usage)
    assert registers, usage
    widths = {"128": 16, "64": 8, "U8": 1, "S8": 1, "U16": 2, "S16": 2}
    local = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(?:LDL|STL)([\w.]*)", code, re.MULTILINE)
    return int(registers[1]), sum(
        next((widths[x] for x in suffixes.split(".") if x in widths), 4) for suffixes in local
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, nargs="+", default=[90])
    parser.add_argument("--dtype", nargs="+", default=["bf16"], choices=DTYPES)
    parser.add_argument("--dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--layout", default="interleaved", choices=["interleaved", "half"])
    parser.add_argument("--decay", action="store_true", help="pass log_decay for each token and head")
    parser.add_argument("--by-unit", action="store_true", help="pass log_decay for each unit")
    parser.add_argument("--erase", action="store_true", help="the delta rule")
    options = parser.parse_args()
    for dim in options.dim:
        for dtype in options.dtype:
            for capability in options.capability:
                more = options.decay, options.layout, options.erase, options.by_unit
                call = call_of(FEW_HEADS, dim, DTYPES[dtype], *more)
                for x in {x.name: x for x in launches(call, capability)}.values():
                    if "BE" in x.arguments:  # a tile of the table
                        print(json.dumps(report(x, dim, dtype, capability)._asdict()), flush=True)


if __name__ == "__main__":
    main()
