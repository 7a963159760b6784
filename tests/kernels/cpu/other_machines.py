"""Runs a library without PyTorch, by the program alone.cpp: on this machine, on ARM in QEMU, on Windows in Wine."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[2] / "kernels" / "cpu"
Results = dict[str, list[tuple[str, float]]]  # by instruction set: names and numbers


def _load_build_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("linrope_native_build", SOURCE / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = _load_build_script()
QEMU = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
WINE = shutil.which("wine64", path=os.environ["PATH"] + os.pathsep + "/usr/lib/wine")


def runner(target: str) -> tuple[str, list[str]] | None:
    """Where programs of the target can run here, and the command before them. None: nowhere."""
    if target == build.this_platform():
        return "here", []
    if target == "Linux aarch64" and QEMU and Path("/usr/aarch64-linux-gnu").exists():
        return "in QEMU", [QEMU, "-L", "/usr/aarch64-linux-gnu"]
    if target == "Windows x86_64" and WINE:
        return "in Wine", [WINE]
    return None


def run(library: Path, target: str, folder: Path) -> tuple[str, Results] | None:
    """Where it ran, and what it computed. None: nothing runs programs of the target here."""
    where = runner(target)
    if where is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "alone.exe"
    zig = build.find_zig()
    assert zig is not None, "install ziglang"
    flags = ["-target", build.PLATFORMS[target][1], "-std=c++20", "-O1", f"-I{SOURCE}"]
    subprocess.run([*zig, *flags, "-o", str(program), str(HERE / "alone.cpp")], check=True)
    environment = {**os.environ, "WINEDEBUG": "-all", "WINEPREFIX": str(folder / "wine")}
    command = [*where[1], str(program), str(library)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr[-2000:]}"
    return where[0], _parsed(done.stdout)


def _parsed(text: str) -> Results:
    *sections, error = re.split(r"^# ", text, flags=re.MULTILINE)[1:]
    assert error.startswith("ValueError: x: got shape (3, 3), "), error  # what the last call is refused with
    results: Results = {}
    for section in sections:
        name, *lines = section.splitlines()
        results[name] = [(f"{x} {i}", float(number)) for x, i, number in map(str.split, lines)]
    return results


def pytorch_functions() -> list[str]:
    """The names of the PyTorch functions that a library looks for."""
    return re.findall(
        r"^  FUNCTION\((\w+),", (SOURCE / "pytorch.h").read_text(encoding="utf-8"), re.MULTILINE
    )
