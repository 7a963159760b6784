"""The reasons why a prepared step cannot take the place of a layer's or a model's own call."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from linrope.backends import native
from linrope.common.private_names import watched
from linrope.decode.parts import DecodableModel, ModelParts
from linrope.layer.attention import LinearRoPEAttention
from linrope.layer.step import step_of
from linrope.layer.step_reasons import why_not_calls, why_not_state, why_not_weights


def why_not(module: object, states: Any) -> str | None:
    """The reason why ``prepare`` refuses these arguments; None: it takes them."""
    if isinstance(module, LinearRoPEAttention):
        return _why_not_layer(module, states)
    if isinstance(module, ModelParts):
        return _why_not_parts(module, states)
    if isinstance(module, DecodableModel):
        parts = module.decoding_parts()
        model: object = parts.model
        if model is module:  # not a wrapper that passes this method on, and computes something else
            return _why_not_parts(parts, states)
    return f"a module of another kind, {type(module).__name__}"


def _why_not_parts(parts: ModelParts, states: Sequence[Any]) -> str | None:
    if len(states) != len(parts.blocks):
        return f"{len(states)} states for {len(parts.blocks)} blocks"
    attention: set[nn.Module] = set()
    for block, state in zip(parts.blocks, states, strict=True):
        if (reason := _why_not_layer(block.attention, state)) is not None:
            return reason
        if not torch.equal(state.position, states[0].position):
            return "states at different positions"
        attention.update(block.attention.modules())
    outside = [x for x in parts.model.modules() if x not in attention]
    if any(
        max(x.weight.shape) > native.MAX_VALUES
        for x in outside
        if isinstance(x, nn.Linear) and x is not parts.head
    ):
        return f"vectors of more than {native.MAX_VALUES} numbers"
    return why_not_calls(outside, parts.kinds) or why_not_weights(outside)


def _why_not_layer(layer: nn.Module, state: Any) -> str | None:
    """The reason why a step cannot take the place of the layer's call with a donated state; None: it can."""
    if not isinstance(layer, LinearRoPEAttention):
        return f"attention in {type(layer).__name__}"
    step = step_of(layer)
    return (
        _why_not_now()
        or step.why_not
        or why_not_calls([layer], (LinearRoPEAttention,))
        or why_not_weights([*layer.modules()])
        or why_not_state(layer, step.identity, state)
    )


def _why_not_now() -> str | None:
    """The reason why no step can take the place of a call at present; None: it can."""
    if watched():
        return "a compiler or a transformation that watches the call"
    return "autocast" if torch.is_autocast_enabled("cpu") else None
