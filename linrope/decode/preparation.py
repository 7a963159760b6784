"""Prepares a decoding step once for all tokens of a loop, or says why a module's own call must take them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from linrope.backends import native
from linrope.common.private_names import has_global_hooks, watched
from linrope.decode.model_step import ModelStep
from linrope.decode.parts import DecodableModel, ModelParts
from linrope.layer.attention import LinearRoPEAttention
from linrope.layer.state import LayerState
from linrope.layer.step import step_of
from linrope.layer.step_reasons import why_not_calls, why_not_state, why_not_weights


def prepare(model: DecodableModel | ModelParts, states: Sequence[LayerState]) -> ModelStep:
    """Prepares the decoding steps of a model: a function that takes the next token of each sequence.

        logits = model(tokens, states)[0]         tokens (b, 1) -> (b, 1, vocab_size)

    The step computes what the model computes, without gradients, with far fewer calls of PyTorch. Model and states
    are checked here, once, and a call checks only its own tokens and slots. It is for float32 on a CPU. Every call
    overwrites the states given here with the next ones, from which the model too can continue. step(tokens, slots)
    with slots (b,) int64 takes the rows of the states at the slots, and leaves the other rows alone. It reads the
    weights in place: prepare a new step after a module has been replaced.

    Args:
        model: one such as ``linrope.models.LanguageModel``, or the parts of a model.
        states: the states after the last token, one per block. Do not donate these objects to other calls while the
            step is in use.

    Raises:
        ValueError: ``why_not(model, states)`` has a reason why only the model's own call can take the step.

    >>> from linrope.decode import prepare, why_not
    >>> from linrope.models import LanguageModel, LanguageModelConfig
    >>> model = LanguageModel(LanguageModelConfig(embed_dim=32, num_layers=2, num_heads=2)).requires_grad_(False)
    >>> tokens = torch.randint(256, (1, 10))
    >>> states = model(tokens[:, :9])[1]
    >>> if why_not(model, states) is None:
    ...     step = prepare(model, states)
    ...     torch.testing.assert_close(step(tokens[:, 9:]), model(tokens)[0][:, 9:], rtol=1e-4, atol=1e-5)
    """
    if (reason := why_not(model, states)) is not None:
        raise ValueError(f"a prepared decoding step is impossible here: {reason}")
    return ModelStep(model if isinstance(model, ModelParts) else model.decoding_parts(), states)


def why_not(model: object, states: Any) -> str | None:
    """The reason why ``prepare`` refuses these arguments; None: it takes them."""
    if isinstance(model, ModelParts):
        return _why_not_parts(model, states)
    if isinstance(model, DecodableModel):
        parts = model.decoding_parts()
        whole: object = parts.model
        if whole is model:  # not a wrapper that passes this method on, and computes something else
            return _why_not_parts(parts, states)
    return f"a module of another kind, {type(model).__name__}"


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
    if has_global_hooks():
        return "a hook on all modules"
    return "autocast" if torch.is_autocast_enabled("cpu") else None
