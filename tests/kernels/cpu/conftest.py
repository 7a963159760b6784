"""Builds the native library once, where there is a compiler."""

import importlib.util
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
    script = load_build_script()
    try:
        library = script.current() or script.build()
    except script.Unavailable as error:
        pytest.skip(str(error))
    torch.ops.load_library(str(library))
    return torch.ops.linrope_native
