"""Performer's generalized kernels: any function of random projections."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from linrope.feature_maps.base import pad_to_even
from linrope.feature_maps.favor import check_epsilon
from linrope.feature_maps.random_features import RandomFeatureMap

# The functions that the paper compares.
KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "abs": torch.abs,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "cos": torch.cos,
    "identity": Tensor.clone,
}
POSITIVE_KERNELS = frozenset({"relu", "abs", "sigmoid", "exp"})


class GeneralizedRandomFeatures(RandomFeatureMap):
    """Generalized attention: a function f of random projections plus a small constant.

        phi(x)_i = (f(w_i . x') + kernel_epsilon) / sqrt(M),   x' = x / d^(1/4),   i = 1 .. M

    The w are gaussian, orthogonal in blocks of d. (..., d) -> (..., M), with a zero feature appended if M is
    odd; computed in float32 or wider. Public implementations leave out 1/sqrt(M). The normalizer cancels it;
    without a normalizer it makes the mean product the same for every M. "exp" overflows for w.x' > 88;
    ``FavorPlus`` does not. Choromanski et al. 2021, arXiv 2009.14794.

    Args:
        head_dim: d.
        num_features: M; default 2 d.
        seed: the seed of the projection; default: drawn from torch's generator.
        kernel: f: "relu", "abs", "sigmoid", "exp", "tanh", "gelu", "cos", "identity", or an elementwise
            function of a tensor. States identify the function by its name, so it may be neither a lambda nor defined
            inside another function.
        kernel_epsilon: default 1e-3, as in public implementations.
        positive: whether f + kernel_epsilon is never negative; the first four kernels are known to be so.

    Raises:
        ValueError: num_features is not positive, kernel is an unknown name, a lambda or defined inside another
            function, or kernel_epsilon is negative or not finite.
        TypeError: kernel is neither a name nor a function with a name.

    >>> phi = GeneralizedRandomFeatures(16, num_features=7, seed=0)
    >>> phi.feature_dim, bool((phi.queries(torch.randn(16))[:7] > 0).all())
    (8, True)
    """

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        seed: int | None = None,
        kernel: str | Callable[[Tensor], Tensor] = "relu",
        kernel_epsilon: float = 1e-3,
        positive: bool = False,
    ) -> None:
        super().__init__(head_dim, num_features, seed)
        if isinstance(kernel, str):
            if kernel not in KERNELS:
                raise ValueError(f"kernel={kernel!r}: expected one of {', '.join(KERNELS)}, or a function")
            self.kernel, name = KERNELS[kernel], kernel
        elif callable(kernel) and hasattr(kernel, "__qualname__"):
            self.kernel, name = kernel, f"{kernel.__module__}.{kernel.__qualname__}"
            if "<" in kernel.__qualname__:  # other lambdas and inner functions have the same name
                raise ValueError(
                    f"kernel: got {name}, expected a function defined with def at the top of a module"
                )
        else:
            raise TypeError(f"kernel: got {type(kernel).__name__}, expected a name or a function")
        self.kernel_epsilon = check_epsilon(kernel_epsilon)
        # Formatted here for torch.compile, as in FavorPlus.
        self._kernel_text = f"kernel={name}, kernel_epsilon={self.kernel_epsilon}"
        self.positive, self.long_keys = positive or kernel in POSITIVE_KERNELS, True

    def queries(self, q: Tensor) -> Tensor:
        return pad_to_even((self.kernel(self.project(q)) + self.kernel_epsilon) * self.num_features**-0.5)

    def settings(self) -> str:
        return f"{super().settings()}, {self._kernel_text}"
