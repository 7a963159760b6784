"""The keywords of ``linear_rope_attention``, for type checkers."""

from typing import TypedDict

from torch import Tensor

from linrope.feature_maps import FeatureMap
from linrope.recurrence.state import LinearAttentionState
from linrope.rotation.rotary import Rotary


class Options(TypedDict, total=False):
    """All of them but return_state and shard."""

    feature_map: str | FeatureMap | None
    rotary: Rotary | None
    causal: bool
    normalize: bool
    decay: Tensor | None
    log_decay: Tensor | None
    angle_steps: Tensor | None
    write: Tensor | None
    erase: Tensor | None
    positions: Tensor | None
    key_positions: Tensor | None
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    state: LinearAttentionState | None
    eps: float
    eps_mode: str
    rope_order: str
    backend: str
