"""The native library, of the sources as they are; without one its tests are skipped."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from linrope.backends import library
from linrope.backends import native as backend
from tests.kernels.cpu.other_machines import build
from tests.support.contract import instruction_set


@pytest.fixture(scope="session")
def build_script():
    """kernels/cpu/build.py, which is part of no package."""
    return build


collect_ignore = ["wheels.py"]  # make wheels installs what it imports


class Operators:
    """native.forward(..) runs the library's operator of this name."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(library.run, name)


@pytest.fixture(scope="session")
def native(build_script):
    """The library's operators."""
    if not library.LIBRARY.is_file():
        pytest.skip(backend.why_not())
    assert build_script.current() is not None, f"{library.LIBRARY} is of other sources: make native"
    assert backend.why_not() is None, backend.why_not()
    return Operators()


@pytest.fixture(params=backend.instruction_sets() or ["baseline"])
def isa(request, native):
    """Every test runs on every instruction set that this machine has."""
    with instruction_set(request.param):
        yield request.param
