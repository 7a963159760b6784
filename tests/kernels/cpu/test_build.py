"""The build script: what it refuses, and how it tells a library of other sources apart."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest


@pytest.fixture
def script(build_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with sources of its own."""
    (tmp_path / "kernel.cpp").write_text("int one = 1;\n")
    monkeypatch.setattr(build_script, "SOURCE", tmp_path)
    return build_script


def built(script: ModuleType, folder: Path) -> Path:
    """A file with what the linker writes into the library."""
    library = folder / script.LIBRARY
    library.write_bytes(b"\x7fELF .." + bytes.fromhex(script.digest()) + b"..")
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
    with pytest.raises(script.Unavailable, match="no compiler: found none of no-such-compiler;"):
        script.build(tmp_path, compiler="no-such-compiler")
    assert not library.exists()


def test_without_a_name_it_looks_for_three_compilers(script, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(script.Unavailable, match="found none of c\\+\\+, g\\+\\+, clang\\+\\+"):
        script.build(tmp_path)
    (tmp_path / "clang++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "clang++").chmod(0o755)
    with pytest.raises(RuntimeError, match=r"compiler failed: exit status 1\n.*clang"):
        script.build(tmp_path)
    monkeypatch.setenv("CXX", "clang++ --quiet")  # a command may have arguments, as "ccache g++"
    with pytest.raises(RuntimeError, match=r"clang\+\+ --quiet -std"):
        script.build(tmp_path)


@pytest.mark.parametrize(
    ("folder", "reason"),
    [("/tmp/pip-build-env-1a2b3c/overlay/lib/python3.11/site-packages", "build isolation: .*--no-build-isolation"),
     ("/home/someone/venv/lib/python3.11/site-packages", "no PyTorch: .*install PyTorch first")],
)  # fmt: skip
def test_without_pytorch_it_tells_isolation_from_absence(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, reason: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(sys, "path", [folder])
    with pytest.raises(script.Unavailable, match=reason):
        script.build(tmp_path, compiler=sys.executable)


def test_a_pytorch_without_headers_and_an_unknown_machine_are_named(script, tmp_path, monkeypatch) -> None:
    installed = SimpleNamespace(origin=str(tmp_path / "torch" / "__init__.py"))
    with monkeypatch.context() as patched:
        patched.setattr(script.importlib.util, "find_spec", lambda name: installed)
        with pytest.raises(script.Unavailable, match=r"no PyTorch headers: .*torch has none"):
            script.build(tmp_path, compiler=sys.executable)
    monkeypatch.setattr(script.platform, "machine", lambda: "riscv64")
    with pytest.raises(script.Unavailable, match="riscv64"):
        script.build(tmp_path, compiler=sys.executable)


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
    said = "native CPU library: not built: no compiler: found none of no-such-compiler;"
    assert done.stderr.startswith(said)
