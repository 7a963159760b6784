"""The numerics contract's yardstick for gradients: the errors of "reference" in the same dtype."""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

BESIDE = 8  # calls near the one at hand
FACTOR = 3  # a backend may be off by as many times the error of "reference",
SHARE = 1e-5  # and by that share of the gradient's largest entry


class Yardstick:
    """The error that the contract allows in a backend's gradients of one call.

    The error of "reference" in one call may be small by luck. Where a backend fails by it, the largest error
    in eight more calls counts, whose q, k and v are up to 1% off.

    Args:
        errors: Gives the errors of "reference" by the gradient's name, in the call whose q, k and v went
            through the function that it gets. The flag is True where the largest of several runs is wanted.
    """

    def __init__(self, errors: Callable[[Callable[[Tensor], Tensor], bool], dict[str, float]]) -> None:
        self._errors = errors
        self.errors = errors(lambda x: x, False)

    @cached_property
    def beside(self) -> dict[str, float]:
        """The largest errors of all these calls."""
        generator = torch.Generator().manual_seed(0)
        worst = self._errors(lambda x: x, True)
        for _ in range(BESIDE):
            errors = self._errors(lambda x: moved(x, generator, 0.01), False)
            worst = {name: max(x, errors[name]) for name, x in worst.items()}
        return worst

    def ratio(self, name: str, error: float, largest: float, besides: float = 0.0) -> float:
        """The error divided by the allowed error, to which ``besides`` is added."""
        found = 0.0
        for errors in ("errors", "beside"):
            reference = getattr(self, errors)[name]
            if not reference < float("inf"):  # float16 overflows
                return 0.0
            found = error / (FACTOR * reference + SHARE * largest + besides + 1e-37)
            if found <= 1:
                break
        return found


def at_eps(den: Tensor, eps: float) -> bool:
    """Whether a normalizer is so near eps that gradients are left out, as docs/numerics.md says.

    Their terms are then as large as 1 / eps, and cancel; where the clamp begins they jump.
    """
    return bool((den < 100 * eps).any())


def moved(x: Tensor, generator: torch.Generator, most: float) -> Tensor:
    """x with each entry off by up to that part of itself."""
    by = most * (2 * torch.rand(x.shape, generator=generator, dtype=torch.float64, device="cpu") - 1)
    return x * (1 + by).to(x)


def largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0
