"""What the maps with a random projection share: the draw, and how it travels."""

import torch
from torch import Tensor

from linrope.feature_maps.base import FeatureMap, Features, widen

_NO_SEED = -(2**63)  # in the state dict, of a projection that was not drawn


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

    The projection w is a buffer in the state dict. It changes only when ``redraw``, ``load_projection`` or
    ``load_state_dict`` is called, or the module is cast; states made with another projection are refused.
    ``seed`` tells what it was drawn from, None where it was loaded; it is no part of the identity.
    Subclasses say with ``features_per_row`` how many features they make of each w_i. An odd number of
    features is followed by one that is 0, so that all are in pairs that a rotation can turn.
    """

    features_per_row = 1
    head_dim: int
    seed: int | None
    projection: Tensor  # (M, d)

    def __init__(self, head_dim: int, num_features: int | None = None, seed: int | None = None) -> None:
        super().__init__()
        num_features = 2 * head_dim if num_features is None else num_features
        if num_features <= 0 or num_features % self.features_per_row:
            even = " even" if self.features_per_row == 2 else ""
            raise ValueError(f"num_features={num_features}: expected a positive{even} number")
        self.head_dim, self.num_features = head_dim, num_features
        self.feature_dim = num_features + num_features % 2
        self.register_buffer("projection", torch.empty(num_features // self.features_per_row, head_dim))
        self.redraw(seed)

    @torch.no_grad()
    def redraw(self, seed: int | None = None) -> None:
        """Draws a new projection; states made with the old one are invalid from here on."""
        self.seed = int(torch.randint(2**62, (), device="cpu")) if seed is None else seed
        generator = torch.Generator().manual_seed(self.seed)
        self.projection.copy_(orthogonal_gaussian(len(self.projection), self.head_dim, generator))

    def reset_parameters(self) -> None:
        """Draws the projection of ``seed``, as after ``to_empty`` of a map made on the meta device."""
        self.redraw(self.seed)

    @torch.no_grad()
    def load_projection(self, projection: Tensor) -> None:
        """Takes a projection (M, d) from elsewhere, rounded to this one's dtype; ``seed`` becomes None.

        Rows are expected as drawn from a gaussian of variance 1: x' has the factor d^(-1/4) already.
        States made with the old one are invalid from here on.

        Raises:
            TypeError: not a floating tensor.
            ValueError: another shape, or a number that is not finite in this map's dtype.

        >>> from linrope import feature_maps
        >>> fmap = feature_maps.make("favor+", 2, num_features=4)
        >>> fmap.load_projection(torch.eye(2).repeat(2, 1))
        >>> fmap.projection.shape
        torch.Size([4, 2])
        """
        if not isinstance(projection, Tensor) or not projection.is_floating_point():
            got = projection.dtype if isinstance(projection, Tensor) else type(projection).__name__
            raise TypeError(f"projection: got {got}, expected a floating tensor")
        if projection.shape != self.projection.shape:
            expected = tuple(self.projection.shape)
            raise ValueError(f"projection: got shape {tuple(projection.shape)}, expected {expected}")
        projection = projection.to(self.projection.dtype)
        if not projection.is_meta and not projection.isfinite().all():
            raise ValueError(f"projection: got inf or nan, expected finite numbers of {projection.dtype}")
        self.projection.copy_(projection)
        self.seed = None

    def project(self, x: Tensor) -> Tensor:
        """w . x' (..., M), in float32 or wider."""
        x = widen(x) * self.head_dim**-0.25
        with torch.autocast(x.device.type, enabled=False):
            logits: Tensor = x @ self.projection.to(x.dtype).T
        return logits

    def square(self, x: Tensor) -> Tensor:
        """|x'|^2 (..., 1), in float64."""
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
        square: Tensor = norm.square() * self.head_dim**-0.5
        return square

    def keys(self, k: Tensor) -> Features:
        return self.queries(k)

    # The seed travels with the projection, as a tensor: safetensors takes it.
    def get_extra_state(self) -> Tensor:
        return torch.tensor(_NO_SEED if self.seed is None else self.seed, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        self.seed = None if int(state) == _NO_SEED else int(state)

    def settings(self) -> str:
        return f"{self.head_dim}, num_features={self.num_features}"

    def extra_repr(self) -> str:
        return f"{self.settings()}, seed={self.seed}"
