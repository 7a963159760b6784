"""The models: variants of LanguageModel's options, all with as many parameters as softmax attention's."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.study import peers
from benchmarks.study.images import Encoder, Images
from benchmarks.study.mad import Compression, Decoder
from benchmarks.study.tasks import Task
from linrope import LinearRoPEAttention
from linrope.layer.selective import EraseGate
from linrope.models import LanguageModel, LanguageModelConfig

Options = dict[str, Any]
TOLERANCE = 0.01  # of the number of parameters
LENGTH = "the task's length"  # stands for Task.longest_half_life

# The layer alone with output norm and gate, and GPT-2's initial weights. Variants without "parts" are made of it.
_BARE: Options = {
    "short_conv": None,
    "skip": None,
    "decay": None,
    "forget_gate": False,
    "write_gate": None,
    "rotary": "interleaved",
    "init": "gpt-2",
}
# The parts of the default block, in the order in which the ladder adds them.
PARTS: dict[str, Options] = {
    "init": {"init": "fan-in"},
    "conv": {"short_conv": {"taps": 4, "activation": "silu", "bias": True, "start": "uniform"}},
    "skip": {"skip": "after"},
    "wide": {"values": "wide"},
    "heads": {"heads": "many"},
    "write": {"write_gate": "tied"},
}
_SOFTMAX: Options = {"attention": "softmax"}
_PLAIN: Options = {"positions": "none"}  # in the words of the results: rotary=None
_SPREAD: Options = {"decay": {"name": "spread", "longest": LENGTH}}
_GATE: Options = {"forget_gate": {"longest": LENGTH}}
_LADDER = list(PARTS)
_BLOCK: Options = _GATE | {"parts": _LADDER}
# The norm over all heads behind skip and gate, as in Mamba-2, which suits softmax attention better than one per head.
_GATED_NORM: Options = {"skip": "before", "gate": "before", "out_norm": "all"}
_SOFTMAX_BLOCK: Options = _SOFTMAX | _GATED_NORM | {"parts": ["init", "conv", "skip", "wide"]}
# What Mamba-3 adds: a bias on normed queries and keys, and the trapezoidal rule. The layer has neither any more: models
# with them stand here for the results that were kept, and no plan has them.
_BIAS: Options = {"qk_norm": True, "qk_bias": True}
_TRAPEZOID: Options = {"trapezoid": True}
# As in the block of the models: the first quarter of the features is rotated.
_QUARTER: Options = {"rotary": {"partial_rotary_factor": 0.25}}
_ADD: Options = {"rotary": {"name": "selective", "bound": "add"}}
_AXIAL: Options = {"rotary": {"axes": 2, "base": 10.0}}
# The delta rule in the default block, with b up to 1 or 2. A tied gate takes the place of the write gate.
_ERASE: Options = _BLOCK | _QUARTER | {"erase_gate": "independent"}
_ERASE_2: Options = _ERASE | {"erase_gate": {"name": "independent", "largest": 2}}
_TIED_2: Options = _ERASE | {"erase_gate": {"name": "tied", "largest": 2}, "write_gate": None}
_UNIT_ELU: Options = {"feature_map": {"name": "unit", "activation": "elu+1"}}
_UNROTATED: Options = {"rotary": None}
_HALF: Options = {"erase_bias": 0.0}
_PER_FEATURE: Options = {"forget_gate": {"longest": LENGTH, "per": "feature"}, "write_gate": None}
_KIMI: Options = _ERASE | _PER_FEATURE | _UNROTATED | {"erase_gate": "tied"}
_KIMI_LARGE: Options = _KIMI | {"parts": ["init", "conv", "skip", "write"]}
_KIMI_SLOW: Options = _KIMI | {"parts": ["conv", "skip"], "forget_gate": {"longest": 4096, "per": "feature"}}

# name -> (family, which shares its learning rates; options). Linear ones have the output norm and the gate
# silu(W x), unless they say otherwise. "parts": those of PARTS that are added to the bare layer. "order" is
# LinearRoPEAttention's rope_order; "softmax_layer": this layer is softmax attention in its block; "mixers": twice
# the layers, without feed-forward networks; "erase_bias": where the bias of the erase gate starts.
VARIANTS: dict[str, tuple[str, Options]] = {
    "softmax-rope": ("softmax", _SOFTMAX),
    "eq19": ("linear", {}),
    "linear": ("linear", _PLAIN),
    "rope-before": ("linear", {"order": "before"}),
    "eq19-normalizer": ("linear", {"out_norm": False}),
    "axial": ("linear", _AXIAL),
    "axial-before": ("linear", _AXIAL | {"order": "before"}),
    "spread": ("decay", _SPREAD),
    "spread-unrotated": ("decay", _SPREAD | _PLAIN),
    "retnet": ("decay", {"decay": "retnet"}),
    "learned": ("decay", {"decay": {"name": "learned", "longest": LENGTH}}),
    "spread-relu2": ("decay", _SPREAD | {"feature_map": "relu2"}),
    "spread-exp": ("decay", _SPREAD | {"feature_map": "exp"}),
    "spread-favor+": ("decay", _SPREAD | {"feature_map": {"name": "favor+", "num_features": 32, "seed": 0}}),
    "spread-hedgehog": ("decay", _SPREAD | {"feature_map": "hedgehog"}),
    "spread-taylor2": ("decay", _SPREAD | {"feature_map": "taylor2"}),
    "gate-rope": ("gate", _GATE),
    "gate": ("gate", _GATE | _PLAIN),
    **{
        f"gate-rope+{part}": ("ladder", _GATE | {"parts": _LADDER[: i + 1]})
        for i, part in enumerate(_LADDER[:-1])
    },
    # The initial weights of the block alone, in each family.
    "softmax-rope+init": ("softmax+init", _SOFTMAX | PARTS["init"]),
    "eq19+init": ("linear+init", PARTS["init"]),
    "spread+init": ("decay+init", _SPREAD | PARTS["init"]),
    "block": ("block", _BLOCK | _QUARTER),
    "block-all-rotated": ("block", _BLOCK),
    "block-unrotated": ("block", _BLOCK | _PLAIN),
    "block-selective-add": ("block", _BLOCK | _ADD),
    "block-identity": ("block", _BLOCK | {"feature_map": "identity", "normalize": False}),
    "block-bias": ("block", _BLOCK | _BIAS),
    "block-trapezoid": ("block", _BLOCK | _TRAPEZOID),
    "block-bias-trapezoid": ("block", _BLOCK | _BIAS | _TRAPEZOID),
    "block-no-conv": ("block", _BLOCK | {"short_conv": None}),
    "block-no-skip": ("block", _BLOCK | {"skip": None}),
    "block-bias-trapezoid-no-conv": ("block", _BLOCK | _BIAS | _TRAPEZOID | {"short_conv": None}),
    "block-feature": ("block", _BLOCK | _QUARTER | _PER_FEATURE),
    "block-hybrid": ("block", _BLOCK | _QUARTER | {"softmax_layer": -1}),
    "block-hybrid-first": ("block", _BLOCK | _QUARTER | {"softmax_layer": 0}),
    "block-erase": ("block-erase", _ERASE),
    "block-erase-elu": ("block-erase", _ERASE | _UNIT_ELU),
    "block-erase-elu-unrotated": ("block-erase", _ERASE | _UNIT_ELU | _UNROTATED),
    "block-erase-elu-half": ("block-erase", _ERASE | _UNIT_ELU | _HALF),
    "block-erase-2-elu": ("block-erase", _ERASE_2 | _UNIT_ELU),
    "block-feature-erase-2": ("block-erase", _ERASE_2 | _UNIT_ELU | _PER_FEATURE),
    "block-kimi": ("block-kimi", _KIMI),
    "block-kimi-large": ("block-kimi", _KIMI_LARGE),
    "block-kimi-slow": ("block-kimi-slow", _KIMI_SLOW),
    "block-tied-2": ("block-erase", _TIED_2),
    "block-tied-2-unrotated": ("block-erase", _TIED_2 | _UNROTATED),
    "block-tied-2-selective-add": ("block-erase", _TIED_2 | _ADD),
    "block-feature-tied-2": ("block-erase", _TIED_2 | _PER_FEATURE),
    "block-mixers": ("block-mixers", _BLOCK | _QUARTER | {"mixers": True}),
    "block-mixers-all-rotated": ("block-mixers", _BLOCK | {"mixers": True}),
    "block-softmax": ("block-softmax", _SOFTMAX_BLOCK | _QUARTER),
    "block-softmax-all-rotated": ("block-softmax", _SOFTMAX_BLOCK),
    **{name: (name, {}) for name in peers.PEERS},
}


# What the models are, for the page of tables.
WORDS: dict[str, str] = {
    "softmax-rope": "softmax attention with RoPE; no norm, no gate, GPT-2's initial weights",
    "eq19": "equation 19 with the norm of each head in place of its denominator and the gate silu(W x); no decay; "
    "GPT-2's initial weights, like all models without `block` and `+`",
    "linear": "`eq19` without rotation (equation 18)",
    "rope-before": "`eq19`, but queries and keys are rotated before the map",
    "eq19-normalizer": "`eq19` with its denominator and without the norm",
    "axial": "`eq19` with rotation by row and column",
    "axial-before": "`axial`, rotated before the map",
    "spread": "`eq19` with fixed decays: half-lives spread from one token to the trained length",
    "spread-unrotated": "`spread` without rotation",
    "retnet": "`eq19` with RetNet's decays",
    "learned": "`spread` as the start of a learned decay per head",
    "spread-relu2": "`spread` with relu^2 in place of elu+1",
    "spread-exp": "`spread` with exp, and the denominator",
    "spread-favor+": "`spread` with FAVOR+ of 32 features, and the denominator",
    "spread-hedgehog": "`spread` with hedgehog; twice the state",
    "spread-taylor2": "`spread` with the Taylor map of second order",
    "gate-rope": "`eq19` with a forget gate",
    "gate": "`gate-rope` without rotation",
    "gate-rope+init": "`gate-rope` with the block's initial weights",
    "gate-rope+conv": "the row above with the convolution",
    "gate-rope+skip": "the row above with the skip D v",
    "gate-rope+wide": "the row above with values twice as wide as keys",
    "gate-rope+heads": "the row above with twice as many heads of half the size",
    "softmax-rope+init": "`softmax-rope` with the block's initial weights",
    "eq19+init": "`eq19` with the block's initial weights",
    "spread+init": "`spread` with the block's initial weights",
    "block": "**the default block**: the last row of `gate-rope+` with the tied write gate, and a quarter of "
    "the features rotated",
    "block-all-rotated": "the default block, all features rotated",
    "block-unrotated": "the default block, no feature rotated",
    "block-selective-add": "the default block with selective rotation of all features, `bound=\"add\"`",
    "block-identity": "`block-all-rotated` without a feature map",
    "block-bias": "`block-all-rotated` with Mamba-3's bias on normed queries and keys",
    "block-trapezoid": "`block-all-rotated` with Mamba-3's trapezoid",
    "block-bias-trapezoid": "`block-all-rotated` with both",
    "block-no-conv": "`block-all-rotated` without the convolution",
    "block-no-skip": "`block-all-rotated` without the skip",
    "block-bias-trapezoid-no-conv": "`block-all-rotated` with bias and trapezoid in place of the convolution",
    "block-feature": "the default block with a forget gate per feature, and so without a write gate",
    "block-hybrid": "the default block; the last layer is `block-softmax`'s",
    "block-hybrid-first": "the default block; the first layer is `block-softmax`'s",
    "block-erase": "the default block with the delta rule: keys of length 1, an erase gate b in (0, 1) that starts "
    "near 0",
    "block-erase-elu": "`block-erase` with elu+1 before keys and queries are divided by their length",
    "block-erase-elu-unrotated": "`block-erase-elu`, no feature rotated",
    "block-erase-elu-half": "`block-erase-elu` with a gate that starts at 1/2",
    "block-erase-2-elu": "`block-erase-elu` with b in (0, 2)",
    "block-feature-erase-2": "`block-erase-2-elu` with a forget gate per feature, and so without a write gate",
    "block-kimi": "Kimi Delta Attention's rule in the default block: a forget gate per feature, a tied erase gate in "
    "(0, 1), keys of both signs divided by their length, no feature rotated",
    "block-kimi-large": "`block-kimi` with half as many heads of keys twice as long, and values as wide as keys",
    "block-kimi-slow": "`block-kimi-large` with GPT-2's initial weights, and half-lives of up to 4,096 tokens",
    "block-tied-2": "`block-erase` with a tied gate in (0, 2), which writes too and starts at 1: Gated DeltaNet's rule",
    "block-tied-2-unrotated": "`block-tied-2`, no feature rotated",
    "block-tied-2-selective-add": "`block-tied-2` with selective rotation of all features, `bound=\"add\"`",
    "block-feature-tied-2": "`block-tied-2` with a forget gate per feature: Kimi Delta Attention's rule",
    "block-mixers": "the default block without feed-forward networks: twice the layers, one query and key for "
    "all heads, three times the state",
    "block-mixers-all-rotated": "`block-mixers`, all features rotated",
    "block-softmax": "softmax attention in nearly the same block: no write gate, half as many heads of twice the "
    "size, one norm over all heads, behind skip and gate",
    "block-softmax-all-rotated": "`block-softmax`, all features rotated",
    "llama": "transformers' Llama",
    "gpt-2": "transformers' GPT-2, which nanoGPT's model follows",
    "mamba-2": "transformers' Mamba-2: twice the layers, no feed-forward networks",
    "gated-deltanet": "transformers' Qwen3-Next with its linear layer everywhere and dense feed-forward networks",
    "kimi-linear": "transformers' Kimi Linear with its linear layer everywhere and dense feed-forward networks",
    "minimax": "transformers' MiniMax with its linear layer everywhere and one expert",
}  # fmt: skip


class Logits(nn.Module):
    """A model of which nothing but the logits is wanted. A decoder makes them of the last token's output."""

    def __init__(
        self, model: nn.Module, options: Options, read: Callable[[nn.Module, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.model, self.options, self.read = model, options, read
        self.decoder: nn.Module | None = None
        self.autocast: torch.dtype | None = None  # the dtype in which the model runs

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, self.autocast, enabled=self.autocast is not None):
            out = self.read(self.model, inputs).float()
        return out if self.decoder is None else self.decoder(out)


def family(name: str) -> str:
    return VARIANTS[name][0]


def build(name: str, task: Task, seed: int = 0) -> Logits:
    """The model, its weights drawn from that seed; ``options`` are what it takes to build it again.

    Raises:
        ValueError: it cannot be made to have as many parameters as "softmax-rope".
    """
    start = 16 if VARIANTS[name][1].get("mixers") else task.hidden_dim
    start = peers.PEERS[name].start if name in peers.PEERS else start

    def make(size: int) -> Logits:
        return Logits(*peers.make(name, task, size)) if name in peers.PEERS else _make(name, task, size)

    with torch.device("meta"):
        target = _target(task)
        size = fit(lambda size: num_parameters(make(size)), target, start)
    torch.manual_seed(seed)
    model = make(size)
    check_parameters(name, num_parameters(model), target)
    if isinstance(task, Compression):
        model.decoder = Decoder(task.dim, task.length, task.vocab_size)
        model.read = peers.last_output if name in peers.PEERS else _last_output
    return model


@cache
def _target(task: Task) -> int:
    with torch.device("meta"):
        return num_parameters(_make("softmax-rope", task, task.hidden_dim))


def fit(count: Callable[[int], int], target: int, start: int) -> int:
    """The size that brings ``count``, which grows evenly with it, nearest to target."""
    first, second = count(start), count(start + 8)
    return max(1, start + round((target - first) * 8 / (second - first)))


def check_parameters(name: str, parameters: int, target: int) -> None:
    if abs(parameters - target) > TOLERANCE * target:
        raise ValueError(f"{name}: got {parameters} parameters, expected {target} within {TOLERANCE:.0%}")


def state_numbers(model: nn.Module) -> int | None:
    """The size for all layers together; None: it grows with the sequence, or is unknown."""
    layers = [x for x in model.modules() if isinstance(x, LinearRoPEAttention)]
    blocks = getattr(getattr(model, "model", model), "blocks", [])
    if not layers or len(layers) < len(blocks):
        return None
    return sum(x.num_state_heads * x.feature_map.feature_dim * x.value_head_dim for x in layers)


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _make(name: str, task: Task, hidden_dim: int) -> Logits:
    options = _with_length(VARIANTS[name][1], task.longest_half_life)
    if options.pop("positions", None) == "none":
        options["rotary"] = None
    if isinstance(task, Images):
        layer = {"rope_order" if key == "order" else key: value for key, value in options.items()}
        return Logits(Encoder(task, layer, hidden_dim), layer | {"hidden_dim": hidden_dim}, _call)
    order, softmax_layer = options.pop("order", "after"), options.pop("softmax_layer", None)
    erase_bias = options.pop("erase_bias", None)
    sizes: Options = {"vocab_size": task.vocab_size, "embed_dim": task.dim, "num_layers": task.layers}
    config = LanguageModelConfig(**(sizes | _block(options, task, hidden_dim)), rope_order=order)
    model = LanguageModel(config)
    if softmax_layer is not None:
        softmax = LanguageModelConfig(**(sizes | _block(dict(_SOFTMAX_BLOCK | _QUARTER), task, hidden_dim)))
        model.blocks[softmax_layer] = LanguageModel(softmax).blocks[softmax_layer]
    if erase_bias is not None:
        for layer in model.modules():
            if isinstance(layer, EraseGate):
                nn.init.constant_(layer.bias, erase_bias)
    settings = {"order": order, "softmax_layer": softmax_layer, "erase_bias": erase_bias}
    return Logits(model, config.to_dict() | settings, _first)


def _block(options: Options, task: Task, size: int) -> Options:
    """The fields of LanguageModelConfig for a variant; size: what brings it to the parameters of the others.

    Many heads are twice as many of half the size, wide values are twice as wide as keys: with both, the state has as
    many numbers as without either. A model of mixers alone has twice the layers, and all heads share one query and key,
    whose size is free.
    """
    parts, mixers = options.pop("parts", []), options.pop("mixers", False)
    for part in parts:
        options = {key: x for key, x in PARTS[part].items() if key not in ("values", "heads")} | options
    many, wide = 1 + ("heads" in parts), 1 + ("wide" in parts)
    heads, head_dim = task.heads * many, task.head_dim // many
    shape: Options = {
        "num_heads": heads,
        "head_dim": head_dim,
        "value_head_dim": head_dim * wide,
        "hidden_dim": size,
    }
    if mixers:
        shape |= {
            "num_heads": 1,
            "num_value_heads": heads,
            "head_dim": max(2, 2 * (size // 2)),
            "feed_forward": False,
        }
        shape |= {"num_layers": 2 * task.layers, "hidden_dim": None}
    softmax = options.get("attention") == "softmax"
    bare = _BARE | ({"gate": False, "out_norm": False} if softmax and not parts else {})
    unit: Options = {"feature_map": "unit", "normalize": False} if options.get("erase_gate") else {}
    return bare | unit | options | shape


def _with_length(options: Any, length: int) -> Any:
    if isinstance(options, dict):
        return {key: _with_length(value, length) for key, value in options.items()}
    return length if options == LENGTH else options


def _first(model: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = model(tokens, return_states=False)[0]
    return logits


def _last_output(model: nn.Module, tokens: Tensor) -> Tensor:
    """The last token's output (b, dim) of the model's last norm."""
    found: list[Tensor] = []
    hook = model.norm.register_forward_hook(lambda module, inputs, output: found.append(output))
    model(tokens, return_states=False, logits_to_keep=1)
    hook.remove()
    return found[0][:, 0]


def _call(model: nn.Module, images: Tensor) -> Tensor:
    logits: Tensor = model(images)
    return logits
