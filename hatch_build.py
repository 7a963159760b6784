"""Builds the native CPU library into wheels and editable installs; hatchling calls this.

Where there is no C++ compiler, or no PyTorch beside hatchling, the wheel is pure Python, and says why.
The metadata's addresses are those of the repository that it is built from.
"""

import importlib.util
import re
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)(\[[^\]]*\])\(([^)#\s]+)(#[^)\s]*)?\)")


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
        script = load_build_script(Path(self.root))
        try:
            library = script.current() or script.build()
        except RuntimeError as error:  # slower, and complete: nothing in it needs the library
            self.app.display_warning(f"linrope: a pure wheel, without the native CPU backend. {error}")
            return
        # No part of it depends on the Python that builds it: py3-none, and this machine's platform.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append(
            f"/linrope/lib/{library.name}"
        )  # git ignores it, and so would the wheel
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


class Addresses(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        if "readme" in metadata:  # of a source distribution, where they were written when it was made
            return
        root = Path(self.root)
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
