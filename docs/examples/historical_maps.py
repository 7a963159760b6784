"""Feature maps that the literature compares with, as subclasses of FeatureMap. ``feature_map=`` takes their objects.

Random maps have gaussian directions w_i, orthogonal in blocks of d, as in ``FavorPlus``, and x' = x / d^(1/4).

    python docs/examples/historical_maps.py
"""

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from linrope import LinearRoPEAttention, linear_rope_attention
from linrope.feature_maps import FeatureMap
from linrope.feature_maps.base import pad_to_even, widen
from linrope.feature_maps.log_scale import exponential
from linrope.feature_maps.random_features import RandomFeatureMap
from linrope.rotation.angles import cos_sin


class FavorHyperbolic(RandomFeatureMap):
    """FAVOR+ that uses each direction both ways. Choromanski et al. 2021, arXiv 2009.14794, lemma 2.

        phi(x) = [exp(w_i . x'), exp(-w_i . x')] exp(-|x'|^2 / 2) / sqrt(2M),   i = 1 .. M

    For independent w the variance is 1 - exp(-|x' + y'|^2) times that of FAVOR+ with 2M features.
    """

    positive = log_scaled = True

    def __init__(self, head_dim: int, directions: int, seed: int | None = None) -> None:
        super().__init__(head_dim, directions, seed)
        self.feature_dim = 2 * directions

    def queries(self, q: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.project(q)
        features, log_scale = exponential(torch.cat((logits, -logits), -1), self.square(q) / -2)
        return features, log_scale - math.log(self.feature_dim) / 2


class FavorPlusPlus(RandomFeatureMap):
    """FAVOR+ with directions weighted to suit the size of the inputs. Likhosherstov et al. 2022, arXiv 2205.15317.

        phi(x)_i = D exp(A |w_i|^2 + B w_i . x' - |x'|^2 / 2) / sqrt(M),   i = 1 .. M
        B = sqrt(1 - 4A),   D = (1 - 4A)^(d/4),   A = (1 - 1/rho) / 8
        rho = (sqrt((2s + d)^2 + 8 d s) - 2s - d) / (4s),   s = mean of |x' + y'|^2

    For independent w and |x' + y'|^2 = s, this rho minimizes the second moment of a product:

        log E[Z^2] = d log((1 + rho) / (2 rho)) + (d/2) log rho + s (1 + rho) - |x'|^2 - |y'|^2

    mean_square: s. A feature must not depend on other tokens, so s does not follow the data. Default: its value for
    independent inputs of unit variance.
    """

    positive = log_scaled = True

    def __init__(
        self, head_dim: int, num_features: int, seed: int | None = None, mean_square: float | None = None
    ) -> None:
        super().__init__(head_dim, num_features, seed)
        d, s = head_dim, 2 * head_dim**0.5 if mean_square is None else mean_square
        rho = 2 * d / (math.sqrt((2 * s + d) ** 2 + 8 * d * s) + 2 * s + d)  # does not cancel for small s
        self.a, self.name = (1 - 1 / rho) / 8, f"mean_square={s}"

    def queries(self, q: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.project(q)
        offset = self.a * self.projection.double().square().sum(-1)
        offset += self.head_dim / 4 * math.log(1 - 4 * self.a)
        logits = offset.to(logits.dtype) + (1 - 4 * self.a) ** 0.5 * logits
        features, log_scale = exponential(logits, self.square(q) / -2)
        return pad_to_even(features), log_scale - math.log(self.num_features) / 2

    def settings(self) -> str:
        return f"{super().settings()}, {self.name}"


class GeneralizedRandomFeatures(RandomFeatureMap):
    """Performer's generalized attention: any function f of random projections. arXiv 2009.14794.

        phi(x)_i = (f(w_i . x') + kernel_epsilon) / sqrt(M),   i = 1 .. M

    positive: whether f + kernel_epsilon is never negative. Public implementations leave out 1/sqrt(M), which the
    normalizer cancels.
    """

    long_keys = True

    def __init__(
        self,
        head_dim: int,
        num_features: int,
        seed: int | None = None,
        kernel: Callable[[Tensor], Tensor] = torch.relu,
        kernel_epsilon: float = 1e-3,
        positive: bool = True,
    ) -> None:
        super().__init__(head_dim, num_features, seed)
        self.kernel, self.kernel_epsilon, self.positive = kernel, kernel_epsilon, positive
        self.name = f"kernel={kernel.__name__}, kernel_epsilon={kernel_epsilon}"

    def queries(self, q: Tensor) -> Tensor:
        return pad_to_even((self.kernel(self.project(q)) + self.kernel_epsilon) * self.num_features**-0.5)

    def settings(self) -> str:  # a state's identity has it
        return f"{super().settings()}, {self.name}"


class RandomFourier(RandomFeatureMap):
    """Random Fourier features, which estimate the gaussian kernel. Peng et al. 2021 (RFA), arXiv 2103.02143.

        phi(x) = [sin(w_i . x'), cos(w_i . x')] / sqrt(M),   E <phi(x), phi(y)> = exp(-|x' - y'|^2 / 2)

    The features are signed and require normalize=False.
    """

    positive = False

    def __init__(self, head_dim: int, directions: int, seed: int | None = None) -> None:
        super().__init__(head_dim, directions, seed)
        self.feature_dim = 2 * directions

    def queries(self, q: Tensor) -> Tensor:
        logits = self.project(q)
        return torch.cat((logits.sin(), logits.cos()), -1) * self.num_features**-0.5


class DPFP(FeatureMap):
    """Deterministic parameter-free projection. Schlag et al. 2021, arXiv 2102.11174.

        r = [relu(x), relu(-x)],   phi(x) = psi(x) = [r_i r_(i+j)],   i = 1 .. 2d cyclic, j = 1 .. nu

    At most nu (d + 1) features are nonzero, and vectors of different signs share few of them.
    """

    positive = long_keys = True

    def __init__(self, head_dim: int, nu: int = 3) -> None:
        super().__init__()
        self.head_dim, self.nu, self.feature_dim = head_dim, nu, 2 * head_dim * nu

    def queries(self, q: Tensor) -> Tensor:
        x = widen(q)
        r = torch.cat((x, -x), -1).relu()
        return torch.cat([r * r.roll(-j, -1) for j in range(1, self.nu + 1)], -1)

    def keys(self, k: Tensor) -> Tensor:
        return self.queries(k)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, nu={self.nu}"


def cosformer(x: Tensor, positions: Tensor, length: int) -> Tensor:
    """Rectified units whose product falls with the distance, to 0 at length L. Qin et al. 2022, arXiv 2202.08791.

        phi(x, i) = psi(x, i) = [relu(x) cos(pi i / 2L), relu(x) sin(pi i / 2L)]
        <phi(q, i), psi(k, j)> = relu(q).relu(k) cos(pi (i - j) / 2L) >= 0   for 0 <= i, j < L

    x (b, n, h, d), positions (n,) -> (b, n, h, 2d). Since it depends on positions it is no FeatureMap:
    ``linear_rope_attention`` takes its results with feature_map=None.
    """
    x = widen(x).relu()
    cos, sin = cos_sin(positions[:, None, None].double() * (math.pi / 2 / length), x.dtype)
    return torch.cat((x * cos, x * sin), -1)


def redraw(model: nn.Module) -> None:
    """Redraws all random maps of a model, as the training of Performers does every 1,000 steps or so.

    The old map seeds the new projection, so that all processes of a distributed run draw the same one. States from
    before are rejected after it.
    """
    for module in model.modules():
        if isinstance(module, RandomFeatureMap):
            digest = hashlib.blake2b(module.identity.encode(), digest_size=7).digest()
            module.redraw(int.from_bytes(digest, "big"))


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 100, 64)
    maps = [FavorHyperbolic(16, 64), FavorPlusPlus(16, 128), GeneralizedRandomFeatures(16, 128)]
    for fmap in (*maps, RandomFourier(16, 64), DPFP(16)):
        layer = LinearRoPEAttention(64, 4, feature_map=fmap, normalize=fmap.positive)
        whole, (first, state) = layer(x), layer(x[:, :60], return_state=True)
        pieces = torch.cat((first, layer(x[:, 60:], state=state)), 1)
        print(f"{type(fmap).__name__}: two pieces are one call, to {(pieces - whole).abs().max():.0e}")
    q, k, v = torch.randn(3, 1, 100, 4, 16)
    q, k = (cosformer(x, torch.arange(100), length=200) for x in (q, k))
    print("cosformer:", tuple(linear_rope_attention(q, k, v, feature_map=None).shape))


if __name__ == "__main__":
    main()
