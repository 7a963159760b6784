"""Builds the native library once, where there is a compiler."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]


def load_build_script():
    spec = importlib.util.spec_from_file_location("linrope_native_build", ROOT / "kernels/cpu/build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def native():
    """torch.ops.linrope_native, of the sources as they are."""
    if sys.platform != "linux" or shutil.which("c++") is None:
        pytest.skip("needs Linux and a C++ compiler")
    script = load_build_script()
    library = script.OUT_DIR / script.LIBRARY
    newest = max(path.stat().st_mtime for path in (ROOT / "kernels/cpu").iterdir())
    if not library.exists() or library.stat().st_mtime < newest:
        library = script.build()
    torch.ops.load_library(str(library))
    return torch.ops.linrope_native
