"""Wheels with and without the native library, of a small project with a build script of its own."""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BUILDS = """
from pathlib import Path
def current():
    return None
def build():
    library = Path(__file__).parents[2] / "linrope" / "lib" / "liblinrope_native.so"
    library.parent.mkdir(exist_ok=True)
    library.write_text("a library")
    return library
"""
CANNOT = """
def current():
    return None
def build():
    raise RuntimeError("no compiler: found none of c++\\nand more")
"""
CURRENT = """
from pathlib import Path
def current():
    return Path(__file__).parents[2] / "linrope" / "lib" / "liblinrope_native.so"
"""
PACKAGES = ("linrope/backends", "kernels/linrope_kernels")
PURE = [f"{x}/__init__.py" for x in ("linrope", "linrope/backends", "linrope_kernels")]  # in every wheel


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", "hatch_build.py", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("README.md", "LICENSE", "kernels/cpu/kernel.cpp", *(f"{x}/__init__.py" for x in PACKAGES)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "linrope" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    return tmp_path


def hatch(project: Path, script: str, function: str) -> tuple[Path, str]:
    """The archive that one of the backend's functions makes, and what it says."""
    (project / "kernels" / "cpu" / "build.py").write_text(script)
    command = f"import hatch_build; print(hatch_build.{function}('dist'))"
    done = subprocess.run([sys.executable, "-c", command], cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return project / "dist" / done.stdout.split()[-1], " ".join((done.stdout + done.stderr).split())


def unpacked(archive: Path, folder: Path) -> Path:
    """The one folder in a source distribution."""
    shutil.unpack_archive(archive, folder, filter="data")
    (top,) = folder.iterdir()
    return top


def names(wheel: Path) -> list[str]:
    return sorted(name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name)


def test_a_wheel_with_the_library_is_of_this_platform_and_any_python(project: Path) -> None:
    wheel, said = hatch(project, BUILDS, "build_wheel")
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name == f"linrope-1.2.3-py3-none-{platform}.whl"
    assert names(wheel) == sorted([*PURE, "linrope/lib/liblinrope_native.so"])
    assert "with the native CPU backend" in said


def test_a_wheel_without_the_library_is_pure_and_says_why(project: Path) -> None:
    library = project / "linrope" / "lib" / "liblinrope_native.so"
    library.parent.mkdir()
    library.write_text("of another day")  # what lies in the tree is no part of it
    wheel, said = hatch(project, CANNOT, "build_wheel")
    assert wheel.name == "linrope-1.2.3+pure.no.compiler-py3-none-any.whl"
    assert "\nVersion: 1.2.3+pure.no.compiler\n" in metadata(wheel)
    assert names(wheel) == sorted([*PURE, "linrope/lib/why_pure.txt"])
    assert zipfile.ZipFile(wheel).read("linrope/lib/why_pure.txt") == b"no compiler: found none of c++\n"
    assert "a pure wheel, without the native CPU backend. no compiler: found none of c++ and more" in said
    assert not (project / "linrope" / "lib" / "why_pure.txt").exists()  # the tree may get a library later


def test_a_pure_wheel_of_a_source_distribution_keeps_its_version(project: Path, tmp_path: Path) -> None:
    archive, _ = hatch(project, CANNOT, "build_sdist")
    assert archive.name == "linrope-1.2.3.tar.gz"
    wheel, _ = hatch(unpacked(archive, tmp_path / "unpacked"), CANNOT, "build_wheel")
    assert wheel.name == "linrope-1.2.3-py3-none-any.whl"
    assert "linrope/lib/why_pure.txt" in names(wheel)


def test_a_pure_editable_install_says_why_in_its_version_alone(project: Path) -> None:
    wheel, _ = hatch(project, CANNOT, "build_editable")
    assert wheel.name == "linrope-1.2.3+pure.no.compiler-py3-none-any.whl"
    assert names(wheel) == ["_linrope.pth"]


def test_an_editable_install_builds_a_library_into_the_tree_for_later_builds(project: Path) -> None:
    wheel, _ = hatch(project, BUILDS, "build_editable")
    assert (project / "linrope" / "lib" / "liblinrope_native.so").exists()
    assert names(wheel) == ["_linrope.pth"]
    wheel, _ = hatch(project, CURRENT, "build_wheel")
    assert "linrope/lib/liblinrope_native.so" in names(wheel)


def test_the_source_archive_holds_what_builds_the_library_and_the_tools_and_no_library(project: Path) -> None:
    hatch(project, BUILDS, "build_editable")
    archive, _ = hatch(project, BUILDS, "build_sdist")
    top = unpacked(archive, project / "unpacked")
    for name in ("README.md", "hatch_build.py", "kernels/cpu/build.py", "kernels/cpu/kernel.cpp", *PACKAGES):
        assert (top / name).exists(), name
    assert not (top / "linrope" / "lib").exists()


def metadata(wheel: Path) -> str:
    (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    return zipfile.ZipFile(wheel).read(name).decode()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize(
    ("remote", "expected"),
    [
        ("https://code.example/someone/linrope.git", "https://code.example/someone/linrope"),
        ("https://someone:token@code.example:8443/linrope/", "https://code.example:8443/linrope"),
        ("git@code.example:someone/linrope.git", "https://code.example/someone/linrope"),
        ("ssh://git@code.example:22/someone/linrope", "https://code.example/someone/linrope"),
        ("/home/someone/linrope", None),
        ("../linrope.git", None),
        ("file:///home/someone/linrope", None),
        ("C:/someone/linrope", None),
    ],
)
def test_addresses_are_those_of_the_repository(project: Path, remote: str, expected: str | None) -> None:
    (project / "docs").mkdir()
    (project / "docs" / "one.md").touch()
    readme = "[one](docs/one.md#two), ![three](docs/one.md), [0](x), [a](https://a.b/c)"
    (project / "README.md").write_text(readme)
    for arguments in (["init", "-q"], ["remote", "add", "origin", remote]):
        subprocess.run(["git", *arguments], cwd=project, check=True)
    said = metadata(hatch(project, BUILDS, "build_wheel")[0])
    assert "token" not in said
    if expected is None:
        assert "Project-URL: " not in said
        assert readme in said
        return
    assert f"Project-URL: Repository, {expected}\n" in said
    page, image = f"[one]({expected}/blob/HEAD/docs/one.md#two)", f"![three]({expected}/raw/HEAD/docs/one.md)"
    assert f"{page}, {image}, [0](x), [a](https://a.b/c)" in said
    archive, _ = hatch(project, BUILDS, "build_sdist")
    assert metadata(hatch(unpacked(archive, project / "unpacked"), BUILDS, "build_wheel")[0]) == said
