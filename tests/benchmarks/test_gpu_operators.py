"""benchmarks/gpu_operators.py without a GPU: what it moves at least, and that it does not time what is wrong."""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_operators
from linrope.ops import convolve

DEVICE = torch.get_default_device().type


def timed(function: Any, device: str, flush: bool) -> dict[str, float]:
    function()
    return {"median_ms": 2.0 if function.func is gpu_operators.gradients else 0.5}


def test_fractions_of_the_floor_are_the_floor_s_time_over_the_measured_one() -> None:
    row = gpu_operators.operators_row((1, 20, 2, 16), DEVICE, torch.float16, 1e6, timed)
    per_move = 20 * 32 * 2 / 1e6 * 1e3
    assert row["conv ms"] == row["norm ms"] == 0.5
    assert row["conv floor"] == pytest.approx(2 * per_move / 0.5)
    assert row["conv grad floor"] == pytest.approx(3 * per_move / 1.5)
    assert row["norm floor"] == pytest.approx(4 * per_move / 0.5)
    assert row["norm grad floor"] == pytest.approx(7 * per_move / 1.5)


def test_wrong_gradients_are_not_timed() -> None:
    def wrong(x: Tensor, weight: Tensor, backend: str) -> Tensor:
        return convolve(x, weight if backend == "eager" else weight.detach() + 0 * weight, backend=backend)

    inputs = {"x": torch.randn(1, 9, 4), "weight": torch.randn(4, 3)}
    gpu_operators.check(inputs, convolve)
    with pytest.raises(AssertionError, match="times the bound"):
        gpu_operators.check(inputs, wrong)
