"""Installation by README's own lines: it ends with the CPU kernels, or says why there are none."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
TREE = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore", "linrope", "kernels")
WHEEL = "docs/backends.md"  # the page whose lines build a wheel
PYTORCH = 'pip install "torch>=2.11"'


def blocks(page: str) -> list[list[str]]:
    """The commands of each ```sh block of a page, without comments."""
    found = re.findall(r"^```sh\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [[line.partition("  #")[0].strip() for line in block.splitlines()] for block in found]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout in which nothing was built yet."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in TREE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "lib"))
        else:
            shutil.copy(ROOT / name, folder)
    return folder


def run(command: str | list[str], folder: Path, **environment: str) -> str:
    """Runs the command without the variables that lead to this tree, and returns what it printed."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CXX")}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=folder, env=kept | environment, shell=isinstance(command, str), **how)
    assert done.returncode == 0, done.stdout
    return done.stdout


def show_versions(folder: Path, *paths: Path) -> str:
    """Returns what show_versions() prints in a new process that imports linrope from one of these folders."""
    command = [sys.executable, "-c", "import linrope; linrope.show_versions()"]
    return run(command, folder, PYTHONPATH=os.pathsep.join(map(str, paths)))


def test_readme_and_first_page_install_pytorch_and_linrope() -> None:
    (install,), (wheel,) = blocks("README.md"), blocks(WHEEL)
    assert install == [PYTORCH, 'pip install ".[cli,huggingface]"', "linrope env"]
    assert wheel[0].startswith("pip wheel ")
    assert blocks("docs/index.md") == [install]


def test_a_pure_build_says_why_in_env(tree: Path, tmp_path: Path) -> None:
    pytest.importorskip("pip")
    pytest.importorskip("hatchling")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys\nsys.modules['ziglang'] = None\n")
    command = [*blocks(WHEEL)[0][0].split(), "--no-build-isolation"]
    said = run(
        [sys.executable, "-m", *command], tree, PATH=str(hidden), PYTHONPATH=str(hidden)
    )  # finds no compiler
    (wheel,) = (tree / "dist").iterdir()
    assert wheel.name == f"linrope-{version()}-py3-none-any.whl"
    assert f"filename={wheel.name} " in said
    installed = tmp_path / "installed"
    run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(installed), str(wheel)],
        tmp_path,
    )
    said = show_versions(tmp_path, installed)
    assert f"linrope           {version()}\n" in said
    why = "no compiler: found none of c++, g++, clang++ that compiles C++20; "
    assert f"backend native    no: a build without the compiled kernels ({why}" in said


def test_a_tree_in_which_nothing_was_built_names_the_command_that_builds(tree: Path, tmp_path: Path) -> None:
    call = """
import torch, linrope
linrope.show_versions()
x = torch.ones(1, 5, 2, 8)
linrope.linear_rope_attention(x, x, x)
linrope.LinearRoPEAttention.block(8, 2)(torch.ones(1, 5, 8))
try:
    linrope.linear_rope_attention(x, x, x, backend="native")
except RuntimeError as error:
    print(error)
