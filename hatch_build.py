"""Builds wheels and source distributions: hatchling's build backend, with the native CPU library.

pip calls the functions of this module, and hatchling its hooks. The library is for this machine, or for the one of
kernels/cpu/build.py's PLATFORMS that $LINROPE_TARGET names. If it cannot be built, the wheel is pure Python and holds
the reason in ``linrope/lib/why_pure.txt``, which ``linrope env`` shows.
"""

import importlib.util
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import hatchling.build
from hatchling.build import build_editable, build_sdist, build_wheel, get_requires_for_build_sdist
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]

LINK = re.compile(r"(!?)(\[[^\]]*\])\(([^)#\s]+)(#[^)\s]*)?\)")


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*hatchling.build.get_requires_for_build_wheel(config_settings), *compilers()]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*hatchling.build.get_requires_for_build_editable(config_settings), *compilers()]


def compilers() -> list[str]:
    """The packages that the library's build needs here. Without those that pip cannot get, the wheel is pure."""
    script = load_build_script(Path.cwd())
    needed: list[str] = [script.ZIG] if os.environ.get("LINROPE_TARGET") else script.requirements()
    return [requirement for requirement in needed if not is_out_of_reach(requirement)]


def is_out_of_reach(requirement: str) -> bool:
    """True if pip says that its index lacks the package, or that it cannot reach it."""
    package = re.split("[<>=!~]", requirement)[0]
    # pip hides itself from a build by $PYTHONPATH, which -I ignores.
    command = [sys.executable, "-I", "-m", "pip", "--retries=0", "index", "versions", package]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    return "No matching distribution" in said


def build_library(root: Path, out_dir: Path) -> Path | str:
    """The library, compiled if it is not of these sources, or the reason why it cannot be built.

    One for another machine goes to out_dir: the tree keeps its own.
    """
    script = load_build_script(root)
    try:
        if target := os.environ.get("LINROPE_TARGET"):
            library: Path = script.build(out_dir, target=target)
        else:
            library = script.current() or script.build()
    except RuntimeError as error:
        return str(error)
    return library


def platform_tag(root: Path) -> str:
    """The platform tag in the name of a wheel that holds the library."""
    if target := os.environ.get("LINROPE_TARGET"):
        tag: str = load_build_script(root).PLATFORMS[target][0]
        return tag
    if sys.platform == "darwin":  # Python itself may be for two processors
        return f"macosx_{platform.mac_ver()[0].partition('.')[0]}_0_{platform.machine()}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def load_build_script(root: Path) -> ModuleType:
    """kernels/cpu/build.py, which is part of no package."""
    spec = importlib.util.spec_from_file_location(
        "linrope_native_build", root / "kernels" / "cpu" / "build.py"
    )
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


class NativeLibrary(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self.folder = tempfile.TemporaryDirectory()  # until the wheel is written
        self.app.display_waiting("linrope: building the native CPU backend, which takes one to four minutes")
        library = build_library(Path(self.root), Path(self.folder.name))
        if isinstance(library, str):  # slower, and complete: nothing in it needs the library
            self.app.display_warning(f"linrope: a pure wheel, without the native CPU backend. {library}")
            if version == "standard":  # an editable install has the tree's files only
                why = Path(self.folder.name, "why_pure.txt")
                why.write_text(library.partition("\n")[0] + "\n", encoding="utf-8")
                build_data["force_include"][str(why)] = f"linrope/lib/{why.name}"
            return
        # No part of it depends on the Python that builds it.
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(Path(self.root))}"
        if version == "standard":  # an editable install has the tree's
            build_data["force_include"][str(library)] = f"linrope/lib/{library.name}"
        self.app.display_info(f"linrope: with the native CPU backend: {library}")


def address(root: Path) -> str | None:
    """Of the repository on the web, from git's remote; None: it has none there, or this is no repository."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:  # no git
        return None
    remote = said.strip()
    if "://" not in remote and "@" in remote:  # git@host:path
        remote = "ssh://" + remote.replace(":", "/", 1)
    parts = urlsplit(remote)
    if parts.scheme not in ("https", "http", "ssh") or not parts.hostname:
        return None
    # Without user and password, which may be a token; an ssh server's port is no web server's.
    host = f"{parts.hostname}:{parts.port}" if parts.port and parts.scheme != "ssh" else parts.hostname
    return f"https://{host}{parts.path.rstrip('/').removesuffix('.git')}"


def with_absolute_links(text: str, root: Path, address: str) -> str:
    """README.md for an index, which has no other file of the repository."""

    def absolute(link: re.Match[str]) -> str:
        image, label, path, anchor = link.groups(default="")
        if not (root / path).exists():
            return link[0]
        return f"{image}{label}({address}/{'raw' if image else 'blob'}/HEAD/{path}{anchor})"

    return LINK.sub(absolute, text)


class Metadata(MetadataHookInterface):
    """The version, and the addresses of the repository that this is built from."""

    def update(self, metadata: dict[str, Any]) -> None:
        # A source distribution has these fields already. Its wheels keep its version, or pip refuses them.
        if "version" in metadata:
            return
        root = Path(self.root)
        source = (root / "linrope" / "__init__.py").read_text(encoding="utf-8")
        version = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
        assert version is not None
        metadata["version"] = version[1]
        text = (root / "README.md").read_text(encoding="utf-8")
        if url := address(root):
            metadata["urls"] = {
                "Repository": url,
                "Documentation": f"{url}/blob/HEAD/docs/index.md",
                "Changelog": f"{url}/blob/HEAD/CHANGELOG.md",
                "Issues": f"{url}/issues",
            }
            text = with_absolute_links(text, root, url)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
