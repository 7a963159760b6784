"""The options of the attention layers: LayerConfig declares each of them, with its type, its meaning and its default.

Nothing here imports PyTorch at once: the commands make their flags of these fields, and --help would wait for it.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from linrope.common.argument_checks import (
    ORDERS,
    ROPE_ORDERS,
    check_bools,
    check_integers,
    check_name,
    check_sizes,
)
from linrope.common.keywords import check_keywords, shows
from linrope.layer.options import (
    DECAYS,
    ERASE_GATES,
    ROTATIONS,
    DecayOptions,
    EraseGateOptions,
    ForgetGateOptions,
    OutNormOptions,
    ShortConvOptions,
    as_json,
    decay_options,
    gate_order,
    map_options,
    options_of,
    rotary_options,
)

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack

    from linrope.feature_maps import FeatureMap
    from linrope.layer.typed_options import LayerOptions, Order
    from linrope.rotation.rotary import Rotary

WRITE_GATES = ("tied", "independent")
SIZES = (
    "embed_dim",
    "num_heads",
    "num_kv_heads",
    "num_value_heads",
    "context_dim",
    "head_dim",
    "value_head_dim",
)
FORWARD_IN_TIME = ("forget_gate", "erase_gate", "short_conv")  # in causal self-attention only
LARGEST = 2**31 - 1  # size


@dataclass(frozen=True)
class LayerConfig:
    """The options of a LinearRoPEAttention, checked, each in one form.

    Options may be given in short: ``short_conv=4`` becomes ``ShortConvOptions(taps=4)``, ``gate=True`` becomes
    ``gate="after"``, and equal layers have equal configs. The layer checks what depends on the size of its feature map.

    Attributes:
        embed_dim: size of x and y.
        num_heads: h.
        num_kv_heads: g, a divisor of h. Default: h.
        num_value_heads: a multiple of h, if values, decay and gates have more heads than queries and keys, which are
            then shared (as in Mamba-2; num_kv_heads must be h or None). g below and the layer's attribute
            num_state_heads then count the value heads. backend="native" shares queries and keys without copies.
        context_dim: the size of a context's vectors, if they differ from x's in size. Such a layer is for
            cross-attention alone. Default: embed_dim.
        head_dim: d, the size of a query and a key. Default: embed_dim / num_heads.
        value_head_dim: e, the size of a value. Default: head_dim.
        feature_map: the feature map. A name, {"name": .., options of feature_maps.make}, or a FeatureMap. A learned map
            that the layer makes itself has separate weights for each head.
        rotary: the rotation of the features. One of
            "interleaved" or "half": a Rotary with this layout;
            "selective": x speeds the rotation up or slows it down (``linrope.layer.selective.SelectiveSteps``);
            a Rotary for the map's feature_dim, or None;
            a dict with the arguments of Rotary, or of Rotary.axial if it has the key "axes". In place of rotary_dim it
            may have "partial_rotary_factor", the share of the features to rotate, rounded down to an even number, but
            at least 2;
            a dict with Hugging Face's rope_parameters, if it has the key "rope_theta" or "rope_type" (layout is then
            "half" by default);
            {"name": "selective", "rank": 16, "bound": "multiply" or "add", "per_head": True}, to which the keys of the
            dicts above may be added;
            a module that computes angle_steps (b, n, g or 1, pairs) from x. If it has an attribute ``rotary``, that
            rotation applies too.
        causal: as in linear_rope_attention.
        normalize: whether to divide by the normalizer. See out_norm.
        decay: how keys decay per position, in causal attention only. One of
            None: no decay;
            a number in (0, 1] for each head of values;
            "spread": half-lives from 1 to 4096 tokens, in geometric steps over the key/value heads;
            "learned": one learned number per head, which starts as in "spread";
            {"name": "spread" or "learned", "longest": tokens}, where longest replaces 4096;
            "retnet": 1 - 2^(-5 - i) for head i (arXiv 2307.08621): half-lives of 22, 44, 88 .. tokens.
        forget_gate: whether a decay is computed from x, besides a fixed one. True, or {"longest": 4096}. The
            half-lives start as in decay="spread" (``linrope.layer.selective.ForgetGate``). With {"per": "feature"} each
            feature of a head has a gate of its own, or each pair that turns, as in Kimi Delta Attention: rank is that
            of the projection, and bound the largest decay (``linrope.layer.feature_gate.FeatureForgetGate``). Such a
            layer has no tied write_gate, and no rotation before the map. Causal self-attention only.
        write_gate: how much of a token's value enters the sums. The factor w per token and key/value head is with
            "tied" 1 - f with the forget gate f = e^a, so that what is forgotten makes room for what is written; with
            "independent" sigmoid(W_w x + b_w), which starts at the same values. Both require a forget_gate.
        erase_gate: the delta rule. A token's key reads a value from the state. Before the token writes, the share b of
            that value is taken out. b = sigmoid(W_b x + b_b) per token and key/value head is the argument ``erase`` of
            linear_rope_attention; with {"name": .., "largest": 2} it is twice that, from 0 to 2, which helps to track
            a state. With "tied" the gate writes too, w = b, and write_gate must be None: DeltaNet or, with a
            forget_gate, Gated DeltaNet. With "independent" w is that of the write_gate, or 1, and b starts near 0.
            Keys must not be much longer than 1: take feature_map="unit". It requires normalize=False. Causal
            self-attention only, without xPos and maps that return a log_scale.
        short_conv: the number of taps, usually 4, of a causal convolution on queries, keys and values before the map.
            Or the options of ``linrope.layer.short_convolution``: {"taps": 4, "activation": "silu", "bias": True,
            "start": "uniform"}. Models that have to recall earlier tokens need it. Causal self-attention only.
        qk_norm: RMS norm of each head's query and key before the map, with learned weights.
        out_norm: RMS norm of the output, with a learned weight. True or "head" (each head alone), "all" (all heads
            together), or {"over": "head" or "all", "eps": ..}; eps is 1e-6, or 1e-12 where the norm replaces the
            normalizer. A norm per head cancels the normalizer, a single number per token and
            head, so the layer leaves the normalizer out even if normalize=True. It keeps the normalizer for maps that
            return a log_scale, for float16, whose numerator alone may overflow, and with skip="before".
        skip: where to add D v, relative to the norm. v is the token's value without w, and D is a learned number per
            head of the output, which starts at 1.
        gate: whether to multiply by silu(W_g x). "after" the norm (also True), "before" it as in Mamba-2, or False.
        bias: whether the projections have a bias.
        rope_order: whether to rotate after the feature map (RoFormer eq. 19) or before it. With "before" the rotation
            has the size of the heads.
        backend: "auto", "native", "triton", "eager" or "reference", as in linear_rope_attention.

    Raises:
        TypeError: a size is not an integer, a switch is not a bool, or feature_map is of another type.
        ValueError: one size is not a multiple of another as required, a name is unknown, or two options do not fit
            together, such as a decay and causal=False.

    >>> from linrope.layer.config import LayerConfig
    >>> config = LayerConfig(256, 4, forget_gate=True, short_conv=4)
    >>> config.short_conv
    ShortConvOptions(taps=4, activation=None, bias=False, start='identity')
    >>> LayerConfig(**config.to_dict()) == config
    True
    """

    # metadata: what the commands' flag for the option takes: one of these names, any name, a number, or no value.
    embed_dim: int
    num_heads: int
    _: KW_ONLY
    num_kv_heads: int | None = None
    num_value_heads: int | None = None
    context_dim: int | None = None
    head_dim: int | None = None
    value_head_dim: int | None = None
    feature_map: dict[str, Any] | FeatureMap = field(  # type: ignore[assignment]
        default="elu+1", metadata={"flag": str}
    )
    rotary: dict[str, Any] | Rotary | nn.Module | None = field(
        default="interleaved", metadata={"flag": ROTATIONS}
    )  # type: ignore[assignment]
    causal: bool = True
    normalize: bool = True
    decay: DecayOptions | tuple[float, ...] | None = field(default=None, metadata={"flag": DECAYS})
    forget_gate: ForgetGateOptions | None = field(default=None, metadata={"flag": bool})
    write_gate: Literal["tied", "independent"] | None = field(default=None, metadata={"flag": WRITE_GATES})
    erase_gate: EraseGateOptions | None = field(default=None, metadata={"flag": ERASE_GATES})
    short_conv: ShortConvOptions | None = field(default=None, metadata={"flag": int})
    qk_norm: bool = field(default=False, metadata={"flag": bool})
    out_norm: OutNormOptions | None = field(default=None, metadata={"flag": bool})
    skip: Order | None = field(default=None, metadata={"flag": ORDERS})
    gate: Order | None = field(default=None, metadata={"flag": bool})
    bias: bool = False
    rope_order: Literal["after", "before"] = "after"
    backend: str = field(default="auto", metadata={"flag": str})

    if TYPE_CHECKING:  # options may be given in short, which the types of the fields do not say

        def __init__(self, embed_dim: int, num_heads: int, **options: Unpack[LayerOptions]) -> None: ...

    def __post_init__(self) -> None:
        self._check_sizes()
        check_bools(**{each.name: getattr(self, each.name) for each in fields(self) if each.type == "bool"})
        forms: dict[str, Any] = {
            "feature_map": map_options(self.feature_map),
            "rotary": rotary_options(self.rotary),
            "decay": decay_options(self.decay, self.num_state_heads),
            "forget_gate": options_of(ForgetGateOptions, self.forget_gate),
            "erase_gate": options_of(EraseGateOptions, self.erase_gate),
            "short_conv": options_of(ShortConvOptions, self.short_conv),
            "out_norm": options_of(OutNormOptions, self.out_norm),
            "gate": gate_order(self.gate),
        }
        for name, form in forms.items():
            object.__setattr__(self, name, form)
        if self.skip is not None:
            check_name("skip", self.skip, ORDERS, also="None")
        if self.write_gate is not None:
            check_name("write_gate", self.write_gate, WRITE_GATES, also="None")
        check_name("rope_order", self.rope_order, ROPE_ORDERS)
        self._check_together()

    def _check_sizes(self) -> None:
        sizes = {name: getattr(self, name) for name in SIZES}
        check_integers(**sizes)
        for name, size in sizes.items():
            if size is not None and size > LARGEST:
                raise ValueError(f"{name}={size}: expected at most {LARGEST}")
        check_sizes(embed_dim=self.embed_dim, num_heads=self.num_heads, context_dim=self.context_dim)
        h, g = self.num_heads, self.groups
        if g < 1 or h % g:
            raise ValueError(f"num_kv_heads={g}: expected a divisor of num_heads={h}")
        if self.head_dim is None and self.embed_dim % h:
            raise ValueError(f"embed_dim={self.embed_dim}: expected a multiple of num_heads={h}")
        if self.key_dim < 1 or self.value_dim < 1:
            raise ValueError(f"head_dim={self.key_dim}, value_head_dim={self.value_dim}: expected at least 1")
        if (value_heads := self.num_value_heads) is None:
            return
        if g != h:
            raise ValueError(
                f"num_value_heads={value_heads}: expected None, as num_kv_heads={g} differs from num_heads={h}"
            )
        if value_heads < 1 or value_heads % h:
            raise ValueError(f"num_value_heads={value_heads}: expected a multiple of num_heads={h}")

    def _check_together(self) -> None:
        """Raises ValueError if options do not fit together."""
        if self.write_gate is not None and self.forget_gate is None:
            raise ValueError(f"write_gate={self.write_gate!r}: expected a forget_gate with it, or None")
        if self.has_gates_per_feature:
            self._check_gates_per_feature()
        if self.write_gate is not None and self.tied_erase_gate:
            raise ValueError(
                f"write_gate={self.write_gate!r}: expected None with erase_gate='tied', which writes too"
            )
        if self.erase_gate is not None and self.normalize:
            raise ValueError(
                "erase_gate: got normalize=True, expected normalize=False, and keys of length 1: feature_map='unit'"
            )
        if self.context_dim not in (None, self.embed_dim) and (options := self.options_of_one_sequence):
            raise ValueError(
                f"context_dim={self.context_dim}: got {options[0]}, for which key t and query t must be the same "
                f"token; expected None or embed_dim={self.embed_dim}"
            )
        if not self.causal:
            for name in FORWARD_IN_TIME:
                if getattr(self, name):
                    raise ValueError(
                        f"{name}: got causal=False, expected causal=True, because it runs forward in time"
                    )
            if self.decay is not None:
                raise ValueError(
                    "decay: got causal=False, expected causal=True: keys decay towards later queries"
                )
        if self.rope_order == "before" and self.has_selective_steps:
            raise ValueError(
                "rope_order='before': got selective steps, which rotate features; expected 'after'"
            )

    def _check_gates_per_feature(self) -> None:
        if self.write_gate == "tied":
            raise ValueError(
                "write_gate='tied': got a forget_gate per feature, expected 'independent', None or a gate per head"
            )
        if self.rope_order == "before" and self.rotary is not None:
            raise ValueError(
                "rope_order='before': got a forget_gate per feature, expected 'after' or a gate per head"
            )

    @property
    def groups(self) -> int:
        """g, the heads of keys."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def key_dim(self) -> int:
        """d, the size of a query and a key."""
        return self.embed_dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def value_dim(self) -> int:
        """e, the size of a value."""
        return self.key_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def num_state_heads(self) -> int:
        """The heads of values, decay, gates and state."""
        return self.groups if self.num_value_heads is None else self.num_value_heads

    @property
    def has_gates_per_feature(self) -> bool:
        """Whether the features of a head decay at rates of their own."""
        return self.forget_gate is not None and self.forget_gate.per == "feature"

    @property
    def tied_erase_gate(self) -> bool:
        """Whether the erase gate computes the write factor too."""
        return self.erase_gate is not None and self.erase_gate.name == "tied"

    @property
    def has_selective_steps(self) -> bool:
        """Whether a module computes angle_steps from x."""
        if self.rotary is None or isinstance(self.rotary, dict):
            return self.rotary is not None and "name" in self.rotary
        from linrope.rotation.rotary import Rotary

        return not isinstance(self.rotary, Rotary)

    @property
    def options_of_one_sequence(self) -> list[str]:
        """The chosen options for which key t and query t are the same token."""
        chosen = [name for name in (*FORWARD_IN_TIME, "skip") if getattr(self, name)]
        return [*chosen, "rotary='selective'"] if self.has_selective_steps else chosen

    @classmethod
    def block(cls, embed_dim: int, num_heads: int, **changes: Unpack[LayerOptions]) -> LayerConfig:
        """The attention of this library's models, with these changes, which are options of LayerConfig.

        Where changes say nothing:

            always: value_head_dim is twice head_dim, a quarter of the features is rotated, out_norm and gate are True,
                and skip is "after".
            causal=True: short_conv has 4 taps, SiLU and a bias. There is a forget_gate, unless changes set the decay.
                decay is None, or "spread" if changes turn the forget gate off and leave the rotation. write_gate is
                "tied" to a forget gate per head, unless a tied erase gate writes.
            erase_gate: normalize is False. feature_map is "unit" as in Gated DeltaNet with a tied gate, elu+1 divided
                by its length with another.

        docs/evidence.md says what each part is worth.

        >>> from linrope.layer.config import LayerConfig
        >>> LayerConfig.block(256, 8).write_gate, LayerConfig.block(256, 8, forget_gate=False).decay
        ('tied', DecayOptions(name='spread', longest=4096.0))
        """
        check_keywords("LayerConfig.block", changes, [*OPTIONS])
        check_sizes(embed_dim=embed_dim, num_heads=num_heads)
        options: dict[str, Any] = {"rotary": {"partial_rotary_factor": 1 / 4}}
        options |= {"out_norm": True, "skip": "after", "gate": True} | changes
        if options.get("value_head_dim") is None:
            options["value_head_dim"] = 2 * (options.get("head_dim") or embed_dim // num_heads)
        if options.get("causal", True):
            conv = ShortConvOptions(taps=4, activation="silu", bias=True, start="uniform")
            options = {"short_conv": conv, "forget_gate": "decay" not in changes} | options
            gate = options_of(ForgetGateOptions, options["forget_gate"])
            decay = "spread" if gate is None and options["rotary"] is not None else None
            erase = options_of(EraseGateOptions, options.get("erase_gate"))
            tied = erase is not None and erase.name == "tied"
            writes = gate is not None and gate.per == "head" and not tied
            options = {"write_gate": "tied" if writes else None, "decay": decay} | options
            if erase is not None:
                unit = {"name": "unit"} if tied else {"name": "unit", "activation": "elu+1"}
                options = {"feature_map": unit, "normalize": False} | options
        return cls(embed_dim, num_heads, **options)

    def with_longest(self, tokens: float) -> LayerConfig:
        """The same layer, with half-lives that start at up to this many tokens."""
        longest: dict[str, Any] = {}
        for name in ("decay", "forget_gate"):
            if getattr(getattr(self, name), "longest", None) is not None:
                longest[name] = replace(getattr(self, name), longest=tokens)
        return replace(self, **longest)

    def shared(self) -> dict[str, Any]:
        """The options that softmax attention has too."""
        return {name: getattr(self, name) for name in SHARED}

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON types, from which ``LayerConfig(**values)`` makes an equal config.

        Raises:
            ValueError: an option is an object, such as a module.
        """
        return {each.name: as_json(each.name, getattr(self, each.name)) for each in fields(self)}


# Options of the parts around the attention, and all that softmax attention has too.
PARTS = ("short_conv", "qk_norm", "out_norm", "skip", "gate")
SHARED = ("num_kv_heads", "head_dim", "value_head_dim", "causal", "bias", *PARTS)
OPTIONS = {each.name: each for each in fields(LayerConfig) if each.name not in ("embed_dim", "num_heads")}
DEFAULTS = {name: each.default for name, each in OPTIONS.items()}
shows(DEFAULTS)(LayerConfig.block.__func__)  # type: ignore[attr-defined]
