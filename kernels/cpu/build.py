"""Builds the native CPU library, liblinrope_native.so: the kernels once per instruction set, and a thin binding.

    python kernels/cpu/build.py [OUT_DIR]

OUT_DIR is linrope/lib by default. The library's build id is a digest of its sources, so that a library built
from other sources is recognized. If the build fails, an old library is removed.
"""

import argparse
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE = Path(__file__).resolve().parent
LIBRARY = "liblinrope_native.so"  # no file name that Python would import as a module
OUT_DIR = SOURCE.parents[1] / "linrope" / "lib"

FLAGS = [
    "-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=fast", "-Wall", "-Wno-psabi",
    # Newer GCCs split long chains of fused products when they tune for v3, in some loops only. The rounding of a row
    # would then depend on how many rows are multiplied together.
    "--param=avoid-fma-max-bits=0", "-Wno-unused-command-line-argument",  # clang has no such setting
]  # fmt: skip
V4 = ["-march=x86-64-v4", "-mprefer-vector-width=512"]
ISAS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "baseline": [],
        "v3": ["-march=x86-64-v3"],
        "v4": V4,
        "amx": [*V4, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
    },
    "aarch64": {"baseline": []},
}
COMPILERS = ("c++", "g++", "clang++")  # unless $CXX names one
# The stable ABI of PyTorch 2.10, which later releases keep; linrope itself needs 2.11
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"


class Unavailable(RuntimeError):
    """This machine cannot build the library, for a reason outside the sources, such as a missing compiler."""


def digest() -> str:
    """40 hexadecimal digits: the SHA-1 of all sources, this file with its compiler flags included."""
    sources = sorted(path for path in SOURCE.iterdir() if path.suffix in (".h", ".cpp", ".py"))
    return hashlib.sha1(
        b"\0".join(path.name.encode() + b"\0" + path.read_bytes() for path in sources)
    ).hexdigest()


def current(out_dir: Path = OUT_DIR) -> Path | None:
    """The library in out_dir, if it was built from the current sources."""
    library = out_dir / LIBRARY
    return library if library.exists() and bytes.fromhex(digest()) in library.read_bytes() else None


def torch_folder() -> Path:
    """The folder where torch is installed. torch itself is not imported; only its headers are needed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        if in_an_isolated_build():
            raise Unavailable(
                "build isolation: the build could not see PyTorch; install PyTorch and hatchling first, "
                "then run pip with --no-build-isolation"
            )
        raise Unavailable("no PyTorch: the build needs its headers; install PyTorch first")
    folder = Path(spec.origin).parent
    if not (folder / "include" / "torch" / "csrc" / "stable" / "library.h").exists():
        raise Unavailable(
            f"no PyTorch headers: {folder} has none of the stable ABI, expected PyTorch 2.11 or later"
        )
    return folder


def in_an_isolated_build() -> bool:
    """True in a temporary environment of pip or build (build-env-) or of uv (builds-v)."""
    return any("build-env-" in folder or "builds-v" in folder for folder in (sys.prefix, *sys.path))


def find_compiler(names: tuple[str, ...]) -> str:
    """The path of the first of these commands that is installed."""
    for name in names:
        if path := shutil.which(name):
            return path
    raise Unavailable(
        f"no compiler: found none of {', '.join(names)}; install a C++20 compiler, or name one in $CXX"
    )


def build(out_dir: Path = OUT_DIR, *, compiler: str | None = None, sanitize: bool = False) -> Path:
    """Compiles and links the library; returns its path.

    Raises:
        Unavailable: the machine is not supported, or there is no compiler or no headers.
        RuntimeError: the compiler's first error; the lines after it are its command and its output.
    """
    library, build_id = out_dir / LIBRARY, digest()
    library.unlink(missing_ok=True)  # if the build fails, no outdated library stays behind
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine())
    if platform.system() != "Linux" or machine not in ISAS:
        system = platform.system()
        raise Unavailable(f"{system} {machine}: the kernels are for Linux on {' and '.join(ISAS)}")
    requested = shlex.split(compiler or os.environ.get("CXX", ""))  # it may have arguments: "ccache g++"
    command = [find_compiler(tuple(requested[:1]) or COMPILERS), *requested[1:]]
    torch = torch_folder()
    names = f"-fmacro-prefix-map={SOURCE}{os.sep}="  # errors name arguments.h, not this machine's folders
    flags = [*FLAGS, names, *(["-fsanitize=address,undefined", "-g", "-O1"] if sanitize else [])]
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
            list(pool.map(lambda job: _run([*command, *flags, *job[1], "-c", "-o", job[0]]), jobs.items()))
        out_dir.mkdir(parents=True, exist_ok=True)
        fresh = f"{folder}/{LIBRARY}"
        link = [
            *command,
            "-shared",
            *(["-fsanitize=address,undefined"] if sanitize else []),
            "-o",
            fresh,
            *jobs,
        ]
        _run([*link, f"-Wl,--build-id=0x{build_id}", f"-L{torch / 'lib'}", "-ltorch_cpu", "-Wl,--as-needed"])
        part = library.with_suffix(".part")
        shutil.copyfile(fresh, part)
        part.replace(library)  # atomic: processes with the old library open keep it
    return library


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        lines = result.stderr.splitlines() or [f"exit status {result.returncode}"]
        first = next((line for line in lines if "error" in line), lines[0])
        raise RuntimeError(f"compiler failed: {first}\n{' '.join(command)}\n{result.stderr[-4000:]}")
    if result.stderr:
        print(result.stderr, file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out_dir", nargs="?", type=Path, default=OUT_DIR)
    parser.add_argument("--compiler", help="default: $CXX, else c++, g++ or clang++")
    parser.add_argument(
        "--sanitize", action="store_true", help="build with the address and undefined-behaviour sanitizers"
    )
    parser.add_argument(
        "--if-changed",
        action="store_true",
        help="do nothing if the library was built from the current sources",
    )
    options = parser.parse_args()
    if options.if_changed and current(options.out_dir):
        sys.exit()
    try:
        print(build(options.out_dir, compiler=options.compiler, sanitize=options.sanitize))
    except Unavailable as error:  # not an error of the sources: the other backends work without the library
        print(f"native CPU library: not built: {error}", file=sys.stderr)
