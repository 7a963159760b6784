"""The options of LayerConfig as keywords, for type checkers and completion. ``LayerConfig`` describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from linrope.layer.options import (
    DecayOptions,
    EraseGateOptions,
    ForgetGateOptions,
    OutNormOptions,
    ShortConvOptions,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from linrope.feature_maps import FeatureMap
    from linrope.rotation.rotary import Rotary

Order = Literal["before", "after"]
Options = Mapping[str, Any]  # an option's own options


class CommonOptions(TypedDict, total=False):
    """Options of linear and softmax attention whose names are the same in the configs for transformers."""

    head_dim: int | None
    value_head_dim: int | None
    short_conv: int | Options | ShortConvOptions | None
    qk_norm: bool
    out_norm: bool | Literal["head", "all"] | Options | OutNormOptions | None
    skip: Order | None
    gate: bool | Order | None


class LinearOptions(TypedDict, total=False):
    """Options of linear attention alone whose names are the same in the configs for transformers."""

    num_value_heads: int | None
    feature_map: str | Options | FeatureMap
    normalize: bool
    decay: str | Options | DecayOptions | Sequence[float] | Tensor | None
    forget_gate: bool | Options | ForgetGateOptions | None
    write_gate: Literal["tied", "independent"] | None
    erase_gate: str | Options | EraseGateOptions | None
    rope_order: Literal["after", "before"]


class SharedOptions(CommonOptions, total=False):
    """All options that softmax attention has too."""

    num_kv_heads: int | None
    causal: bool
    bias: bool


class LayerOptions(SharedOptions, LinearOptions, total=False):
    """All options of a layer."""

    rotary: str | Options | Rotary | nn.Module | None
    backend: str
    context_dim: int | None


class ModelLayerOptions(LayerOptions, total=False):
    """The options and sizes of LanguageModelConfig's layers."""

    embed_dim: int
    num_heads: int
