"""Positive orthogonal random features (Performer)."""

import torch
from torch import Tensor

from linrope.feature_maps.base import FeatureMap


class FavorPlus(FeatureMap):
    """FAVOR+: random features whose dot product estimates softmax attention's exp(q.k / sqrt(d)).

        phi(x)_i = exp(w_i . x' - |x'|^2 / 2) / sqrt(M),   x' = x / d^(1/4),   i = 1 .. M

    w: gaussian, orthogonal in blocks of d. (..., d) -> (..., M), computed in float32 or wider.
    Choromanski et al. 2021, arXiv 2009.14794, without the maximum over the sequence that its public
    codes subtract: that one leaks the future, and is not needed, since w.x' - |x'|^2/2 <= |w|^2/2.

    The projection is a buffer in the state dict, a function of ``seed``. It changes only when
    ``redraw`` is called; states made before a redraw are refused after it.

    Args:
        head_dim: d.
        num_features: M; default 2 d. Even, so that features pair up for rotation.
        seed: of the projection; default: drawn from torch's generator.

    Raises:
        ValueError: num_features is odd or not positive.

    >>> phi = FavorPlus(16, num_features=4096, seed=0)
    >>> q, k = torch.full((2, 1, 16), 0.3)
    >>> estimate, exact = (phi.queries(q) * phi.keys(k)).sum(), ((q * k).sum() / 4).exp()
    >>> bool((estimate / exact - 1).abs() < 0.1)
    True
    """

    positive = True
    head_dim: int
    projection: Tensor  # (M, d)

    def __init__(self, head_dim: int, num_features: int | None = None, seed: int | None = None) -> None:
        super().__init__()
        num_features = 2 * head_dim if num_features is None else num_features
        if num_features <= 0 or num_features % 2:
            raise ValueError(f"num_features={num_features}: expected a positive even number")
        self.head_dim = head_dim
        self.feature_dim = num_features
        self.register_buffer("projection", torch.empty(num_features, head_dim))
        self.redraw(seed)

    def redraw(self, seed: int | None = None) -> None:
        """Draws a new projection; states made with the old one are invalid from here on."""
        self.seed = int(torch.randint(2**62, (), device="cpu")) if seed is None else seed
        generator = torch.Generator().manual_seed(self.seed)

        def square() -> Tensor:
            shape = self.head_dim, self.head_dim
            return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

        rows: list[Tensor] = []
        for _ in range(0, self.feature_dim, self.head_dim):
            q, r = torch.linalg.qr(square())
            # LAPACK fixes signs: without undoing that, directions are not uniform and the estimate is off.
            directions = (q * r.diagonal().sign()).T
            # Each row as long as an independent gaussian vector.
            rows.append(directions * square().norm(dim=-1, keepdim=True))
        with torch.no_grad():
            self.projection.copy_(torch.cat(rows)[: self.feature_dim])

    def queries(self, q: Tensor) -> Tensor:
        x = q.to(torch.promote_types(q.dtype, torch.float32)) * self.head_dim**-0.25
        with torch.autocast(x.device.type, enabled=False):
            logits = x @ self.projection.to(x.dtype).T - x.square().sum(-1, keepdim=True) / 2
        features: Tensor = logits.exp() * self.feature_dim**-0.5
        return features

    def keys(self, k: Tensor) -> Tensor:
        return self.queries(k)

    # The seed travels with the projection, as a tensor: safetensors takes it.
    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.seed, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        self.seed = int(state)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, num_features={self.feature_dim}, seed={self.seed}"
