"""What the tests of the operators share: random inputs, gradients, instruction sets, threads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from linrope.backends import native
from tests.oracle import FAST, native_sets

HALF_PRECISION = (torch.bfloat16, torch.float16)
Tensors = dict[str, Tensor | None]

__all__ = [
    "FAST",
    "HALF_PRECISION",
    "Tensors",
    "differentiate",
    "every_set",
    "numbers",
    "relative_error",
    "threads",
]


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


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
