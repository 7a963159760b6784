"""What the tests of the operators share: random inputs, gradients, instruction sets, threads."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from linrope_kernels import INTERPRETED
from torch import Tensor

from linrope.backends import native
from tests.oracle import NATIVE, native_sets

FAST = ("eager", NATIVE, "triton")  # for float32, bfloat16, float16
HALF_PRECISION = (torch.bfloat16, torch.float16)
Tensors = dict[str, Tensor | None]

__all__ = [
    "FAST",
    "HALF_PRECISION",
    "Tensors",
    "combinations",
    "differentiate",
    "every_set",
    "numbers",
    "relative_error",
    "skip_bfloat16",
    "threads",
]


def combinations(*axes: Iterable[Any], usual: Callable[..., bool]) -> list[Any]:
    """All backends with all values of the axes. For triton make test has the usual ones, make test-long the others."""
    found = []
    for values in product(*axes):
        label = "-".join(map(str, values))
        found += [pytest.param("eager", *values, id=f"eager-{label}")]
        found += [pytest.param("native", *values, id=f"native-{label}", marks=NATIVE.marks)]
        marks = [] if usual(*values) or not INTERPRETED else [pytest.mark.long]
        found += [pytest.param("triton", *values, id=f"triton-{label}", marks=marks)]
    return found


def numbers(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
    return x.float().to(torch.get_default_device())


def skip_bfloat16(backend: str, dtype: torch.dtype) -> None:
    if backend == "triton" and dtype == torch.bfloat16 and INTERPRETED:
        pytest.skip(
            "Triton's interpreter does not round bfloat16 to nearest; tests/kernels emulates the compiled code"
        )


def differentiate(
    inputs: Tensors, call: Callable[[Tensors], Tensor], dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The result in this dtype, and the gradients of the inputs that are present. All start from the same numbers."""
    first = next(x for x in inputs.values() if x is not None)
    leaves = {
        name: None if x is None else x.detach().to(dtype or x.dtype).requires_grad_()
        for name, x in inputs.items()
    }
    y = call(leaves)
    gradient = numbers(*y.shape, seed=9).to(first.dtype).to(y.dtype)
    present = [x for x in leaves.values() if x is not None]
    return [y.detach(), *torch.autograd.grad(y, present, gradient)]


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """The largest error over the largest exact number."""
    assert actual.shape == exact.shape
    if exact.numel() == 0:
        return 0.0
    return float((actual.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30))


def every_set(backend: str) -> Iterator[str | None]:
    """Runs the loop's body with each of this machine's instruction sets, if the backend is native."""
    best = native.instruction_set()
    try:
        for name in native_sets(backend):
            if name is not None:
                native.use_instruction_set(name)
            yield name
    finally:
        if best is not None:
            native.use_instruction_set(best)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
