"""Wheels with and without the native library, of a small project with a build script of its own."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import hatch_build

ROOT = Path(__file__).parents[1]

COMMON = """
from pathlib import Path
ZIG, PLATFORMS = "ziglang>=1", {"Windows x86_64": ("win_amd64", "x86_64-windows-gnu")}
OUT_DIR = Path(__file__).parents[2] / "linrope" / "lib"
def requirements():
    return [ZIG]
def current():
    return None
"""
BUILDS = f"""{COMMON}
def build(out_dir=OUT_DIR, target=None):
    library = out_dir / ("linrope_native.dll" if target else "liblinrope_native.so")
    library.parent.mkdir(exist_ok=True)
    library.write_text(target or "a library")
    return library
"""
CANNOT = f"""{COMMON}
def build():
    raise RuntimeError("no compiler: found none of c++\\nand more")
"""
CURRENT = f"""{COMMON}
def current():
    return OUT_DIR / "liblinrope_native.so"
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


def hatch(project: Path, script: str, function: str, **environment: str) -> tuple[Path, str]:
    """The archive that one of the backend's functions makes, and what it says."""
    (project / "kernels" / "cpu" / "build.py").write_text(script)
    command = f"import hatch_build; print(hatch_build.{function}('dist'))"
    how = {"cwd": project, "capture_output": True, "text": True, "env": os.environ | environment}
    done = subprocess.run([sys.executable, "-c", command], **how)
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
    assert wheel.name == "linrope-1.2.3-py3-none-any.whl"
    assert names(wheel) == sorted([*PURE, "linrope/lib/why_pure.txt"])
    assert zipfile.ZipFile(wheel).read("linrope/lib/why_pure.txt") == b"no compiler: found none of c++\n"
    assert "a pure wheel, without the native CPU backend. no compiler: found none of c++ and more" in said
    assert not (project / "linrope" / "lib" / "why_pure.txt").exists()  # the tree may get a library later


def test_a_wheel_for_another_machine_leaves_the_tree_s_library_alone(project: Path) -> None:
    hatch(project, BUILDS, "build_editable")
    wheel, _ = hatch(project, BUILDS, "build_wheel", LINROPE_TARGET="Windows x86_64")
    assert wheel.name == "linrope-1.2.3-py3-none-win_amd64.whl"
    assert names(wheel) == sorted([*PURE, "linrope/lib/linrope_native.dll"])
    assert [path.name for path in (project / "linrope" / "lib").iterdir()] == ["liblinrope_native.so"]


@pytest.mark.parametrize(
    ("answer", "required"),
    [("", ["ziglang>=1"]), ("No module named pip", ["ziglang>=1"]), ("No matching distribution found", [])],
)
def test_a_build_requires_the_compiler_s_package_unless_pip_cannot_get_it(
    project: Path, monkeypatch: pytest.MonkeyPatch, answer: str, required: list[str]
) -> None:
    (project / "kernels" / "cpu" / "build.py").write_text(COMMON)
    monkeypatch.chdir(project)
    asked = SimpleNamespace(stderr=answer)
    monkeypatch.setattr(
        hatch_build.subprocess, "run", lambda command, **how: asked if "index" in command else None
    )
    for function in (hatch_build.get_requires_for_build_wheel, hatch_build.get_requires_for_build_editable):
        assert [x for x in function() if x.startswith("ziglang")] == required


def test_an_editable_install_builds_a_library_into_the_tree_for_later_builds(project: Path) -> None:
    wheel, _ = hatch(project, BUILDS, "build_editable")
    assert (project / "linrope" / "lib" / "liblinrope_native.so").exists()
    assert names(wheel) == ["_linrope.pth"]
    wheel, _ = hatch(project, CURRENT, "build_wheel")
    assert "linrope/lib/liblinrope_native.so" in names(wheel)


def test_the_source_archive_holds_what_builds_the_library_and_the_tools_and_no_library(project: Path) -> None:
    hatch(project, BUILDS, "build_editable")
    # hatchling follows links, and reads no folder twice.
    for ignored in (".cache", ".venv", "build", "runs", "site"):
        (project / ignored).mkdir()
        (project / ignored / "link").symlink_to(project / "linrope")
    archive, _ = hatch(project, BUILDS, "build_sdist")
    top = unpacked(archive, project / "unpacked")
    for name in ("README.md", "hatch_build.py", "kernels/cpu/build.py", "kernels/cpu/kernel.cpp", *PACKAGES):
        assert (top / name).exists(), name
    assert not (top / "linrope" / "lib").exists()


def metadata(wheel: Path) -> str:
    (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    return zipfile.ZipFile(wheel).read(name).decode()


def make_repository(folder: Path, remote: str) -> None:
    for arguments in (["init", "-q"], ["remote", "add", "origin", remote]):
        subprocess.run(["git", *arguments], cwd=folder, check=True)


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
def test_addresses_are_those_of_the_repository(tmp_path: Path, remote: str, expected: str | None) -> None:
    assert hatch_build.address(tmp_path) is None
    make_repository(tmp_path, remote)
    assert hatch_build.address(tmp_path) == expected


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_metadata_and_readme_have_the_repository_s_address_also_without_the_repository(project: Path) -> None:
    (project / "docs").mkdir()
    (project / "docs" / "one.md").touch()
    readme = "[one](docs/one.md#two), ![three](docs/one.md), [0](x), [a](https://a.b/c)"
    (project / "README.md").write_text(readme)
    said = metadata(hatch(project, BUILDS, "build_wheel")[0])
    assert "Project-URL: " not in said
    assert readme in said
    make_repository(project, "https://someone:token@code.example:8443/linrope/")
    said, expected = metadata(hatch(project, BUILDS, "build_wheel")[0]), "https://code.example:8443/linrope"
    assert "token" not in said
    assert f"Project-URL: Repository, {expected}\n" in said
    page, image = f"[one]({expected}/blob/HEAD/docs/one.md#two)", f"![three]({expected}/raw/HEAD/docs/one.md)"
    assert f"{page}, {image}, [0](x), [a](https://a.b/c)" in said
    archive, _ = hatch(project, BUILDS, "build_sdist")
    assert metadata(hatch(unpacked(archive, project / "unpacked"), BUILDS, "build_wheel")[0]) == said
