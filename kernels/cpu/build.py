"""Builds the native CPU library: the kernels once per instruction set, and a thin binding.

    python kernels/cpu/build.py [OUT_DIR]

OUT_DIR is linrope/lib by default. Nothing but a C++20 compiler is needed: the one in $CXX, or else c++, g++ or clang++,
or else the Python package ziglang. If the build fails, an old library is removed.
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
OUT_DIR = SOURCE.parents[1] / "linrope" / "lib"

FLAGS = [
    "-std=c++20", "-O3", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
    "-Wall", "-Wno-psabi",
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
# The platforms with kernels, and the oldest system of each that Zig builds for: the tag of its wheel, and Zig's name
PLATFORMS = {
    "Linux x86_64": ("manylinux_2_28_x86_64", "x86_64-linux-gnu.2.28"),
    "Linux aarch64": ("manylinux_2_28_aarch64", "aarch64-linux-gnu.2.28"),
    "Darwin aarch64": ("macosx_11_0_arm64", "aarch64-macos.11.0"),
    "Darwin x86_64": ("macosx_11_0_x86_64", "x86_64-macos.11.0"),
    "Windows x86_64": ("win_amd64", "x86_64-windows-gnu"),
}
OTHER_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}
LIBRARIES = {
    "Linux": "liblinrope_native.so",
    "Darwin": "liblinrope_native.dylib",
    "Windows": "linrope_native.dll",
}
COMPILERS = ("c++", "g++", "clang++")  # unless $CXX names one
ZIG = "ziglang>=0.15"  # Clang, with the C and C++ libraries of all platforms
CXX20 = "#include <bit>\n#include <span>\nunsigned bits(std::span<float> x) { return std::bit_cast<unsigned>(x[0]); }"


class Unavailable(RuntimeError):
    """This machine cannot build the library, for a reason outside the sources, such as a missing compiler."""


def digest() -> str:
    """40 hexadecimal digits: the SHA-1 of all sources, this file with its compiler flags included."""
    sources = sorted(path for path in SOURCE.iterdir() if path.suffix in (".h", ".cpp", ".py"))
    return hashlib.sha1(
        b"\0".join(path.name.encode() + b"\0" + path.read_bytes() for path in sources)
    ).hexdigest()


def this_platform() -> str:
    """This machine's system and processor, in the words of PLATFORMS, for example "Linux x86_64"."""
    machine = platform.machine().lower()
    return f"{platform.system()} {OTHER_NAMES.get(machine, machine)}"


def library_name(target: str) -> str:
    """No file name that Python would import as a module."""
    return LIBRARIES[target.split()[0]]


def current(out_dir: Path = OUT_DIR, target: str | None = None) -> Path | None:
    """The library in out_dir, if it was built from the current sources."""
    target = target or this_platform()
    if target not in PLATFORMS:
        return None
    library = out_dir / library_name(target)
    return library if library.exists() and digest().encode() in library.read_bytes() else None


