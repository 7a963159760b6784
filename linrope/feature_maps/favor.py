"""Positive orthogonal random features: three estimates of the softmax kernel."""

import math

import torch
from torch import Tensor

from linrope.common.argument_checks import check_numbers
from linrope.feature_maps.base import pad_to_even, widen
from linrope.feature_maps.log_scale import exponential
from linrope.feature_maps.random_features import RandomFeatureMap


def _estimate(logits: Tensor, square: Tensor, kernel_epsilon: float = 0.0) -> tuple[Tensor, Tensor]:
    """exp(logits - square / 2) / sqrt(M) of logits (..., M), with a log_scale, padded to an even number."""
    features, log_scale = exponential(logits, square / -2)
    if kernel_epsilon:
        features = features + kernel_epsilon
    return pad_to_even(features), log_scale - math.log(logits.shape[-1]) / 2


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
    redraw it now and then: ``feature_maps.Redraw``.

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
        self.kernel_epsilon = check_epsilon(kernel_epsilon)
        # Formatted here, since torch.compile cannot format a module's floats: it treats them as variables.
        self._epsilon = f", kernel_epsilon={self.kernel_epsilon}" if self.kernel_epsilon else ""

    def queries(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return _estimate(self.project(q), self.square(q), self.kernel_epsilon)

    def settings(self) -> str:
        return f"{super().settings()}{self._epsilon}"


class FavorHyperbolic(RandomFeatureMap):
    """FAVOR+ that uses each direction both ways: it estimates the same kernel with a lower variance.

        phi(x) = [exp(w_i . x'), exp(-w_i . x')] exp(-|x'|^2 / 2) / sqrt(2M),   i = 1 .. M

    x' and w as in ``FavorPlus``. (..., d) -> (..., 2M), computed in float32 or wider. For independent w the
    variance is 1 - exp(-|x' + y'|^2) times that of FAVOR+ with 2M features, with half the multiplications. log_scale
    is each token's maximum. Choromanski et al. 2021, arXiv 2009.14794, lemma 2.

    Args:
        head_dim: d.
        num_features: 2M; default 2 d.
        seed: the seed of the projection; default: drawn from torch's generator.

    Raises:
        ValueError: num_features is odd or not positive.

    >>> FavorHyperbolic(16, num_features=64, seed=0).projection.shape
    torch.Size([32, 16])
    """

    positive = True
    log_scaled = True
    features_per_row = 2

    def queries(self, q: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.project(q)
        return _estimate(torch.cat((logits, -logits), -1), self.square(q))


class FavorPlusPlus(RandomFeatureMap):
    """FAVOR++: FAVOR+ with directions weighted to suit the size of the inputs.

        phi(x)_i = D exp(A |w_i|^2 + B w_i . x' - |x'|^2 / 2) / sqrt(M),   i = 1 .. M
        B = sqrt(1 - 4A),   D = (1 - 4A)^(d/4),   A = (1 - 1/rho) / 8
        rho = (sqrt((2s + d)^2 + 8 d s) - 2s - d) / (4s),   s = mean of |x' + y'|^2

    x' and w as in ``FavorPlus``, which is the case A = 0. (..., d) -> (..., M), with a zero feature
    appended if M is odd; computed in float32 or wider. log_scale is each token's maximum. Every A <= 0
    gives the same kernel. For independent w and |x' + y'|^2 = s a product has the second moment

        log E[Z^2] = d log((1 + rho) / (2 rho)) + (d/2) log rho + s (1 + rho) - |x'|^2 - |y'|^2

    and the rho above minimizes it. A feature must not depend on other tokens, so s does not follow the data:
    pass it, or call ``fit``. It is in the state dict and in the identity: after a ``fit``, earlier states are
    rejected. Likhosherstov et al. 2022, arXiv 2205.15317.

    Args:
        head_dim: d.
        num_features: M; default 2 d.
        seed: the seed of the projection; default: drawn from torch's generator.
        mean_square: s; default 2 sqrt(d), the value for independent inputs of unit variance.

    Raises:
        ValueError: num_features is not positive, or mean_square is negative or not finite.

    >>> phi = FavorPlusPlus(16, seed=0)
    >>> phi.fit(torch.zeros(1, 5, 2, 16), torch.ones(1, 5, 2, 16))
    >>> phi.mean_square
    4.0
    """

    positive = True
    log_scaled = True

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        seed: int | None = None,
        mean_square: float | None = None,
    ) -> None:
        super().__init__(head_dim, num_features, seed)
        self.mean_square = 2 * head_dim**0.5 if mean_square is None else mean_square

    @property
    def mean_square(self) -> float:
        return self._mean_square

    @mean_square.setter
    def mean_square(self, mean_square: float) -> None:
        check_numbers(mean_square=mean_square)
        if not 0 <= mean_square < math.inf:
            raise ValueError(
                f"mean_square={mean_square}: expected the mean of |x' + y'|^2, a finite number >= 0"
            )
        self._mean_square = float(mean_square)
        self._mean_square_text = (
            f", mean_square={self._mean_square}"  # formatted here for torch.compile, as in FavorPlus
        )

    @property
    def a(self) -> float:
        """A, at most 0."""
        d, s = self.head_dim, self.mean_square
        rho = 2 * d / (math.sqrt((2 * s + d) ** 2 + 8 * d * s) + 2 * s + d)  # does not cancel for small s
        return (1 - 1 / rho) / 8

    def fit(self, q: Tensor, k: Tensor) -> None:
        """Sets ``mean_square`` to the mean of |x' + y'|^2 over all pairs of a query and a key in the same head.

        q is (..., n, h, d) and k (..., m, g, d), as in the call. Earlier states become invalid.

        Raises:
            ValueError: q or k is empty or not finite.
        """
        for name, tensor in (("q", q), ("k", k)):
            if not tensor.numel() or not bool(tensor.isfinite().all()):
                raise ValueError(f"{name}: got an empty or non-finite tensor, expected finite numbers")
        x, y = widen(q.detach()), widen(k.detach())
        squares = x.square().sum(-1).mean() + y.square().sum(-1).mean()
        mean_x, mean_y = x.mean(-3), y.mean(-3).repeat_interleave(q.shape[-2] // k.shape[-2], dim=-2)
        mean = squares + 2 * (mean_x * mean_y).sum(-1).mean()
        self.mean_square = float(mean) * self.head_dim**-0.5

    def queries(self, q: Tensor) -> tuple[Tensor, Tensor]:
        a, logits = self.a, self.project(q)
        offset = a * self.projection.double().square().sum(-1) + self.head_dim / 4 * math.log(1 - 4 * a)
        return _estimate(offset.to(logits.dtype) + (1 - 4 * a) ** 0.5 * logits, self.square(q))

    # 64-bit integers, so that neither a file nor a cast of the module rounds seed or mean_square.
    def get_extra_state(self) -> Tensor:
        mean_square = torch.tensor(self.mean_square, dtype=torch.float64, device="cpu").view(torch.int64)
        return torch.stack((super().get_extra_state(), mean_square))

    def set_extra_state(self, state: Tensor) -> None:
        super().set_extra_state(state[0])
        self.mean_square = float(state[1].view(torch.float64))

    def settings(self) -> str:
        return f"{super().settings()}{self._mean_square_text}"


def check_epsilon(kernel_epsilon: float) -> float:
    check_numbers(kernel_epsilon=kernel_epsilon)
    if not 0 <= kernel_epsilon < math.inf:
        raise ValueError(f"kernel_epsilon={kernel_epsilon}: expected a finite number >= 0")
    return float(kernel_epsilon)
