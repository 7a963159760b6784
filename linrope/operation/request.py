"""``Request``: the arguments of one call as the caller passed them, in three groups, with their defaults."""

from dataclasses import dataclass
from typing import TypedDict

from torch import Tensor

from linrope.feature_maps import FeatureMap
from linrope.recurrence.state import LinearAttentionState
from linrope.rotation.rotary import Rotary

ORDERS = ("after", "before")
EPS_MODES = ("clamp", "add")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The tensors that gradients flow to."""

    q: Tensor | None  # None: only the last state is wanted
    k: Tensor
    v: Tensor
    log_decay: Tensor | None = None
    angle_steps: Tensor | None = None
    decay: Tensor | None = None
    write: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """The position of each token, and which tokens are hidden or packed."""

    positions: Tensor | None = None
    key_positions: Tensor | None = None
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of the computation."""

    feature_map: str | FeatureMap | None = "elu+1"
    rotary: Rotary | None = None
    causal: bool = True
    normalize: bool = True
    eps: float = 1e-6
    eps_mode: str = "clamp"
    rope_order: str = "after"
    backend: str = "auto"


@dataclass(frozen=True, kw_only=True)
class Request(Settings, TokenLayout, Inputs):
    """One call of ``linear_rope_attention``, whose docstring describes the fields."""

    state: LinearAttentionState | None = None
    return_state: bool = False

    @property
    def sequences(self) -> int:
        """s: the batch, or the number of packed sequences."""
        return self.k.shape[0] if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def num_queries(self) -> int:
        """n: the number of queries, or of keys if only the state is wanted."""
        return self.k.shape[1] if self.q is None else self.q.shape[1]

    @property
    def decays_by_position(self) -> bool:
        """True if keys decay with the distance between positions."""
        return self.decay is not None or (self.rotary is not None and self.rotary.xpos is not None)


class Options(TypedDict, total=False):
    """The keywords of ``linear_rope_attention`` for type checkers, without return_state and shard."""

    feature_map: str | FeatureMap | None
    rotary: Rotary | None
    causal: bool
    normalize: bool
    decay: Tensor | None
    log_decay: Tensor | None
    angle_steps: Tensor | None
    write: Tensor | None
    positions: Tensor | None
    key_positions: Tensor | None
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    state: LinearAttentionState | None
    eps: float
    eps_mode: str
    rope_order: str
    backend: str
