"""The class that every feature map subclasses, and helpers for its authors.

Exponentials need one more, ``linrope.feature_maps.log_scale.exponential``.
"""

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linrope.common.private_names import hooks_of
from linrope.feature_maps.state_identity import Identified

# Features (..., f); from a log_scaled map also the logarithm (...) of the factor of each token's features.
Features: TypeAlias = Tensor | tuple[Tensor, Tensor]

METHODS = frozenset(("forward", "queries", "keys"))  # what calls of a map, or of another module, run


class FeatureMap(Identified):
    """Maps head vectors to features whose dot products replace exp(q.k).

    queries: phi, (..., d) -> (..., f);  keys: psi, (..., d) -> (..., f).

    A map acts on each token alone: a maximum or a norm along the sequence would leak the future.

    A ``log_scaled`` map returns (features, log_scale) and means e^log_scale * features, so that exponentials
    stay in range. log_scale (...) is float64, without the last axis, and a constant to the gradient: the
    features carry all gradients. ``exponential`` makes such a pair from logits.

    The operation calls the map itself, fmap(q, k) -> (phi(q), psi(k)), so that its hooks run: those that a user
    registers, and those by which accelerate, FSDP or DeepSpeed bring weights that lie elsewhere. A map reads
    weights of a submodule only while that submodule is called.

    ``identity`` tells apart maps whose states must not be mixed. It holds the class, ``settings`` (by default
    ``extra_repr``) and a digest of all parameters and buffers: see ``linrope.feature_maps.state_identity``.

    Raises:
        RuntimeError: ``identity`` is read after ``to_empty`` moved the map off the meta device and before
            ``reset_parameters`` or a state dict filled it.
    """

    feature_dim: int  # f
    positive: bool  # whether <phi(x), psi(y)> >= 0 for all x and y; the normalizer requires it
    head_dim: int | None = None  # d, if the map fits only one
    long_keys: bool = False  # whether psi(k) may be longer than 1 so that the delta rule's state grows
    log_scaled: bool = False
    elementwise: str | None = None  # the function's name in the kernels that apply it as they load a tensor
    # False for a class with other queries or keys than the class that names the elementwise function
    computes_what_it_names = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        names_it = next(each for each in cls.__mro__ if "elementwise" in vars(each))
        cls.computes_what_it_names = all(getattr(cls, name) is getattr(names_it, name) for name in METHODS)

    def forward(self, q: Tensor | None, k: Tensor | None) -> tuple[Features | None, Features | None]:
        """(phi(q), psi(k)); None stays None."""
        return None if q is None else self.queries(q), None if k is None else self.keys(k)

    def queries(self, q: Tensor) -> Features:
        raise NotImplementedError

    def keys(self, k: Tensor) -> Features:
        raise NotImplementedError


def is_feature_map(x: object) -> bool:
    """True for a FeatureMap, and for a module that wraps one and passes its attributes on, as those of PEFT do."""
    attributes = FeatureMap.__annotations__
    return isinstance(x, FeatureMap) or (isinstance(x, nn.Module) and all(hasattr(x, y) for y in attributes))


def is_changed(module: nn.Module) -> bool:
    """True if a call of the module does more than its class says: a hook, or another method put in its place."""
    own = vars(module)
    # Each of METHODS by itself, because torch.compile of PyTorch 2.11 cannot trace METHODS.isdisjoint(own)
    return bool(hooks_of(module)) or "forward" in own or "queries" in own or "keys" in own


def widen(x: Tensor) -> Tensor:
    """x in float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def pad_to_even(x: Tensor) -> Tensor:
    """Appends a feature that is 0 to an odd number of features (..., f), since a rotation turns pairs."""
    return F.pad(x, (0, 1)) if x.shape[-1] % 2 else x  # F.pad by 0 would copy x
