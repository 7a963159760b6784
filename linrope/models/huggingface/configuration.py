"""The configuration of the Hugging Face models, and the attention layers that it describes."""

import json
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, get_args, get_origin, overload

import torch
from transformers import PreTrainedConfig
from typing_extensions import Unpack

from linrope.common.argument_checks import check_sizes
from linrope.feature_maps.random_features import RandomFeatureMap
from linrope.layer.attention import LinearRoPEAttention
from linrope.layer.choices import partial_dim
from linrope.layer.config import OPTIONS, PARTS, LayerConfig
from linrope.layer.softmax_attention import SoftmaxAttention
from linrope.layer.typed_options import CommonOptions, LinearOptions
from linrope.models.huggingface.parallel import TP_PLAN
from linrope.rotation.rotary import Rotary

LAYER_TYPES = ("linear_attention", "full_attention")
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# Options of LayerConfig and LanguageModelConfig that have other names here.
_OTHER_NAMES = {
    "embed_dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "rotary": "rope_parameters",
    "rope_theta": "rope_parameters",
    "bias": "attention_bias",
    "causal": "is_causal",
}
# Names of other models, which transformers would keep without a word
_FOREIGN_NAMES = {
    **dict.fromkeys(("n_layer", "n_layers", "depth"), "num_hidden_layers"),
    **dict.fromkeys(("n_embd", "d_model", "dim"), "hidden_size"),
    **dict.fromkeys(("n_head", "n_heads"), "num_attention_heads"),
    "n_positions": "max_position_embeddings",
}
# Options of Llama's that have one value here
_LLAMAS = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "dropout": 0.0,
    "sliding_window": None,
}
_LACKING = {"context_dim", "backend"}
# Options of LayerConfig that have the same names here, besides head_dim.
CHOICES = [name for name in OPTIONS if name not in {"head_dim", *_LACKING, *_OTHER_NAMES}]


