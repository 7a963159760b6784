"""The FeatureMap protocol: phi for queries, psi for keys."""

from typing import Any

import torch
from torch import Tensor, nn


class FeatureMap(nn.Module):
    """Maps head vectors to the features whose dot products replace exp(q.k).

    queries: phi, (..., d) -> (..., f);  keys: psi, (..., d) -> (..., f).

    Subclasses set ``feature_dim`` (f) and ``positive`` (<phi(x), psi(y)> >= 0 for all x, y, which the
    normalizer needs), and ``head_dim`` (d) where the map fits only one. ``elementwise`` names the
    function under which kernels apply the map while they load a tensor; it is None where the map must
    run before the kernel. A map acts on each token alone: one that looked along the sequence would leak
    the future.

    A ``positional`` map needs to know where its tokens are: queries(q, positions), keys(k, positions)
    with x (b, n, h, d) and positions int64 (b or 1, n).

    ``identity`` tells apart two maps whose states must not be mixed; it goes into the state.
    """

    head_dim: int | None = None
    feature_dim: int
    positive: bool
    positional: bool = False
    elementwise: str | None = None
    log_scaled: bool = False

    # What else a map takes depends on ``positional``: type checkers accept any here.
    def queries(self, q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError

    def keys(self, k: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError

    @property
    def identity(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"


def widen(x: Tensor) -> Tensor:
    """x in float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def same_identity(a: str, b: str) -> bool:
    return a == b
