"""The build script: what it refuses, and how it tells a library of other sources apart."""

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import linrope
from linrope.backends import library
from linrope.backends import native as backend


@pytest.fixture
def script(build_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with sources of its own."""
    (tmp_path / "kernel.cpp").write_text("int one = 1;\n")
    monkeypatch.setattr(build_script, "SOURCE", tmp_path)
    return build_script


def built(script: ModuleType, folder: Path) -> Path:
    """A file with what the compiler writes into the library."""
    library = folder / script.library_name(script.this_platform())
    library.write_bytes(b"\x7fELF .." + script.digest().encode() + b"..")
    return library


def test_a_library_of_these_sources_is_current_until_one_changes(script: ModuleType, tmp_path: Path) -> None:
    assert script.current(tmp_path) is None
    library = built(script, tmp_path)
    assert script.current(tmp_path) == library
    (tmp_path / "kernel.cpp").write_text("int one = 2;\n")
    assert script.current(tmp_path) is None
    (tmp_path / "kernel.cpp").write_text("int one = 1;\n")
    assert script.current(tmp_path) == library
    (tmp_path / "new.h").touch()
    assert script.current(tmp_path) is None


def test_without_a_compiler_it_says_so_and_leaves_no_old_library(script: ModuleType, tmp_path: Path) -> None:
    library = built(script, tmp_path)
    with pytest.raises(script.Unavailable, match="no compiler: found no no-such-compiler, which"):
        script.build(tmp_path, compiler="no-such-compiler")
    assert not library.exists()


def add_compiler(folder: Path, name: str, status: int) -> str:
    """A program that takes C++20 for valid if the status is 0, and says its name."""
    program = folder / name
    program.write_text(f"#!/bin/sh\necho {name} $* >&2; exit {status}\n")
    program.chmod(0o755)
    return str(program)


def test_it_takes_the_first_compiler_of_cxx20_and_ziglang_if_there_is_none(
    script, tmp_path, monkeypatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        script.Unavailable, match=r"found none of c\+\+, g\+\+, clang\+\+ that compiles C\+\+20; "
    ):
        script.find_compiler()
    add_compiler(tmp_path, "c++", 1)  # one of before 2020
    assert script.requirements() == [script.ZIG]
    installed = SimpleNamespace(origin=str(tmp_path / "ziglang" / "__init__.py"))
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: installed)
    zig = "zig.exe" if sys.platform == "win32" else "zig"
    assert script.find_compiler() == [str(tmp_path / "ziglang" / zig), "c++"]
    clang = add_compiler(tmp_path, "clang++", 0)
    assert script.find_compiler() == [clang]
    assert script.requirements() == []
    monkeypatch.setenv("CXX", "clang++ --quiet")  # a command may have arguments, as "ccache g++"
    assert script.find_compiler() == [clang, "--quiet"]


def test_a_platform_without_kernels_is_named(script, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(script.platform, "machine", lambda: "riscv64")
    assert script.requirements() == []
    assert script.current(tmp_path) is None
    with pytest.raises(
        script.Unavailable, match=r"^\w+ riscv64: the kernels are for Linux x86_64, Linux aarch64, "
    ):
        script.build(tmp_path)


def test_a_compiler_that_fails_is_an_error_with_its_words(script: ModuleType, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'In file x:\nx:1: error: one\nx:2: error: two' >&2; exit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(RuntimeError) as error:
        script.build(tmp_path, compiler=str(compiler))
    assert not isinstance(error.value, script.Unavailable)
    assert str(error.value).startswith("compiler failed: x:1: error: one\n")
    assert "x:2: error: two" in str(error.value)


def test_the_command_goes_on_without_a_compiler(build_script: ModuleType, tmp_path: Path) -> None:
    options = ("--compiler", "no-such-compiler", "--if-changed")
    command = [sys.executable, build_script.__file__, str(tmp_path), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    said = "native CPU library: not built: no compiler: found no no-such-compiler,"
    assert done.stderr.startswith(said)


LEVELS = {  # by the names in /proc/cpuinfo; Linux leaves out what it does not let a process use
    "v4": {"avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl"},
    "v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
    "baseline": set(),
}


def supported() -> list[str]:
    """The instruction sets of this machine, by what Linux says."""
    if platform.machine() != "x86_64":
        return ["baseline"]
    (flags, *_) = (x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("flags"))
    return [name for name, level in LEVELS.items() if level <= set(flags.split())]


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")


@on_linux
def test_the_library_reports_the_instruction_sets_of_the_machine(native) -> None:
    assert [name for name in backend.instruction_sets() if name != "amx"] == supported()


@pytest.mark.long
@on_linux
@pytest.mark.parametrize("compiler", ["g++", "clang++", "zig"])
def test_every_compiler_makes_kernels_that_keep_the_bounds(
    build_script, tmp_path: Path, compiler: str
) -> None:
    target = build_script.this_platform() if compiler == "zig" else None
    if build_script.find_zig() is None if target else shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    shutil.copytree(
        Path(linrope.__file__).parent,
        tmp_path / "linrope",
        ignore=shutil.ignore_patterns("lib", "__pycache__"),
    )
    how = {"target": target} if target else {"compiler": compiler}
    build_script.build(tmp_path / "linrope" / "lib", **how)

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "linrope", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert json.loads(run("env", "--json"))["instruction_sets"] == backend.instruction_sets()
    assert "native   cpu     float32" in run("check", "--seconds", "60")


def test_a_library_that_cannot_be_loaded_is_named_with_the_reason(tmp_path: Path) -> None:
    assert library.load(tmp_path / "absent.so") == "not built in this tree: run `make native`"
    (tmp_path / "broken.so").write_text("no library")
    assert str(library.load(tmp_path / "broken.so")).startswith("the native library cannot be loaded: ")
    (other,) = Path(torch.__file__).parent.glob("lib/*torch_cpu.*")
    assert library.load(other) == "the library was built from other sources: run `make native`"


@pytest.mark.usefixtures("native")
def test_an_old_pytorch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_names_in", lambda loaded: ["aoti_torch_get_dim", "torch_of_the_future"])
    why = f"PyTorch {torch.__version__} has no torch_of_the_future; expected PyTorch 2.11 or later"
    assert library.load(library.LIBRARY) == f"the native library cannot be loaded: {why}"
