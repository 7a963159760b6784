"""What the compiler makes of every kernel, on a machine with no GPU: python -m linrope_kernels.report

Registers and spills are ptxas's, for one entry of the tile table each; shared memory is per program.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from linrope_kernels import tiles
from linrope_kernels.backward import dkv_kernel, dq_kernel
from linrope_kernels.forward import scan_fwd_kernel, states_kernel
from linrope_kernels.step import step_fwd_kernel

# Shared memory per program, in bytes: CUDA C++ Programming Guide, table of technical specifications.
SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
DATA = {"Q", "K", "V", "X", "Y", "OUT", "G", "DQ", "DK", "DV"}
TYPES = dict.fromkeys(("THETA", "Q_POSITIONS", "K_POSITIONS"), "*i64")
TYPES |= dict.fromkeys(("DEN", "DELTA", "S", "T", "S_END", "T_END", "LOG", "D_LOG"), "*fp32")
TYPES["eps"] = "fp32"
TYPES |= dict.fromkeys(("Z", "U", "Z_END", "U_END", "TOTALS"), "*fp64")
STRIDES = {"table_strides": 2, "log_strides": 3, "phase_strides": 4}
DTYPES = {"bf16": "bf16", "fp16": "tf32", "fp32": "ieee"}  # how the backend computes products
KERNELS: dict[str, tuple[Any, dict[str, bool]]] = {
    "scan_fwd": (scan_fwd_kernel, {"CAUSAL": True}),
    "states": (states_kernel, {"REVERSE": False}),
    "states_bwd": (states_kernel, {"REVERSE": True}),
    "dq": (dq_kernel, {"CAUSAL": True}),
    "dkv": (dkv_kernel, {"CAUSAL": True, "WANT_DK": True, "WANT_DV": True}),
    "dk": (dkv_kernel, {"CAUSAL": True, "WANT_DK": True, "WANT_DV": False}),
    "dv": (dkv_kernel, {"CAUSAL": True, "WANT_DK": False, "WANT_DV": True}),
    "step_fwd": (step_fwd_kernel, {}),
}


@dataclass(frozen=True)
class Report:
    registers: int
    spills: int  # bytes stored to and loaded from local memory, per thread
    shared: int  # bytes per program
    matrix: int  # instructions of Hopper's and Blackwell's matrix units: wgmma, tcgen05
    mma_sync: int  # those of older units


def compile_kernel(
    name: str, f: int, e: int, dtype: str, capability: int, tile: tiles.Tile | None = None,
    decay: bool = False, **constants: Any,
) -> Report:  # fmt: skip
    """Compiles for a GPU that need not be there; dtype is Triton's: "bf16", "fp16", "fp32"."""
    dot = DTYPES[dtype]
    kernel, wants = KERNELS[name]
    tile = tile or tiles.tile(name.removesuffix("_bwd"), f, e, dot, capability)
    constants = {
        "F": f, "E": e, "P": f // 2, "MAP": "elu+1", "INTERLEAVED": True, "NORMALIZE": True,
        "DOT": dot, "C": tile.chunk, "W": tile.pairs, "BE": tile.values, "STAGES": tile.stages,
        "AXES": 1, "ADD": False, "MASK": None, "group": 1, **wants, **constants,
    }  # fmt: skip
    absent = ["SLOTS", "K_TABLE", "Q_PHASES", "K_PHASES", "D_ANGLES"]
    absent += [] if decay else ["LOG", "TOTALS", "D_LOG"]
    constants = dict.fromkeys(absent) | constants
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature: dict[str, Any] = {}
    given: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, parameter in enumerate(kernel.arg_names):
        if parameter in constants:
            signature[parameter], given[i,] = "constexpr", constants[parameter]
        elif numbers := [number for name, number in STRIDES.items() if parameter.endswith(name)]:
            signature[parameter] = ("i32",) * numbers[0]
        elif parameter.endswith("_strides"):
            signature[parameter], given[i, 3] = ("i32", "i32", "i32", "constexpr"), 1
            attributes |= {(i, j): [["tt.divisibility", 16]] for j in range(3)}
        else:
            kind = f"*{dtype}" if parameter in DATA else TYPES.get(parameter, "i32")
            if parameter.endswith("TABLE"):
                kind = "*fp16" if dtype == "bf16" else "*fp32"
            signature[parameter] = kind
            if signature[parameter].startswith("*"):
                attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=given, attrs=attributes)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    said = _assemble(compiled.asm["ptx"], capability)
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    assert registers, said
    ptx = compiled.asm["ptx"]
    return Report(
        int(registers[1]),
        sum(map(int, spills)),
        compiled.metadata.shared,
        len(re.findall(r"wgmma\.mma_async|tcgen05\.mma", ptx)),
        len(re.findall(r"\bmma\.sync", ptx)),
    )


def _assemble(ptx: str, capability: int) -> str:
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    name = "ptxas-blackwell" if capability >= 100 and (tools / "ptxas-blackwell").exists() else "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        arch = f"sm_{capability}" + ("a" if capability >= 90 else "")
        command = [str(tools / name), "-v", f"-arch={arch}", file.name, "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return str(done.stderr)


def entries(
    kernels: list[str] | None = None, dims: list[int] | None = None
) -> Iterator[tuple[str, int, str]]:
    """(kernel, features and values per head, how products are computed): the tile table, or parts of it."""
    every = [(name, size) for name, size in tiles.TABLE["bf16"]]
    every += [("states_bwd", size) for name, size in tiles.TABLE["bf16"] if name == "states"]
    every += [("step_fwd", size) for size in (64, 128, 256)]
    for name, size in every:
        if (not kernels or name in kernels) and (not dims or size in dims):
            for dtype in DTYPES:
                yield name, size, dtype


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90, 100])
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--dim", type=int, nargs="+")
    parser.add_argument("--kernel", nargs="+", choices=KERNELS)
    parser.add_argument("--decay", action="store_true", help="with decay")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each, and no table")
    options = parser.parse_args()
    if not options.json:
        print(f"Triton {triton.__version__}; per thread: registers, spilled bytes; per program: shared bytes")
        print("kernel       dim dtype  sm   C   W  BE warps stages registers spills shared matrix mma.sync")
    for name, d, dtype in entries(options.kernel, options.dim):
        if dtype not in options.dtype:
            continue
        for capability in options.capability:
            tile = tiles.tile(name.removesuffix("_bwd"), d, d, DTYPES[dtype], capability)
            r = compile_kernel(name, d, d, dtype, capability, decay=options.decay)
            if options.json:
                line = {"kernel": name, "dim": d, "dtype": dtype, "capability": capability, **asdict(r)}
                print(json.dumps(line), flush=True)
            else:
                print(
                    f"{name:<11} {d:>4} {dtype:>5} {capability:>3} {tile.chunk:>3} {tile.pairs:>3} "
                    f"{tile.values:>3} {tile.warps:>5} {tile.stages:>6} {r.registers:>9} {r.spills:>6} "
                    f"{r.shared:>6} {r.matrix:>6} {r.mma_sync:>8}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
