"""The sizes and choices of a LanguageModel, and the attention layers that they describe."""

from dataclasses import dataclass, fields
from typing import Any, get_args

from linrope.layer.attention import LinearRoPEAttention
from linrope.layer.choices import make_rotary
from linrope.models.defaults import VALUE_FACTOR, resolve_block, resolve_rotary, resolve_short_conv
from linrope.position_encodings import ABSOLUTE, RELATIVE, SoftmaxAttention
from linrope.rotation.rotary import LAYOUTS, Rotary

ATTENTION = ("linear", "softmax")
POSITIONS = ("rope", "none", *ABSOLUTE, *RELATIVE)

_SIZES = (
    "vocab_size",
    "embed_dim",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "num_value_heads",
    "head_dim",
    "value_head_dim",
    "hidden_dim",
    "max_length",
)
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class LanguageModelConfig:
    """The sizes and choices of a LanguageModel, saved with the weights as JSON."""

    vocab_size: int = 256
    embed_dim: int = 256
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int | None = None
    head_dim: int | None = None  # size of a query or a key; default: embed_dim / num_heads
    value_head_dim: int | None = None  # size of a value; default: twice head_dim
    feed_forward: bool = True  # whether a SwiGLU follows the attention in each block
    # The size of the SwiGLU's inner vectors. Default: 7/4 of embed_dim, rounded up to a multiple of 32.
    hidden_dim: int | None = None
    attention: str = "linear"  # or "softmax"
    # Options of both, as in LinearRoPEAttention. "auto": see models/defaults.py.
    short_conv: int | str | dict | None = "auto"  # type: ignore[type-arg]
    qk_norm: bool = False
    out_norm: bool | str | dict = True  # type: ignore[type-arg]
    skip: str | None = "after"
    gate: bool | str = True
    # Options of linear attention.
    num_value_heads: int | None = None
    feature_map: str | dict = "elu+1"  # type: ignore[type-arg]  # or {"name": .., options}
    normalize: bool = True
    decay: str | dict | None = "auto"  # type: ignore[type-arg]
    forget_gate: bool | str | dict = "auto"  # type: ignore[type-arg]
    write_gate: str | None = "auto"
    qk_bias: bool = False
    trapezoid: bool = False
    positions: str = "rope"  # one of POSITIONS; those in RELATIVE require softmax attention
    # With positions "rope": "auto", a layout, "selective", a dict as in LinearRoPEAttention; None: no rotation.
    rotary: str | dict | None = "auto"  # type: ignore[type-arg]
    max_length: int = 4096  # the size of the table if positions is "learned"
    init: str = "fan-in"  # or "gpt-2": how the initial weights are drawn; see models/defaults.py

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: expected at least 1")
            if value is not None and value > _LARGEST:
                raise ValueError(f"{name}={value}: expected at most {_LARGEST}")

    @classmethod
    def from_dict(cls, values: object) -> "LanguageModelConfig":
        """Raises ValueError on unknown keys or values of the wrong type."""
        known = {field.name: field.type for field in fields(cls)}
        if not isinstance(values, dict):
            raise ValueError(f"config: got {type(values).__name__}, expected an object")
        if "model_type" in values:
            raise ValueError(
                f"config: got model_type={values['model_type']!r}, a model in Hugging Face format; load it with "
                "transformers' from_pretrained after importing linrope.models.huggingface"
            )
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(f"config: got unknown keys {unknown}, expected some of {sorted(known)}")
        for name, value in values.items():
            kinds = get_args(known[name]) or (known[name],)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise ValueError(f"config: got {name}={value!r}, expected {known[name]}")
        return cls(**values)


def _shared(config: LanguageModelConfig) -> dict[str, Any]:
    """The options that both kinds of attention have."""
    head_dim = config.head_dim or config.embed_dim // config.num_heads
    names = ("num_kv_heads", "head_dim", "qk_norm", "out_norm", "skip", "gate")
    options = {name: getattr(config, name) for name in names}
    return options | {"value_head_dim": config.value_head_dim or VALUE_FACTOR * head_dim}


def make_linear(config: LanguageModelConfig) -> LinearRoPEAttention:
    rotary = resolve_rotary(config.rotary) if config.positions == "rope" else None
    names = ("decay", "forget_gate", "write_gate", "short_conv")
    block = resolve_block(**{name: getattr(config, name) for name in names}, rotated=rotary is not None)
    return LinearRoPEAttention(
        config.embed_dim,
        config.num_heads,
        feature_map=config.feature_map,
        rotary=rotary,
        **{name: getattr(config, name) for name in ("normalize", "num_value_heads", "qk_bias", "trapezoid")},
        **block,
        **_shared(config),
    )


def make_softmax(config: LanguageModelConfig) -> SoftmaxAttention:
    shared = _shared(config)
    positions: str | Rotary = config.positions if config.positions in RELATIVE else "none"
    if config.positions == "rope" and config.rotary is not None:
        head_dim = config.head_dim or config.embed_dim // config.num_heads
        positions = make_rotary(resolve_rotary(config.rotary, "softmax"), head_dim) or positions
    short_conv = resolve_short_conv(config.short_conv, causal=True)
    return SoftmaxAttention(
        config.embed_dim, config.num_heads, positions=positions, short_conv=short_conv, **shared
    )


def check_softmax(config: LanguageModelConfig) -> None:
    """Raises ValueError for options that only linear attention has."""
    for name, expected in (
        ("decay", None),
        ("forget_gate", False),
        ("write_gate", None),
        ("num_value_heads", None),
        ("qk_bias", False),
        ("trapezoid", False),
        ("feature_map", LanguageModelConfig.feature_map),
        ("normalize", True),
    ):
        if (value := getattr(config, name)) not in (expected, "auto"):
            raise ValueError(f"{name}={value!r}: expected {expected!r} with attention='softmax'")
    selective = isinstance(config.rotary, dict) and "name" in config.rotary
    if selective or config.rotary == "selective":
        raise ValueError(
            f"rotary={config.rotary!r}: expected auto, {', '.join(LAYOUTS)}, a dict without a name, or None with "
            "attention='softmax'"
        )
