"""What the maps with a random projection share: the draw, and how it travels."""

import torch
from torch import Tensor

from linrope.feature_maps.base import FeatureMap, widen


def orthogonal_gaussian(rows: int, d: int, generator: torch.Generator) -> Tensor:
    """Gaussian rows, orthogonal in blocks of d: (rows, d) float64."""

    def square() -> Tensor:
        return torch.randn(d, d, generator=generator, dtype=torch.float64, device="cpu")

    blocks: list[Tensor] = []
    for _ in range(0, rows, d):
        q, r = torch.linalg.qr(square())
        # LAPACK fixes signs: without undoing that, directions are not uniform and the estimate is off.
        directions = (q * r.diagonal().sign()).T
        # Each row as long as an independent gaussian vector.
        blocks.append(directions * square().norm(dim=-1, keepdim=True))
    return torch.cat(blocks)[:rows]


class RandomFeatureMap(FeatureMap):
    """phi = psi = a function of w_i . x' and |x'|^2, with x' = x / d^(1/4) and random w_i.

    The projection w is a buffer in the state dict, a function of ``seed``. It changes only when
    ``redraw`` is called; states made before a redraw are refused after it. Subclasses say with
    ``features_per_row`` how many features they make of each w_i.
    """

    features_per_row = 1
    head_dim: int
    projection: Tensor  # (M, d)

    def __init__(self, head_dim: int, num_features: int | None = None, seed: int | None = None) -> None:
        super().__init__()
        num_features = 2 * head_dim if num_features is None else num_features
        if num_features <= 0 or num_features % 2:
            raise ValueError(f"num_features={num_features}: expected a positive even number")
        self.head_dim = head_dim
        self.feature_dim = num_features
        self.register_buffer("projection", torch.empty(num_features // self.features_per_row, head_dim))
        self.redraw(seed)

    def redraw(self, seed: int | None = None) -> None:
        """Draws a new projection; states made with the old one are invalid from here on."""
        self.seed = int(torch.randint(2**62, (), device="cpu")) if seed is None else seed
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            self.projection.copy_(orthogonal_gaussian(len(self.projection), self.head_dim, generator))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """w . x' (..., M) and |x'|^2 (..., 1), in float32 or wider."""
        x = widen(x) * self.head_dim**-0.25
        with torch.autocast(x.device.type, enabled=False):
            return x @ self.projection.to(x.dtype).T, x.square().sum(-1, keepdim=True)

    def keys(self, k: Tensor) -> Tensor:
        return self.queries(k)

    # The seed travels with the projection, as a tensor: safetensors takes it.
    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.seed, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        self.seed = int(state)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, num_features={self.feature_dim}, seed={self.seed}"
