"""The kernels on ARM: compiled by a cross compiler, run by QEMU, where a machine has both."""

import math
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPILER = "aarch64-linux-gnu-g++"
QEMU = next((name for name in ("qemu-aarch64", "qemu-aarch64-static") if shutil.which(name)), None)
HOST = os.environ.get("CXX") or "c++"


def numbers(build_script, compiler: str, folder: Path, *run: str) -> dict[str, float]:
    program = folder / compiler.replace("/", "_")
    sources = [str(build_script.SOURCE / "kernel.cpp"), str(HERE / "alone.cpp")]
    flags = [flag for flag in build_script.FLAGS if flag != "-fPIC"]
    command = [compiler, *flags, "-static", "-DISA=baseline", f"-I{build_script.SOURCE}", "-o", str(program)]
    subprocess.run([*command, *sources], check=True)
    printed = subprocess.run([*run, str(program)], check=True, capture_output=True, text=True).stdout
    lines = [line.split() for line in printed.splitlines()]
    return {f"{i} {name} {at}": float(x) for i, (name, at, x) in enumerate(lines)}


@pytest.mark.long
@pytest.mark.skipif(
    QEMU is None or not shutil.which(COMPILER) or not shutil.which(HOST) or platform.machine() != "x86_64",
    reason=f"needs {COMPILER} and qemu-aarch64 on x86-64",
)
def test_on_arm_the_kernels_compute_the_same(build_script, tmp_path: Path) -> None:
    here = numbers(build_script, HOST, tmp_path)
    there = numbers(build_script, COMPILER, tmp_path, str(QEMU))
    assert len(here) > 1000
    assert list(here) == list(there)
    largest: dict[str, float] = {}
    for key, x in here.items():
        name = key.split()[1]
        largest[name] = max(largest.get(name, 0.0), abs(x))
        assert math.isfinite(x), key
    for key, x in here.items():
        assert abs(there[key] - x) <= 2e-5 * largest[key.split()[1]], (key, x, there[key])
