"""Builds the native CPU library, liblinrope_native.so: the kernels once per instruction set, and a thin binding.

python kernels/cpu/build.py [OUT_DIR]   (default: linrope/lib)
"""

import argparse
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE = Path(__file__).resolve().parent
LIBRARY = "liblinrope_native.so"  # not the name of a Python module, or Python would take it for one
OUT_DIR = SOURCE.parents[1] / "linrope" / "lib"

FLAGS = [
    "-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
    "-Wall", "-Wno-psabi",
]  # fmt: skip
ISAS = {
    "x86_64": {
        "baseline": [],
        "v3": ["-march=x86-64-v3"],
        "v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    },
    "aarch64": {"baseline": []},
}
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # 2.10: the library serves that torch and later ones


def torch_folder() -> Path:
    """Where torch is installed; it need not be imported for its headers."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("native CPU library: torch is not installed, expected its headers")
    folder = Path(spec.origin).parent
    if not (folder / "include" / "torch" / "csrc" / "stable" / "library.h").exists():
        raise RuntimeError(
            f"native CPU library: no stable ABI headers in {folder}, expected torch >= 2.10 with include/"
        )
    return folder


def build(out_dir: Path = OUT_DIR, *, compiler: str | None = None, sanitize: bool = False) -> Path:
    """Compiles and links; returns the library's path.

    Raises:
        RuntimeError: no compiler, no headers, an unknown machine, or the compiler's own words.
    """
    name = compiler or os.environ.get("CXX") or "c++"
    command = shutil.which(name)
    if command is None:
        raise RuntimeError(f"native CPU library: no C++ compiler {name!r}")
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine())
    if platform.system() != "Linux" or machine not in ISAS:
        raise RuntimeError(
            f"native CPU library: got {platform.system()} on {machine}, expected Linux on {', '.join(ISAS)}"
        )
    torch = torch_folder()
    flags = [*FLAGS, *(["-fsanitize=address,undefined", "-g", "-O1"] if sanitize else [])]
    with tempfile.TemporaryDirectory() as folder:
        jobs = {
            f"{folder}/kernel_{isa}.o": [str(SOURCE / "kernel.cpp"), f"-DISA={isa}", *more]
            for isa, more in ISAS[machine].items()
        }
        jobs[f"{folder}/binding.o"] = [
            str(SOURCE / "binding.cpp"),
            STABLE_ABI,
            "-isystem",
            str(torch / "include"),
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda job: _run([command, *flags, *job[1], "-c", "-o", job[0]]), jobs.items()))
        out_dir.mkdir(parents=True, exist_ok=True)
        library, fresh = out_dir / LIBRARY, f"{folder}/{LIBRARY}"
        link = [
            command,
            "-shared",
            *(["-fsanitize=address,undefined"] if sanitize else []),
            "-o",
            fresh,
            *jobs,
        ]
        _run([*link, f"-L{torch / 'lib'}", "-ltorch_cpu", "-Wl,--as-needed"])
        part = library.with_suffix(".part")
        shutil.copyfile(fresh, part)
        part.replace(library)  # never half a file, and a process that has the old one keeps it
    return library


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"native CPU library: {' '.join(command)} failed:\n{result.stderr[-4000:]}")
    if result.stderr:
        print(result.stderr, file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out_dir", nargs="?", type=Path, default=OUT_DIR)
    parser.add_argument("--compiler", help="default: $CXX, else c++")
    parser.add_argument(
        "--sanitize", action="store_true", help="with the address and undefined-behaviour sanitizers"
    )
    given = parser.parse_args()
    print(build(given.out_dir, compiler=given.compiler, sanitize=given.sanitize))