def find_zig() -> list[str] | None:
    """The command of the C++ compiler in the package ziglang, if that is installed."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        return None
    return [str(Path(spec.origin).with_name("zig.exe" if os.name == "nt" else "zig")), "c++"]


def find_compiler(requested: str | None = None) -> list[str]:
    """The command of a C++20 compiler: the one requested or in $CXX, or else the first that this machine has."""
    if command := shlex.split(requested or os.environ.get("CXX", "")):  # it may have arguments: "ccache g++"
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
        raise Unavailable(f"no compiler: found no {command[0]}, which $CXX or --compiler names")
    for name in COMPILERS:
        if (path := shutil.which(name)) and compiles_cxx20(path):
            return [path]
    if zig := find_zig():
        return zig
    raise Unavailable(
        f"no compiler: found none of {', '.join(COMPILERS)} that compiles C++20; install one, or run "
        f"`pip install ziglang`, or name one in $CXX"
    )


def compiles_cxx20(compiler: str) -> bool:
    command = [compiler, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(command, input=CXX20, capture_output=True, text=True, check=False).returncode == 0


def requirements() -> list[str]:
    """The packages that a build needs on this machine: a compiler, if it has none."""
    try:
        find_compiler()
    except Unavailable:
        return [ZIG] if this_platform() in PLATFORMS else []
    return []


def build(
    out_dir: Path = OUT_DIR, *, compiler: str | None = None, target: str | None = None, sanitize: bool = False
) -> Path:
    """Compiles and links the library; returns its path.

    target: one of PLATFORMS, for which Zig compiles; by default this machine's.

    Raises:
        Unavailable: the machine is not supported, or there is no compiler.
        RuntimeError: the compiler's first error; the lines after it are its command and its output.
    """
    cross, target = target is not None, target or this_platform()
    if target not in PLATFORMS:
        raise Unavailable(f"{target}: the kernels are for {', '.join(PLATFORMS)}")
    library = out_dir / library_name(target)
    library.unlink(missing_ok=True)  # if the build fails, no outdated library stays behind
    command = find_zig() if cross else find_compiler(compiler)
    if command is None:
        raise Unavailable(f"no compiler: {target} needs ziglang; run `pip install ziglang`")
    system, machine = target.split()
    names = f"-fmacro-prefix-map={SOURCE}{os.sep}="  # no file names this machine's folders
    flags = [*FLAGS, names, *(["-fsanitize=address,undefined", "-g", "-O1"] if sanitize else [])]
    if system != "Windows":
        flags.append("-fPIC")
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        if is_zig := "zig" in Path(command[0]).name:
            flags += ["-target", PLATFORMS[target][1]]  # without it Zig builds for this very processor
            environment |= {
                x: os.environ.get(x, folder) for x in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")
            }
        jobs = {f"{folder}/binding.o": [str(SOURCE / "binding.cpp"), f'-DLINROPE_BUILD="{digest()}"']}
        for isa, more in ISAS[machine].items():
            more = [flag.replace("x86-64-v", "x86_64_v") for flag in more] if is_zig else more
            jobs[f"{folder}/kernel_{isa}.o"] = [str(SOURCE / "kernel.cpp"), f"-DISA={isa}", *more]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            commands = [[*command, *flags, *job, "-c", "-o", path] for path, job in jobs.items()]
            list(pool.map(lambda command: run(command, environment), commands))
        out_dir.mkdir(parents=True, exist_ok=True)
        fresh = f"{folder}/{library.name}"
        link = ["-shared", *(["-s"] if is_zig else [])]
        if system == "Linux":  # else what is inline in C++'s library, or all of it, is exported too
            Path(folder, "exports").write_text("{ global: linrope_*; local: *; };\n")
            link.append(f"-Wl,--version-script={folder}/exports")
        if system == "Darwin":  # else it is named after this machine's folder
            link.append(f"-Wl,-install_name,@rpath/{library.name}")
        run([*command, *flags, *link, "-o", fresh, *jobs], environment)
        part = library.with_suffix(".part")
        shutil.copyfile(fresh, part)
        part.replace(library)  # atomic: processes with the old library open keep it
    return library


def run(command: list[str], environment: dict[str, str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        lines = result.stderr.splitlines() or [f"exit status {result.returncode}"]
        first = next((line for line in lines if "error" in line), lines[0])
        raise RuntimeError(f"compiler failed: {first}\n{' '.join(command)}\n{result.stderr[-4000:]}")
    if result.stderr:
        print(result.stderr, file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out_dir", nargs="?", type=Path, default=OUT_DIR)
    parser.add_argument("--compiler", help="default: $CXX, or else the first that is found")
    parser.add_argument("--target", choices=PLATFORMS, help="another platform, for which Zig compiles")
    parser.add_argument(
        "--sanitize", action="store_true", help="build with the address and undefined-behaviour sanitizers"
    )
    parser.add_argument(
        "--if-changed",
        action="store_true",
        help="do nothing if the library was built from the current sources",
    )
    parser.add_argument(
        "--requirements",
        action="store_true",
        help="print the packages that a build needs here, and build nothing",
    )
    options = parser.parse_args()
    if options.requirements:
        print(*requirements())
        sys.exit()
    if options.if_changed and current(options.out_dir, options.target):
        sys.exit()
    how = {"compiler": options.compiler, "target": options.target, "sanitize": options.sanitize}
    try:
        print(build(options.out_dir, **how))
    except Unavailable as error:  # not an error of the sources: the other backends work without the library
        print(f"native CPU library: not built: {error}", file=sys.stderr)
