"""A mode that a test sets does not reach the next test, even if the test fails."""

import pytest
import torch

from linrope.backends import native
from tests.support.modes import MODES, kept_modes

OTHERS = {
    "deterministic algorithms": True,
    "default dtype": torch.float64,
    "gradients": False,
    "precision of float32 products": "medium",
    "threads": 3,
    "instruction set": "baseline",
    "waiting for the GPU": 1,
}


@pytest.mark.parametrize("name", MODES)
def test_a_mode_is_restored_after_a_failure(name: str) -> None:
    read, write = MODES[name]
    before = read()
    if name == "instruction set" and len(native.instruction_sets()) == 1:
        pytest.skip("this machine has one instruction set")

    def fails() -> None:
        write(OTHERS[name])
        assert read() != before
        raise RuntimeError("failed")

    with pytest.raises(RuntimeError, match="failed"), kept_modes():
        fails()
    assert read() == before


def test_every_test_runs_inside(request: pytest.FixtureRequest) -> None:
    assert "_modes" in request.fixturenames
