"""The sizes and choices of a LanguageModel, and the attention layers that they describe."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from typing_extensions import Unpack

from linrope.common.argument_checks import check_bools, check_name, check_sizes, plain
from linrope.common.keywords import check_keywords, shows
from linrope.layer.attention import LinearRoPEAttention
from linrope.layer.config import DEFAULTS, LARGEST, OPTIONS, SHARED, LayerConfig
from linrope.layer.options import as_json
from linrope.layer.softmax_attention import SoftmaxAttention
from linrope.layer.typed_options import ModelLayerOptions
from linrope.models.initialization import INITIALIZATIONS
from linrope.rotation.rotary import LAYOUTS

ATTENTION = ("linear", "softmax")

_SIZES: dict[str, Any] = {"embed_dim": 256, "num_heads": 8}


@dataclass(frozen=True, init=False)
class LanguageModelConfig:
    """The sizes and choices of a LanguageModel, saved with the weights as JSON.

    Args:
        vocab_size: the number of tokens.
        num_layers: the number of blocks.
        feed_forward: whether a SwiGLU follows the attention in each block.
        hidden_dim: the size of the SwiGLU's inner vectors. Default: 7/4 of embed_dim, rounded up to a multiple of 32.
        attention: "linear" or "softmax".
        init: "fan-in" or "gpt-2", how the initial weights are drawn: see ``linrope.models.initialization``.
        layer: the options of the attention. Default: ``LayerConfig.block`` with embed_dim=256 and num_heads=8. Softmax
            attention rotates all features, and has only the options that SoftmaxAttention has.
        **options: options of LayerConfig, embed_dim and num_heads among them, that change the layer.

    Raises:
        TypeError: an option is unknown, or its value has the wrong type.
        ValueError: a value does not fit, or a name is unknown.

    >>> from linrope.models import LanguageModelConfig
    >>> config = LanguageModelConfig(embed_dim=64, num_layers=2, num_heads=4, skip=None)
    >>> config.layer.embed_dim, config.layer.gate, config.layer.skip
    (64, 'after', None)
    """

    vocab_size: int
    num_layers: int
    feed_forward: bool
    hidden_dim: int | None
    attention: str
    init: str
    layer: LayerConfig

    @shows(_SIZES | DEFAULTS)
    def __init__(
        self,
        vocab_size: int = 256,
        *,
        num_layers: int = 4,
        feed_forward: bool = True,
        hidden_dim: int | None = None,
        attention: str = "linear",
        init: str = "fan-in",
        layer: LayerConfig | None = None,
        **options: Unpack[ModelLayerOptions],
    ) -> None:
        check_keywords("LanguageModelConfig", options, [*_SIZES, *OPTIONS, *self.__annotations__])
        check_name("attention", attention, ATTENTION)
        check_name("init", init, INITIALIZATIONS)
        check_bools(feed_forward=feed_forward)
        if layer is None:
            layer = _block(attention, dict(options))
        elif options:
            layer = replace(layer, **dict[str, Any](options))
        values = {
            "vocab_size": vocab_size,
            "num_layers": num_layers,
            "feed_forward": feed_forward,
            "hidden_dim": hidden_dim,
            "attention": attention,
            "init": init,
            "layer": layer,
        }
        for name, value in values.items():
            object.__setattr__(self, name, plain(value))
        _check_sizes(self)
        if attention == "softmax":
            _check_softmax(layer)

    @property
    def embed_dim(self) -> int:
        """The size of a token's vector."""
        return self.layer.embed_dim

    def feed_forward_dim(self) -> int:
        """The size of the SwiGLU's inner vectors."""
        return self.hidden_dim or 32 * math.ceil(7 / 4 * self.embed_dim / 32)

    def to_dict(self) -> dict[str, Any]:
        """The sizes and choices as JSON types, the layer's options beside the others.

        Raises:
            ValueError: an option is an object, such as a module.
        """
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "layer"}
        return own | self.layer.to_dict()

    @classmethod
    def from_dict(cls, values: object) -> "LanguageModelConfig":
        """The config of ``to_dict``'s result. Raises ValueError on unknown keys or values of the wrong type."""
        if not isinstance(values, dict):
            raise ValueError(f"config: got {type(values).__name__}, expected an object")
        if "model_type" in values:
            raise ValueError(
                f"config: got model_type={values['model_type']!r}, a model in Hugging Face format; load it with "
                "transformers' from_pretrained after importing linrope.models.huggingface"
            )
        known = {*(each.name for each in fields(cls)), *_SIZES, *OPTIONS} - {"layer"}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"config: got unknown keys {unknown}, expected some of {sorted(known)}")
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"config: {error}") from error


def _block(attention: str, changes: dict[str, Any]) -> LayerConfig:
    """The block of the models, without what this attention does not have."""
    absent = {"decay": None, "rotary": "interleaved"} if attention == "softmax" else {}
    return LayerConfig.block(**(_SIZES | absent | changes))


def _check_sizes(config: LanguageModelConfig) -> None:
    sizes = {name: getattr(config, name) for name in ("vocab_size", "num_layers", "hidden_dim")}
    check_sizes(**sizes)
    for name, value in sizes.items():
        if value is not None and value > LARGEST:
            raise ValueError(f"{name}={value}: expected at most {LARGEST}")


def _check_softmax(layer: LayerConfig) -> None:
    """Raises ValueError for options that only linear attention has."""
    plain = LayerConfig(layer.embed_dim, layer.num_heads)
    for name in (name for name in OPTIONS if name not in (*SHARED, "rotary", "backend")):
        value, expected = getattr(layer, name), getattr(plain, name)
        if value != expected:
            raise ValueError(
                f"{name}={as_json(name, value)!r}: expected {as_json(name, expected)!r} with attention='softmax'"
            )
    if layer.has_selective_steps:
        raise ValueError(
            f"rotary={layer.rotary!r}: expected {', '.join(LAYOUTS)}, a dict without a name, or None with "
            "attention='softmax'"
        )


def make_attention(config: LanguageModelConfig) -> LinearRoPEAttention | SoftmaxAttention:
    """The attention of a block."""
    layer = config.layer
    if config.attention == "linear":
        return LinearRoPEAttention(layer)
    rotary: Any = layer.rotary  # no module: _check_softmax refuses it
    return SoftmaxAttention(layer.embed_dim, layer.num_heads, rotary=rotary, **layer.shared())
