"""Makes a folder with Python and PyTorch for ARM, which run in QEMU on another machine: python arm.py FOLDER

FOLDER/python is that Python. Python itself comes from Debian's packages for arm64 (apt-get, without root), PyTorch
and what the tests need from PyPI; about 450 MB, which are not loaded again if the folder is complete.

PyPI's PyTorch for ARM is built for CUDA and cannot be loaded without CUDA's libraries. Two gigabytes of them would
never be called here, so a library takes their place in which every function returns "no device".
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
PREFIX = "aarch64-linux-gnu-"
COMMANDS = {
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
    f"{PREFIX}g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64-static": "qemu-user-static",
}
DEBIAN = ("python3", "libgomp1", "libstdc++6", "libgcc-s1")
WHEELS = (
    "einops", "hypothesis", "numpy", "opt_einsum", "pytest", "safetensors",  # what linrope and its tests import
    "filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions",  # of torch
)  # fmt: skip
CUDA = re.compile(
    r"(__cuda|cuda|cupti|cublas|cudnn|cufft|cusolver|cusparse|curand|nvrtc|nccl|cuFile|nvshmem|cu[A-Z])"
)
NO_DEVICE = 100  # cudaErrorNoDevice and CUDA_ERROR_NO_DEVICE
CPU = "neoverse-n1"
CPUINFO = """processor\t: 0
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1
"""
LAUNCHER = """#!/bin/sh
export PYTHONHOME={folder}/root/usr QEMU_CPU={cpu} OMP_NUM_THREADS=1
exec qemu-aarch64-static -L {folder}/root -E LD_LIBRARY_PATH={folder}/stubs \\
    -E PYTHONPATH="$PYTHONPATH:{folder}/site" -0 "$0" {python} "$@"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    for command, package in COMMANDS.items():
        if shutil.which(command) is None:
            sys.exit(f"{command}: not found; expected Debian or Ubuntu with the package {package}")
    if (folder / "python").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    make_root(folder)
    (python,) = (
        x for x in (folder / "root/usr/bin").glob("python3.*") if re.fullmatch(r"python3\.\d+", x.name)
    )
    install_wheels(folder / "site", python.name.removeprefix("python"))
    make_stubs(folder)
    launcher = folder / "python.part"
    launcher.write_text(LAUNCHER.format(folder=folder, cpu=CPU, python=python))
    launcher.chmod(0o755)
    launcher.replace(folder / "python")  # last: the folder is complete


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def make_root(folder: Path) -> None:
    """Unpacks Debian's packages for arm64; the machine's own packages stay as they are."""
    state, cache, root = folder / "apt", folder / "apt" / "cache", folder / "root"
    for path in (state / "lists" / "partial", cache / "archives" / "partial"):
        path.mkdir(parents=True)
    (state / "status").touch()
    settings = {
        "Dir::State": state, "Dir::State::status": state / "status", "Dir::State::Lists": state / "lists",
        "Dir::Cache": cache, "APT::Architecture": "arm64", "APT::Architectures": "arm64", "APT::Sandbox::User": "",
    }  # fmt: skip
    apt = ["apt-get", "-q", *(x for name, value in settings.items() for x in ("-o", f"{name}={value}"))]
    run(*apt, "update")
    run(*apt, "install", "--yes", "--no-install-recommends", "--download-only", *DEBIAN)
    for package in (cache / "archives").glob("*.deb"):
        run("dpkg-deb", "-x", package, root)
    # QEMU looks for files in the root first: PyTorch reads here what the processor is.
    cpus = root / "sys/devices/system/cpu"
    identification = cpus / "cpu0/regs/identification"
    for path in (root / "proc", identification):
        path.mkdir(parents=True, exist_ok=True)
    (root / "proc/cpuinfo").write_text(CPUINFO)
    (identification / "midr_el1").write_text("0x00000000413fd0c1\n")
    for name in ("possible", "present", "online"):
        (cpus / name).write_text("0\n")


def install_wheels(site: Path, version: str) -> None:
    platforms = [f"manylinux_2_{glibc}_aarch64" for glibc in range(28, 16, -1)] + ["manylinux2014_aarch64"]
    abis = ("cp" + version.replace(".", ""), "abi3", "none")
    pip = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(site),
        "--only-binary=:all:", "--implementation=cp", f"--python-version={version}",
        *(f"--platform={x}" for x in platforms), *(f"--abi={x}" for x in abis),
    ]  # fmt: skip
    constraints = REPOSITORY / "constraints.txt"
    run(*pip, "-c", str(constraints), "--no-deps", "torch")
    run(*pip, "-c", str(constraints), *WHEELS)


def make_stubs(folder: Path) -> None:
    """Libraries with the names of CUDA's. They are empty, and load one that has all functions."""
    stubs, libraries = folder / "stubs", sorted((folder / "site/torch/lib").glob("*.so*"))
    stubs.mkdir()
    undefined = run(f"{PREFIX}nm", "-D", "--undefined-only", *libraries)
    names = {line.split()[-1].split("@")[0] for line in undefined.splitlines() if " U " in line}
    source = stubs / "cuda.s"
    functions = "".join(f".globl {x}\n.type {x},%function\n{x}:\n" for x in sorted(names) if CUDA.match(x))
    source.write_text(f".text\n{functions}mov w0, #{NO_DEVICE}\nret\n")
    gcc = (f"{PREFIX}g++", "-shared", "-nostdlib", "-Wl,--no-as-needed")
    functions_library, empty = stubs / "cuda.so", stubs / "empty.so"
    run(*gcc, f"-Wl,-soname,{functions_library.name}", "-o", functions_library, source)
    run(*gcc, "-o", empty, functions_library)
    needed = re.findall(r"NEEDED.*\[(.*)\]", run(f"{PREFIX}readelf", "-d", *libraries))
    present = {path.name for path in libraries}
    present |= {name for _, _, files in os.walk(folder / "root") for name in files}
    for name in sorted(set(needed) - present):
        (stubs / name).symlink_to(empty.name)


if __name__ == "__main__":
    main()
