"""Helpers for the tests of the operators: random inputs, gradients, comparisons, instruction sets, threads."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linrope.backends import native
from tests.support.oracle import NATIVE, native_sets

BACKENDS = ("eager", NATIVE)
HALF_PRECISION = (torch.bfloat16, torch.float16)
Tensors = dict[str, Tensor | None]
Call = Callable[[Tensors], Tensor]
Run = Callable[..., Tensor]  # of inputs and the name of a backend, the argument backend
(needs_native,) = NATIVE.marks
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def numbers(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
    return x.float().to(torch.get_default_device())


def with_gaps(x: Tensor) -> Tensor:
    """The same numbers with a last stride of 2."""
    return torch.stack((x, torch.zeros_like(x)), -1)[..., 0]


def with_strides_of_0(inputs: Tensors) -> Tensors:
    """The same, but tensors without numbers have the strides that they have in numpy."""
    odd = {
        name: x.new_empty(0).as_strided(x.shape, [0] * x.ndim) for name, x in inputs.items() if x.numel() == 0
    }
    return inputs | odd


def skip_bfloat16(backend: str, dtype: torch.dtype) -> None:
    if backend == "triton" and dtype == torch.bfloat16 and torch.get_default_device().type == "cpu":
        pytest.skip(
            "Triton's interpreter does not round bfloat16 to nearest; the emulator runs the compiled code"
        )


def _leaves(inputs: Tensors, dtype: torch.dtype | None) -> tuple[Tensors, list[Tensor]]:
    """Copies of the inputs that require gradients, by name; and those that are not None."""
    copies = {name: None if x is None else x.detach().to(dtype or x.dtype) for name, x in inputs.items()}
    return copies, [x.requires_grad_() for x in copies.values() if x is not None]


def differentiate(inputs: Tensors, call: Call, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The result in this dtype, and the gradients of the inputs that are present. All start from the same numbers."""
    first = next(x for x in inputs.values() if x is not None)
    copies, leaves = _leaves(inputs, dtype)
    y = call(copies)
    gradient = numbers(*y.shape, seed=9).to(first.dtype).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, gradient)]


def differentiate_twice(inputs: Tensors, call: Call, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The gradients of the sum of all squares of the gradients of the sum of all squares."""
    copies, leaves = _leaves(inputs, dtype)
    first = torch.autograd.grad(call(copies).square().sum(), leaves, create_graph=True)
    return list(torch.autograd.grad(sum(x.square().sum() for x in first), leaves))


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


def assert_exact(inputs: Tensors, run: Run, definition: Call, backend: str) -> None:
    """The result and all gradients, on each instruction set, are those of the definition in float64."""
    exact = differentiate(inputs, definition, torch.float64)
    for _ in every_set(backend):
        for actual, expected in zip(differentiate(inputs, partial(run, backend=backend)), exact, strict=True):
            assert relative_error(actual, expected) < 2e-6


def assert_twice_differentiable(inputs: Tensors, definition: Call) -> None:
    leaves = [x.double().requires_grad_() for x in inputs.values() if x is not None]

    def call(*leaves: Tensor) -> Tensor:
        return definition(dict(zip(inputs, leaves)))

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


def assert_gradients_of_gradients(inputs: Tensors, run: Run, backend: str, tolerance: float) -> None:
    exact = differentiate_twice(inputs, partial(run, backend="eager"), torch.float64)
    for a, b in zip(differentiate_twice(inputs, partial(run, backend=backend)), exact, strict=True):
        assert relative_error(a, b) < tolerance


def assert_sums_gradients_of_a_tensor_passed_twice(x: Tensor, run: Run, backend: str) -> None:
    x, p, q = (x.clone().requires_grad_() for _ in range(3))
    (both,) = torch.autograd.grad(run(x, x, backend=backend).square().sum(), x)
    assert_close(both, sum(torch.autograd.grad(run(p, q, backend="eager").square().sum(), (p, q))))


def assert_same_bits_on_any_number_of_threads(inputs: Tensors, call: Call) -> None:
    results = []
    for count in (1, 2, 3, 2):
        torch.set_num_threads(count)
        results.append(differentiate(inputs, call))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
