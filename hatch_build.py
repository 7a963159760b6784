"""Builds the native CPU library into wheels and editable installs; hatchling calls this.

Where there is no C++ compiler, or no PyTorch beside hatchling, the wheel is pure Python, and says why.
"""

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


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
