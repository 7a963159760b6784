"""The build script: what it refuses, and how it tells a library of other sources apart."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

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
    library = built(script, tmp_path)
    assert script.current(tmp_path) == library
    (tmp_path / "kernel.cpp").write_text("int one = 2;\n")
    assert script.current(tmp_path) is None
    (tmp_path / "kernel.cpp").write_text("int one = 1;\n")
    assert script.current(tmp_path) == library
    (tmp_path / "new.h").touch()
    assert script.current(tmp_path) is None


def test_where_there_is_no_library_none_is_current(script: ModuleType, tmp_path: Path) -> None:
    assert script.current(tmp_path) is None


def test_without_a_compiler_it_says_so_and_leaves_no_old_library(script: ModuleType, tmp_path: Path) -> None:
    library = built(script, tmp_path)
    with pytest.raises(script.Unavailable, match="no C\\+\\+ compiler 'no-such-compiler'"):
        script.build(tmp_path, compiler="no-such-compiler")
    assert not library.exists()


def test_an_unknown_machine_is_named(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.platform, "machine", lambda: "riscv64")
    with pytest.raises(script.Unavailable, match="riscv64"):
        script.build(tmp_path, compiler=sys.executable)


def test_a_compiler_that_fails_is_an_error_with_its_words(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="failed") as error:
        script.build(tmp_path, compiler="false")
    assert not isinstance(error.value, script.Unavailable)


def test_the_command_goes_on_without_a_compiler(build_script: ModuleType, tmp_path: Path) -> None:
    command = [
        sys.executable,
        build_script.__file__,
        str(tmp_path),
        "--compiler",
        "no-such-compiler",
        "--if-changed",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == "native CPU library: no C++ compiler 'no-such-compiler': not built\n"
