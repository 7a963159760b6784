"""Builds the source distribution and the wheels of all platforms, and prints what each wheel was tested with here.

    python wheels.py OUT_DIR        about 10 minutes on two cores

Every library is read: it may import nothing but the system's C libraries, and export only its own functions. PyTorch's
own wheels for macOS and Windows must have the functions that it looks for; they are downloaded and not installed. The
libraries then run in the program alone.cpp: on this machine, in QEMU and in Wine, as far as these are installed.
"""

import argparse
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import lief

from tests.kernels.cpu import other_machines

ROOT = Path(__file__).resolve().parents[3]
ALLOWED = re.compile(  # what every system of the wheel's tag has
    r"lib(c|m|dl|pthread|rt)\.so\.\d|ld-linux-[\w-]+\.so\.\d|/usr/lib/libSystem\.B\.dylib|@rpath/liblinrope_native\.dylib"
    r"|(KERNEL32|ntdll|USER32|ADVAPI32|bcrypt|api-ms-win-crt-[\w-]+)\.dll",
    re.IGNORECASE,
)
GLIBC = (2, 28)
# PyTorch's library in its oldest wheel that linrope takes, by the end of the tag of both wheels
PYTORCH = {"macosx_11_0_arm64": "torch/lib/libtorch_cpu.dylib", "win_amd64": "torch/lib/torch_cpu.dll"}
OLDEST = "2.11.0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out_dir", type=Path)
    out_dir = parser.parse_args().out_dir.resolve()
    hatch(out_dir, "sdist")
    rows = []
    for target in other_machines.build.PLATFORMS:
        hatch(out_dir, "wheel", target)
        rows.append(tested(target, out_dir))
    print("| wheel | MB | tested |\n|---|---|---|")
    print("\n".join(f"| {name} | {size / 1e6:.1f} | {how} |" for name, size, how in rows))


def hatch(out_dir: Path, kind: str, target: str = "") -> None:
    """Makes an archive, with the library for the target."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out_dir)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "LINROPE_TARGET": target}, check=True)


def tested(target: str, out_dir: Path) -> tuple[str, int, str]:
    """The wheel's tag, its size, and what it was tested with."""
    tag = other_machines.build.PLATFORMS[target][0]
    (wheel,) = out_dir.glob(f"linrope-*-py3-none-{tag}.whl")
    folder = out_dir.parent / "build" / "wheels" / tag
    name = f"linrope/lib/{other_machines.build.library_name(target)}"
    with zipfile.ZipFile(wheel) as archive:
        assert not any("why_pure" in x for x in archive.namelist()), "a pure wheel"
        library = Path(archive.extract(name, folder))
    how = ["its symbols", check_symbols(library)]
    if tag in PYTORCH:
        how.append(check_pytorch(tag, folder))
    ran = other_machines.run(library, target, folder)
    how.append("never run" if ran is None else f"run {ran[0]} on {', '.join(ran[1])}")
    return tag, wheel.stat().st_size, ", ".join(how)


def check_symbols(library: Path) -> str:
    """Checks what the library imports and exports. Returns what it needs from the system, in words."""
    parsed: Any = lief.parse(str(library))
    found = {str(getattr(x, "name", x)) for x in parsed.libraries}
    if unknown := {x for x in found if not ALLOWED.fullmatch(x)}:
        raise SystemExit(f"{library}: imports {', '.join(sorted(unknown))}")
    if not isinstance(parsed, lief.PE.Binary):  # which exports what is declared so
        exported = [x.name.lstrip("_") for x in parsed.exported_functions]
        # Zig cannot hide new and delete on macOS. They are malloc and free, whichever library's are called.
        others = [x for x in exported if not re.match("linrope_|Z(n|d)[wal]|mh_dylib_header$|dso_handle$", x)]
        if others:
            raise SystemExit(f"{library}: exports {', '.join(others[:9])}")
    if not isinstance(parsed, lief.ELF.Binary):
        return f"{len(found)} libraries of the system"
    versions = {
        tuple(map(int, x.split(".")))
        for x in re.findall(r"GLIBC_([\d.]+)\0", library.read_bytes().decode("latin-1"))
    }
    if max(versions) > GLIBC:
        raise SystemExit(f"{library}: needs glibc {max(versions)}")
    return f"glibc {'.'.join(map(str, max(versions)))}"


def check_pytorch(tag: str, folder: Path) -> str:
    """Looks for the functions of pytorch.h in PyTorch's own wheel."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(folder),
    ]
    newer = tag.replace("macosx_11_0", "macosx_14_0")
    places = ["--platform", tag, "--platform", newer, "--python-version", "3.12", "--implementation", "cp"]
    subprocess.run([*command, *places, f"torch=={OLDEST}"], check=True)
    (wheel,) = folder.glob("torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        parsed: Any = lief.parse(archive.extract(PYTORCH[tag], folder))
    exported = {x.name.removeprefix("_") for x in parsed.exported_functions}
    wanted = other_machines.pytorch_functions()
    if missing := [x for x in wanted if x not in exported and f"_{x}" not in exported]:
        raise SystemExit(f"{wheel.name}: has no {', '.join(missing)}")
    return f"all its {len(wanted)} functions are in PyTorch {OLDEST}'s wheel"


if __name__ == "__main__":
    main()
