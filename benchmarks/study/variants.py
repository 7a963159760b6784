"""The models: variants of LanguageModel's options, all with as many parameters as softmax attention's."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.study import peers
from benchmarks.study.images import Encoder, Images
from benchmarks.study.tasks import Task
from linrope import LinearRoPEAttention
from linrope.models import LanguageModel, LanguageModelConfig

Options = dict[str, Any]
TOLERANCE = 0.01  # of the number of parameters
LENGTH = "the task's length"  # the longest half-life with which a decay starts

_SOFTMAX: Options = {"attention": "softmax"}
_PLAIN: Options = {"positions": "none"}
_RETNET: Options = {"decay": "retnet"}
_SPREAD: Options = {"decay": {"name": "spread", "longest": LENGTH}}
_LEARNED: Options = {"decay": {"name": "learned", "longest": LENGTH}}
_GATE: Options = {"forget_gate": {"longest": LENGTH}}
_SELECTIVE: Options = {"rotary": "selective"}
_ADD: Options = {"rotary": {"name": "selective", "bound": "add"}}
_CONV: Options = {"short_conv": 4}
_AXIAL: Options = {"rotary": {"axes": 2, "base": 10.0}}

# name -> (family, which shares its learning rates; options). Linear ones have the output norm and the gate
# silu(W x), unless they say otherwise. "order" is LinearRoPEAttention's rope_order; "softmax_last": the last
# layer is softmax attention with RoPE.
VARIANTS: dict[str, tuple[str, Options]] = {
    "softmax-rope": ("softmax", _SOFTMAX),
    "softmax-none": ("softmax", _SOFTMAX | _PLAIN),
    "softmax-sinusoidal": ("softmax", _SOFTMAX | {"positions": "sinusoidal"}),
    "eq19": ("linear", {}),
    "linear": ("linear", _PLAIN),
    "rope-before": ("linear", {"order": "before"}),
    "eq19-normalizer": ("linear", {"out_norm": False}),
    "axial": ("linear", _AXIAL),
    "axial-before": ("linear", _AXIAL | {"order": "before"}),
    "spread": ("decay", _SPREAD),
    "retnet": ("decay", _RETNET),
    "learned": ("decay", _LEARNED),
    "spread-relu2": ("decay", _SPREAD | {"feature_map": "relu2"}),
    "spread-exp": ("decay", _SPREAD | {"feature_map": "exp"}),
    "spread-favor+": ("decay", _SPREAD | {"feature_map": {"name": "favor+", "num_features": 32, "seed": 0}}),
    "spread-hedgehog": ("decay", _SPREAD | {"feature_map": "hedgehog"}),
    "spread-taylor2": ("decay", _SPREAD | {"feature_map": "taylor2"}),
    "spread-paired": ("decay", _SPREAD | {"feature_map": "paired"}),
    "spread-4096": ("decay", {"decay": "spread"}),
    "gate-rope": ("gate", _GATE),
    "gate": ("gate", _GATE | _PLAIN),
    "gate-selective": ("gate", _GATE | _SELECTIVE),
    "gate-selective-add": ("gate", _GATE | _ADD),
    "gate-rope-normalizer": ("gate", _GATE | {"out_norm": False}),
    "hybrid": ("gate", _GATE | {"softmax_last": True}),
    "gate-rope-conv": ("convolution", _GATE | _CONV),
    "learned-conv": ("convolution", _LEARNED | _CONV),
    "gate-conv": ("convolution", _GATE | _PLAIN | _CONV),
    "gate-selective-conv": ("convolution", _GATE | _SELECTIVE | _CONV),
    "linear-conv": ("convolution", _PLAIN | _CONV),
    "linear-conv-relu2": ("convolution", _PLAIN | _CONV | {"feature_map": "relu2"}),
    "linear-conv-hedgehog": ("convolution", _PLAIN | _CONV | {"feature_map": "hedgehog"}),
    "linear-conv-taylor2": ("convolution", _PLAIN | _CONV | {"feature_map": "taylor2"}),
    **{name: (name, {}) for name in peers.PEERS},
}


class Logits(nn.Module):
    """A model of which nothing but the logits is wanted."""

    def __init__(
        self, model: nn.Module, options: Options, read: Callable[[nn.Module, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.model, self.options, self.read = model, options, read

    def forward(self, inputs: Tensor) -> Tensor:
        return self.read(self.model, inputs)


def family(name: str) -> str:
    return VARIANTS[name][0]


def build(name: str, task: Task, seed: int = 0) -> Logits:
    """The model, its weights drawn from that seed; ``options`` are what it takes to build it again.

    Raises:
        ValueError: it cannot be made to have as many parameters as "softmax-rope".
    """
    target = _count(_make("softmax-rope", task, 3 * task.dim))
    if name in peers.PEERS:
        make: Callable[[int], Logits] = lambda size: Logits(*peers.make(name, task, size))  # noqa: E731
        size = fit(lambda size: _count(make(size)), target, peers.PEERS[name].start)
    else:
        make = lambda size: _make(name, task, size)  # noqa: E731
        size = fit(lambda size: _count(make(size)), target, 3 * task.dim)
    torch.manual_seed(seed)
    model = make(size)
    check_parameters(name, _count(model), target)
    return model


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
    return sum(x.num_kv_heads * x.feature_map.feature_dim * x.value_head_dim for x in layers)


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _make(name: str, task: Task, hidden_dim: int) -> Logits:
    options = _with_length(VARIANTS[name][1], task.length)
    if isinstance(task, Images):
        layer = {"rope_order" if key == "order" else key: value for key, value in options.items()}
        if layer.get("positions") == "none" and layer.get("attention") != "softmax":
            layer = {"rotary": None} | {key: x for key, x in layer.items() if key != "positions"}
        return Logits(Encoder(task, layer, hidden_dim), layer | {"hidden_dim": hidden_dim}, _call)
    order, softmax_last = options.pop("order", "after"), options.pop("softmax_last", False)
    sizes: Options = {
        "vocab_size": task.vocab_size,
        "embed_dim": task.dim,
        "num_heads": task.heads,
        "num_layers": task.layers,
        "decay": None,
    }
    config = LanguageModelConfig(**(sizes | options), hidden_dim=hidden_dim)
    model = LanguageModel(config)
    for block in model.blocks:
        if order != "after":
            cast(LinearRoPEAttention, block.attention).rope_order = order
    if softmax_last:
        softmax = LanguageModelConfig(**(sizes | _SOFTMAX), hidden_dim=hidden_dim)
        model.blocks[-1] = LanguageModel(softmax).blocks[-1]
    return Logits(model, asdict(config) | {"order": order, "softmax_last": softmax_last}, _first)


def _with_length(options: Any, length: int) -> Any:
    if isinstance(options, dict):
        return {key: _with_length(value, length) for key, value in options.items()}
    return length if options == LENGTH else options


def _first(model: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = model(tokens, return_states=False)[0]
    return logits


def _call(model: nn.Module, images: Tensor) -> Tensor:
    logits: Tensor = model(images)
    return logits
