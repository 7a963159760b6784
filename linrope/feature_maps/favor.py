"""Positive orthogonal random features: an estimate of the softmax kernel."""

import math

from torch import Tensor

from linrope.common.argument_checks import check_numbers
from linrope.feature_maps.base import pad_to_even
from linrope.feature_maps.log_scale import exponential
from linrope.feature_maps.random_features import RandomFeatureMap


class FavorPlus(RandomFeatureMap):
    """FAVOR+: random features whose dot product estimates softmax attention's exp(q.k / sqrt(d)).

        phi(x)_i = exp(w_i . x' - |x'|^2 / 2) / sqrt(M),   x' = x / d^(1/4),   i = 1 .. M

    The w are gaussian, orthogonal in blocks of d. (..., d) -> (..., M), with a zero feature appended if M is
    odd; computed in float32 or wider. log_scale is each token's maximum; public implementations take the
    maximum of all keys, which leaks the future. With kernel_epsilon:

        phi(x)_i = e^s (exp(w_i . x' - |x'|^2 / 2 - s) + kernel_epsilon) / sqrt(M),   s = max of the logits

    kernel_epsilon is added to the stabilized features, whose maximum is 1, as in the public
    implementations, and makes every product positive. (They leave |x'|^2 out of s: a long vector then keeps
    nothing but the epsilon.) Choromanski et al. 2021, arXiv 2009.14794.

    The estimate of softmax attention is good only for small inputs. For gaussian q and k of standard
    deviation c, d = 64 and 512 keys, the outputs have this correlation with softmax attention's:

        c        0.25   0.5    1      2      3
        M = 128  1.00   0.88   0.20   0.02   0.01     (the default)
        M = 1024 1.00   0.98   0.27   0.03   0.01
        M = 4096 1.00   0.99   0.32   0.05   0.02

    So 1024 features are enough where |x'|^2 is about 2, and no affordable number is where it is 8 or more.
    The map then no longer approximates softmax attention, but a model can still be trained with it.

    The projection is a buffer in the state dict, and states of another projection are rejected. Training may
    ``redraw`` it now and then.

    Args:
        head_dim: d.
        num_features: M; default 2 d.
        seed: the seed of the projection; default: drawn from torch's generator.
        kernel_epsilon: added to the stabilized features; public implementations take 1e-6 to 1e-4.

    Raises:
        ValueError: num_features is not positive, or kernel_epsilon is negative or not finite.

    >>> phi = FavorPlus(16, num_features=4096, seed=0)
    >>> q, k = torch.full((2, 1, 16), 0.3)
    >>> (features, scale), (key_features, key_scale) = phi.queries(q), phi.keys(k)
    >>> estimate = (features * key_features).sum() * (scale + key_scale).exp()
    >>> bool((estimate / ((q * k).sum() / 4).exp() - 1).abs() < 0.1)
    True
    """

    positive = True
    log_scaled = True

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        seed: int | None = None,
        kernel_epsilon: float = 0.0,
    ) -> None:
        super().__init__(head_dim, num_features, seed)
        check_numbers(kernel_epsilon=kernel_epsilon)
        if not 0 <= kernel_epsilon < math.inf:
            raise ValueError(f"kernel_epsilon={kernel_epsilon}: expected a finite number >= 0")
        self.kernel_epsilon = float(kernel_epsilon)
        # Formatted here, since torch.compile cannot format a module's floats: it treats them as variables.
        self._epsilon = f", kernel_epsilon={self.kernel_epsilon}" if self.kernel_epsilon else ""

    def queries(self, q: Tensor) -> tuple[Tensor, Tensor]:
        features, log_scale = exponential(self.project(q), self.square(q) / -2)
        if self.kernel_epsilon:
            features = features + self.kernel_epsilon
        return pad_to_even(features), log_scale - math.log(self.num_features) / 2

    def settings(self) -> str:
        return f"{super().settings()}{self._epsilon}"
