"""Builds wheels and source distributions: hatchling's build backend, with the native CPU library.

pip calls the functions of this module, and hatchling its hooks. If the library cannot be built, the wheel is
pure Python and holds the reason in ``linrope/lib/why_pure.txt``. pip hides what a build prints, but shows the
wheel's version in its last line: that of a pure wheel names the reason too, as in 0.2.0+pure.no.compiler.
"""

import importlib.util
import os
import re
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import hatchling.build
from hatchling.build import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

# Without hatchling's prepare_metadata_for_build_wheel: the version is known only once the library is built.
__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]

WHY_PURE = "LINROPE_WHY_PURE"  # an environment variable, by which the hooks below get the reason
LINK = re.compile(r"(!?)(\[[^\]]*\])\(([^)#\s]+)(#[^)\s]*)?\)")


def build_wheel(directory: str, config_settings: object = None, metadata_directory: object = None) -> str:
    build_library_first()
    return hatchling.build.build_wheel(directory)


def build_editable(directory: str, config_settings: object = None, metadata_directory: object = None) -> str:
    build_library_first()
    return hatchling.build.build_editable(directory)


def build_library_first() -> None:
    """Before hatchling asks for the version, which depends on the outcome."""
    os.environ.pop(WHY_PURE, None)
    library = build_library(Path.cwd())
    if isinstance(library, str):
        os.environ[WHY_PURE] = library


def build_library(root: Path) -> Path | str:
    """The library, compiled if it is not of these sources, or the reason why it cannot be built."""
    if reason := os.environ.get(WHY_PURE):
        return reason
    script = load_build_script(root)
    try:
        library: Path = script.current() or script.build()
    except RuntimeError as error:
        return str(error)
    return library


def label(reason: str) -> str:
    """The local part of a pure wheel's version: "no compiler: .." gives "+pure.no.compiler"."""
    return "+pure." + ".".join(re.findall("[a-z0-9]+", reason.partition(":")[0].lower()))


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
        library = build_library(Path(self.root))
        if isinstance(library, str):  # slower, and complete: nothing in it needs the library
            self.app.display_warning(f"linrope: a pure wheel, without the native CPU backend. {library}")
            if version == "standard":  # an editable install has the tree's files only
                self.reason = tempfile.TemporaryDirectory()
                file = Path(self.reason.name) / "why_pure.txt"
                file.write_text(library.partition("\n")[0] + "\n", encoding="utf-8")
                build_data["force_include"][str(file)] = f"linrope/lib/{file.name}"
            return
        # No part of it depends on the Python that builds it: py3-none, and this machine's platform.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        # Git ignores the library, so the wheel would leave it out too.
        build_data["artifacts"].append(f"/linrope/lib/{library.name}")
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
        metadata["version"] = version[1] + (label(why) if (why := os.environ.get(WHY_PURE)) else "")
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
