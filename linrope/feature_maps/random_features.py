"""The base of maps with a random projection: how it is drawn, saved and loaded."""

import torch
from torch import Tensor

from linrope.common.argument_checks import check_integers, check_sizes
from linrope.common.precision import full_precision
from linrope.feature_maps.base import FeatureMap, Features, widen

_NO_SEED = -(2**63)  # the seed in the state dict of a projection that was not drawn


def orthogonal_gaussian(rows: int, d: int, generator: torch.Generator) -> Tensor:
    """Gaussian rows, orthogonal in blocks of d: (rows, d) float64."""

    def square() -> Tensor:
        return torch.randn(d, d, generator=generator, dtype=torch.float64, device="cpu")

    blocks: list[Tensor] = []
    for _ in range(0, rows, d):
        q, r = torch.linalg.qr(square())
        # Undoes the signs that LAPACK chooses: otherwise directions are not uniform and the estimate is
        # biased.
        directions = (q * r.diagonal().sign()).T
        # Each row gets the length of an independent gaussian vector.
        blocks.append(directions * square().norm(dim=-1, keepdim=True))
    return torch.cat(blocks)[:rows]


class RandomFeatureMap(FeatureMap):
    """phi = psi = a function of w_i . x' and |x'|^2, with x' = x / d^(1/4) and random w_i.

    The projection w is a buffer in the state dict. It changes only when ``redraw``, ``load_projection`` or
    ``load_state_dict`` is called, or the module is cast. States made with another projection are rejected.
    ``seed`` is the seed of the projection, or None if it was loaded; it is not part of the identity.
    A zero feature is appended to an odd number of features, since a rotation turns pairs.
    """

    head_dim: int
    seed: int | None
    projection: Tensor  # (M, d)

    def __init__(self, head_dim: int, num_features: int | None = None, seed: int | None = None) -> None:
        super().__init__()
        check_sizes(head_dim=head_dim)
        check_integers(num_features=num_features)
        num_features = 2 * head_dim if num_features is None else num_features
        if num_features <= 0:
            raise ValueError(f"num_features={num_features}: expected a positive number")
        self.head_dim, self.num_features = head_dim, num_features
        self.feature_dim = num_features + num_features % 2
        self.register_buffer("projection", torch.empty(num_features, head_dim))
        self.redraw(seed)

    @torch.no_grad()
    def redraw(self, seed: int | None = None) -> None:
        """Draws a new projection. States made with the old one become invalid."""
        check_integers(seed=seed)
        self.seed = int(torch.randint(2**62, (), device="cpu")) if seed is None else seed
        generator = torch.Generator().manual_seed(self.seed)
        self.projection.copy_(orthogonal_gaussian(len(self.projection), self.head_dim, generator))

    def reset_parameters(self) -> None:
        """Draws the projection of ``seed`` again, for a map that ``to_empty`` moved off the meta device.

        After ``load_projection`` there is no seed, so it draws a new projection.
        """
        self.redraw(self.seed)

    @torch.no_grad()
    def load_projection(self, projection: Tensor) -> None:
        """Sets the projection (M, d), rounded to the dtype of the current one; ``seed`` becomes None.

        The rows should have unit variance: x' already contains the factor d^(-1/4). States made with the old
        projection become invalid.

        Raises:
            TypeError: projection is not a floating tensor.
            ValueError: projection has another shape, or a number that is not finite in this map's dtype.

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
        with full_precision(x.device):
            logits: Tensor = x @ self.projection.to(x.dtype).T
        return logits

    def square(self, x: Tensor) -> Tensor:
        """|x'|^2 (..., 1), in float64."""
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
        square: Tensor = norm.square() * self.head_dim**-0.5
        return square

    def keys(self, k: Tensor) -> Features:
        return self.queries(k)

    # The seed is saved with the projection, as a tensor, since safetensors saves nothing else.
    def get_extra_state(self) -> Tensor:
        return torch.tensor(_NO_SEED if self.seed is None else self.seed, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        self.seed = None if int(state) == _NO_SEED else int(state)

    def settings(self) -> str:
        return f"{self.head_dim}, num_features={self.num_features}"

    def extra_repr(self) -> str:
        return f"{self.settings()}, seed={self.seed}"