"""
    said = run(
        [sys.executable, "-c", call], tmp_path, PYTHONPATH=os.pathsep.join(map(str, (tree, tree / "kernels")))
    )
    assert "backend native    no: not built in this tree: run `make native`\n" in said
    assert said.count("RuntimeWarning: linrope's kernels (backend 'native') cannot run") == 1
    assert "\nbackend='native' cannot run: not built in this tree: run `make native`\n" in said


COMPILERS = re.compile(r"([\w-]*-)?(c\+\+|g\+\+|gcc|cc|clang|clang\+\+|c89|c99|cpp)(-[\d.]+)?|c\+\+.*")


def without_compilers(folder: Path) -> str:
    """A PATH with all programs of this machine but its compilers."""
    folder.mkdir()
    for path in os.environ["PATH"].split(os.pathsep):
        for program in Path(path).iterdir() if Path(path).is_dir() else ():
            if not COMPILERS.fullmatch(program.name) and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    return str(folder)


@pytest.mark.long
@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch needs CUDA's packages beside it")
@pytest.mark.parametrize("compiler", [True, False], ids=["with a compiler", "without a compiler"])
def test_the_readmes_lines_end_with_the_kernels(tree: Path, tmp_path: Path, compiler: bool) -> None:
    """In an empty environment, but for PyTorch, which is this one's."""
    environment = empty_environment_with_pytorch(tmp_path)
    if compiler and shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    if not compiler:
        environment["PATH"] = (
            f"{tmp_path / 'venv' / 'bin'}{os.pathsep}{without_compilers(tmp_path / 'programs')}"
        )
        assert shutil.which("c++", path=environment["PATH"]) is None
    install, wheel = ("\n".join(["set -e", *block]) for block in blocks("README.md") + blocks(WHEEL))
    said = run(install, tree, **environment)
    assert f"Created wheel for linrope: filename=linrope-{version()}-py3-none-linux" in said
    assert "backend native    yes\n" in said

    # The tree has the library already; pip would skip a wheel of the version that is installed.
    said = run(f"pip uninstall -qy linrope\n{wheel}\nlinrope env", tree, **environment)
    assert f"\nSuccessfully installed linrope-{version()}\n" in said
    assert "backend native    yes\n" in said


def version() -> str:
    source = (ROOT / "linrope" / "__init__.py").read_text("utf-8")
    return re.findall('^__version__ = "(.*)"$', source, re.MULTILINE)[0]


def empty_environment_with_pytorch(folder: Path) -> dict[str, str]:
    """The variables of a shell in a new virtual environment, to which PyTorch alone was added."""
    venv, packages = folder / "venv", folder / "packages"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    packages.mkdir()
    distribution = importlib.metadata.distribution("torch")
    for name in {file.parts[0] for file in distribution.files or [] if file.parts[0] != ".."}:
        (packages / name).symlink_to(distribution.locate_file(name))
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "pytorch.pth").write_text(f"{packages}\n")
    pinned = (ROOT / "constraints.txt").read_text("utf-8")
    constraints = folder / "constraints.txt"
    constraints.write_text(re.sub("(?m)^torch==.*", f"torch=={distribution.version}", pinned))
    path = f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
    zig = str(ROOT / "build" / "zig")  # keeps Zig's C++ library, which takes minutes to compile
    caches = {"ZIG_GLOBAL_CACHE_DIR": zig, "ZIG_LOCAL_CACHE_DIR": zig}
    return {"PATH": path, "PIP_CONSTRAINT": str(constraints)} | caches


def test_the_makefile_names_files_that_exist() -> None:
    path = r"(?<![\w/$)])((?:tests|benchmarks|docs|kernels)/[\w/]+(?:\.py|\.txt)?)"
    named = re.findall(path, (ROOT / "Makefile").read_text())
    assert "tests/layer/test_attention.py" in named
    assert not [path for path in named if not (ROOT / path).exists()]


INTERPRETER = """#!/bin/sh
case "$*" in "-m venv --clear "*) rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python";; esac
"""  # as far as make needs one to set up an environment


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_leaves_an_environment_alone_that_it_did_not_make(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "hatch_build.py"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python"
    python.write_text(INTERPRETER)
    python.chmod(0o755)

    def make(target: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "-s", target, f"PYTHON={python}", *options]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    mine = tmp_path / ".venv" / "mine"
    mine.parent.mkdir()
    mine.touch()
    done = make(".venv/ready")
    assert done.returncode != 0
    assert ".venv exists, and make did not make it: rename it, or name another folder" in done.stderr
    assert mine.exists()
    assert make("build/venv/ready", "VENV=build/venv").returncode == 0
    assert (tmp_path / "build" / "venv" / "ready").exists()

    mine.unlink()
    mine.parent.rmdir()
    assert make(".venv/ready").returncode == 0
    (tmp_path / ".venv" / "ready").unlink()  # as after an installation that failed
    mine.touch()
    assert make(".venv/ready").returncode == 0
    assert not mine.exists()  # made anew
    (tmp_path / ".venv" / "made-by-make").unlink()  # of a checkout that is older than this mark
    os.utime(tmp_path / ".venv" / "ready", (0, 0))
    assert make(".venv/ready").returncode == 0
