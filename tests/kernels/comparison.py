"""What tests of the kernels share: all results of a call against those of the float64 oracle."""

from typing import Any

import pytest
import torch
from linrope_kernels import INTERPRETED
from torch import Tensor

from linrope import LinearAttentionState
from tests.oracle import everything

TOLERANCE = {torch.float32: 16 * 2.0**-23, torch.float16: 4 * 2.0**-10}
if not INTERPRETED:  # the interpreter multiplies bfloat16's bit patterns
    TOLERANCE[torch.bfloat16] = 4 * 2.0**-7
long_here = [pytest.mark.long] if INTERPRETED else []  # a second or two each in the interpreter
every_dtype = pytest.mark.parametrize(
    "dtype",
    [pytest.param(x, marks=long_here if x == torch.float16 else []) for x in TOLERANCE],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
marks = [
    pytest.mark.usefixtures("poison"),
    # exp(x) is formed for all x in elu(x) + 1, also where x + 1 is taken; NumPy would warn.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]


def compare(q: Tensor, k: Tensor, v: Tensor, state: LinearAttentionState | None = None, **how: Any) -> None:
    """Output, last state and gradients; errors are measured by each tensor's largest entry, or by 1."""
    actual = everything(q, k, v, state, backend="triton", **how)
    oracle = everything(*(x.double() for x in (q, k, v)), state, backend="reference", **how)
    for name, expected in oracle.items():
        assert actual[name].shape == expected.shape
        if expected.numel():
            error = (actual[name].double() - expected).abs().max()
            assert error <= TOLERANCE[q.dtype] * expected.abs().max().clamp(min=1), f"{name}: {error}"
