"""The native library, of the sources as they are; without one its tests are skipped."""

import importlib.util
from pathlib import Path

import pytest
import torch

from linrope.backends import native as backend

SCRIPT = Path(__file__).parents[3] / "kernels" / "cpu" / "build.py"


@pytest.fixture(scope="session")
def build_script():
    """kernels/cpu/build.py, which is part of no package."""
    spec = importlib.util.spec_from_file_location("linrope_native_build", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def native(build_script):
    """torch.ops.linrope_native."""
    if not backend.LIBRARY.is_file():
        pytest.skip(backend.why_not())
    assert build_script.current() is not None, f"{backend.LIBRARY} is of other sources: make native"
    assert backend.why_not() is None, backend.why_not()
    return torch.ops.linrope_native


@pytest.fixture(params=["amx", "v4", "v3", "baseline"])
def isa(request, native):
    """Every test runs on every instruction set that this machine has."""
    if request.param not in native.isas().split(","):
        pytest.skip(f"no {request.param} on this machine")
    native.set_isa(request.param)
    yield request.param
    native.set_isa(native.isas().split(",")[0])  # the best one, as before: other tests compare bits