class ConfigOptions(CommonOptions, LinearOptions, total=False):
    """The keywords of LinRopeConfig, for completion."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None
    max_position_embeddings: int
    rope_parameters: dict[str, Any] | None
    selective_rope: bool | dict[str, Any]
    layer_types: list[str] | None
    full_attention_interval: int | None
    plain_full_attention: bool
    is_causal: bool
    attention_bias: bool
    rms_norm_eps: float
    initializer_range: float | None
    tie_word_embeddings: bool
    use_cache: bool
    pad_token_id: int | None
    bos_token_id: int | None
    eos_token_id: int | list[int] | None


class LinRopeConfig(PreTrainedConfig):
    """The sizes and choices of the Hugging Face models of linear attention with RoPE.

    Options and weights have Llama's names where Llama has them. All options of ``linrope.layer.config.LayerConfig``
    are keywords here too, except context_dim and backend: those that Llama has under Llama's names, rotary as
    rope_parameters and selective_rope, and the others under their own. They change the block that ``LayerConfig.block``
    describes, and ``config.layer`` is the LayerConfig that they make.

    Attributes:
        vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads: sizes.
        num_key_value_heads: a divisor of num_attention_heads; default num_attention_heads.
        head_dim: the size of a query and a key; default hidden_size / num_attention_heads.
        rope_parameters: {"rope_theta": .., "rope_type": .., ..} as Hugging Face writes them. The layout is
            "half", as in Llama, and all features are rotated unless there is a partial_rotary_factor. Default: base
            10000 and, in causal models without selective_rope, a partial_rotary_factor of 1/4, rounded down to an even
            number of features, but at least 2; no such factor if none fits every layer.
        max_position_embeddings: the trained length, which some rope types require; generation may exceed it.
        selective_rope: whether the input changes the speed of the rotation of rope_parameters; True, or the
            options rank, bound and per_head of LinearRoPEAttention's rotary="selective".
        layer_types: "linear_attention" or "full_attention" for each layer; default: all linear. Full
            attention is softmax with the RoPE of rope_parameters. It takes short_conv, qk_norm, out_norm, skip
            and gate, and ignores the other options of linear attention.
        plain_full_attention: whether full attention has none of short_conv, qk_norm, out_norm, skip and gate either,
            as in Llama.
        full_attention_interval: k, instead of layer_types: every k-th layer is "full_attention".
        is_causal: False: each token sees all others, as in the masked language model.
        attention_bias: whether the projections of the attention have biases.
        initializer_range: the standard deviation of initial weights. None: 1 / sqrt(columns) of each matrix, but those
            that end a residual branch are uniform in -1 / sqrt(columns) .. 1 / sqrt(columns). Feature maps, gates and
            convolutions always start as in a new LinearRoPEAttention.
        rms_norm_eps, tie_word_embeddings, use_cache: as in Llama.
        pad_token_id, bos_token_id, eos_token_id: special tokens; None: the tokenizer has no such token.

    Raises:
        ValueError: a value does not fit, an unknown option has nearly the name of a known one, or it is one of
            LinearRoPEAttention's.

    >>> from linrope.models.huggingface import LinRopeConfig
    >>> LinRopeConfig(num_hidden_layers=4, full_attention_interval=4).layer_types
    ['linear_attention', 'linear_attention', 'linear_attention', 'full_attention']
    """

    model_type = "linrope"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012
    base_model_tp_plan = TP_PLAN

    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int = 1792
    num_hidden_layers: int = 12
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 4096
    rope_parameters: dict[str, Any] | None = None
    selective_rope: bool | dict[str, Any] = False
    layer_types: list[str] | None = None
    plain_full_attention: bool = False
    is_causal: bool = True
    attention_bias: bool = False
    rms_norm_eps: float = 1e-6
    initializer_range: float | None = None
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    if TYPE_CHECKING:  # for completion; PreTrainedConfig takes keywords of its own, and keeps any other

        @overload
        def __init__(self, **options: Unpack[ConfigOptions]) -> None: ...
        @overload
        def __init__(self, **options: Any) -> None: ...
        def __init__(self, **options: Any) -> None: ...

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Does nothing: a saved folder names linrope's classes and gets no copy of their code."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "LinRopeConfig":
        """Options take the place of those of config_dict, and all are checked together.

        transformers' own sets them unchecked, and ignores those that a config has only if they were chosen.
        """
        options = {name: kwargs.pop(name) for name in kwargs.keys() & _known_options()}
        _check_unknown(kwargs)
        return super().from_dict(config_dict | options, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        _check_types(self)
        try:
            self._complete(**kwargs)
        except (AttributeError, TypeError) as error:  # from a wrong type inside a list or dict
            raise ValueError(f"config: got a value of the wrong type: {error}") from error

    @property
    def layer(self) -> LayerConfig:
        """The options of the linear attention."""
        assert self.rope_parameters is not None
        rotary = dict(self.rope_parameters)
        if rotary["rope_type"] in ("default", "linear", "dynamic"):  # they ignore it, but configs have it
            rotary.pop("original_max_position_embeddings", None)
        rotary["max_position_embeddings"] = self.max_position_embeddings
        if self.selective_rope is not False:
            rotary |= {"name": "selective"} | ({} if self.selective_rope is True else self.selective_rope)
        return LayerConfig.block(
            self.hidden_size,
            self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rotary=rotary,
            causal=self.is_causal,
            bias=self.attention_bias,
            **{name: vars(self)[name] for name in CHOICES if name in vars(self)},
        )

    def _complete(self, **kwargs: Any) -> None:
        check_sizes(**{name: getattr(self, name) for name in _SIZES})
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        interval = kwargs.pop("full_attention_interval", None)
        if self.layer_types is None:
            self.layer_types = _layer_types(self.num_hidden_layers, interval)
        elif interval is not None:
            raise ValueError(f"full_attention_interval={interval}: expected None with layer_types")
        chooses_rotation = self.rope_parameters is not None or "rope_scaling" in kwargs
        super().__post_init__(**kwargs)
        _check_unknown(kwargs)
        json.dumps({name: vars(self)[name] for name in CHOICES if name in vars(self)})  # raises for objects
        if len(self.layer_types) != self.num_hidden_layers or not set(self.layer_types) <= set(LAYER_TYPES):
            raise ValueError(
                f"layer_types={self.layer_types}: expected num_hidden_layers={self.num_hidden_layers} "
                f"of {', '.join(LAYER_TYPES)}"
            )
        try:
            with torch.device("meta"):  # reports bad values now, not when a model is made
                layers = [make_attention(self, layer_type) for layer_type in dict.fromkeys(self.layer_types)]
        except ValueError as error:
            raise ValueError(_in_own_names(str(error))) from error
        self.head_dim, self.value_head_dim = layers[0].head_dim, layers[0].value_head_dim
        if not chooses_rotation and self.is_causal and self.selective_rope is False:
            self.rope_parameters = {**(self.rope_parameters or {}), **_partial(layers)}
        modules = [module for layer in layers for module in layer.modules()]
        if maps := [module for module in modules if isinstance(module, RandomFeatureMap)]:
            self.feature_map = {**self.layer.to_dict()["feature_map"], "seed": maps[0].seed}


def _partial(layers: Sequence[LinearRoPEAttention | SoftmaxAttention]) -> dict[str, float]:
    """A quarter of the features, or the share near it that gives every layer an even number of rotated features."""
    sizes = [x.feature_map.feature_dim if isinstance(x, LinearRoPEAttention) else x.head_dim for x in layers]
    size = min(sizes)
    share = partial_dim(size, 1 / 4) / size
    return {"partial_rotary_factor": share} if all(int(x * share) % 2 == 0 for x in sizes) else {}


def _in_own_names(message: str) -> str:
    """The message of an attention layer, with the names that its options have here."""
    names = _OTHER_NAMES.keys() & {"embed_dim", "num_heads", *OPTIONS}
    return re.sub(rf"\b({'|'.join(names)})\b(?=[:=])", lambda match: _OTHER_NAMES[match[0]], message)


def _check_types(config: LinRopeConfig) -> None:
    for name, kind in LinRopeConfig.__annotations__.items():
        kinds = tuple(get_origin(union_type) or union_type for union_type in get_args(kind) or (kind,))
        value, substitutes = getattr(config, name), {float: int, list: tuple}
        fits = isinstance(value, kinds + tuple(substitutes[kind] for kind in kinds if kind in substitutes))
        if not fits or (isinstance(value, bool) and bool not in kinds):
            raise ValueError(f"{name}={value!r}: expected {getattr(kind, '__name__', kind)}")


def _known_options() -> set[str]:
    return {*LinRopeConfig.__annotations__, *CHOICES, "full_attention_interval"}


def _check_unknown(options: dict[str, Any]) -> None:
    """Rejects misspelt options, and options of the layer that configs lack.

    transformers keeps unknown ones, because tools add options of their own to configs.
    """
    for name in options.keys() - set(CHOICES):
        if options[name] != (only := _LLAMAS.get(name, options[name])):
            raise ValueError(f"{name}={options[name]!r}: expected {only!r}, or no such option")
        if name in _LACKING:
            raise ValueError(
                f"config: got {name!r}, an option of LinearRoPEAttention that LinRopeConfig lacks"
            )
        names = _OTHER_NAMES | _FOREIGN_NAMES
        near = [names[name]] if name in names else get_close_matches(name, _known_options(), 1, 0.85)
        if near and name not in PreTrainedConfig.__annotations__ and not hasattr(PreTrainedConfig, name):
            raise ValueError(f"config: got the unknown option {name!r}; did you mean {near[0]!r}?")


def make_attention(config: LinRopeConfig, layer_type: str) -> LinearRoPEAttention | SoftmaxAttention:
    """The attention of a layer of the given type."""
    layer = config.layer
    if layer_type == "linear_attention":
        return LinearRoPEAttention(layer)
    assert isinstance(layer.rotary, dict)
    options = {
        key: value for key, value in layer.rotary.items() if key not in ("name", "rank", "bound", "per_head")
    }
    length = options.pop("max_position_embeddings")
    rotary = Rotary.from_config(options, head_dim=layer.key_dim, max_position_embeddings=length)
    if rotary.axes is not None:
        raise ValueError("rope_parameters: got mrope_section, expected none with full_attention layers")
    shared = layer.shared()
    if config.plain_full_attention:
        shared = {name: option for name, option in shared.items() if name not in PARTS}
    return SoftmaxAttention(layer.embed_dim, layer.num_heads, rotary=rotary, **shared)


def _layer_types(layers: int, interval: int | None) -> list[str]:
    check_sizes(full_attention_interval=interval)
    return [LAYER_TYPES[interval is not None and (i + 1) % interval == 0] for i in range(layers)]
