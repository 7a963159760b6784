"""The FeatureMap protocol: phi for queries, psi for keys."""

from torch import Tensor, nn


class FeatureMap(nn.Module):
    """Maps head vectors to the features whose dot products replace exp(q.k).

    queries: phi, (..., d) -> (..., f);  keys: psi, (..., d) -> (..., f).

    Subclasses set ``feature_dim`` (f) and ``positive`` (<phi(x), psi(y)> >= 0 for all x, y, which the
    normalizer needs), and ``head_dim`` (d) where the map fits only one. ``elementwise`` names the
    function under which kernels apply the map while they load a tensor; it is None where the map must
    run before the kernel. A map acts on each token alone: one that looked along the sequence would leak
    the future.

    ``identity`` tells apart two maps whose states must not be mixed; it goes into the state.
    """

    head_dim: int | None = None
    feature_dim: int
    positive: bool
    elementwise: str | None = None

    def queries(self, q: Tensor) -> Tensor:
        raise NotImplementedError

    def keys(self, k: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def identity(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"
