"""Lets generate() use prepared decoding steps if the model and its cache allow that."""

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from linrope.decode.model_step import ModelStep
from linrope.decode.parts import BlockParts, ModelParts
from linrope.decode.reasons import why_not
from linrope.decode.step import prepare
from linrope.layer.norm import RMSNorm


class _Prepared:
    """The prepared step of one call of generate(). The first one-token call on a cache with states makes it."""

    def __init__(self) -> None:
        self.step: ModelStep | None = None
        self.model: nn.Module | None = None  # the model that the step was made for, or could not be made for


_prepared: ContextVar[_Prepared | None] = ContextVar("linrope_prepared_step", default=None)


def with_prepared_steps(generate: Callable[..., Any]) -> Any:
    """generate(), inside which the model's calls may take prepared steps, since weights do not change there."""

    @wraps(generate)
    def call(*arguments: Any, **options: Any) -> Any:
        token = _prepared.set(_Prepared())
        try:
            return generate(*arguments, **options)
        finally:
            _prepared.reset(token)

    return call


def step_of_generate(
    model: Any,
    cache: Any,
    x: Tensor,
    positions: Tensor | None,
    output_hidden_states: bool | None = None,
    **_: Any,
) -> Tensor | None:
    """One token x (b, 1, hidden_size) through all layers and the norm. None: the layers have to be called one by one.

    The states of the cache are overwritten.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or x.shape[1] != 1:
        return None
    if output_hidden_states or getattr(model.config, "output_hidden_states", False):
        return None
    prepared = _prepared.get()
    if prepared is None:
        return None
    states = [layer.state for layer in cache.layers]
    if prepared.model is None and None not in states:
        prepared.model = model
        parts = _parts_of(model)
        prepared.step = None if why_not(parts, states) else prepare(parts, states)
    step = prepared.step
    if step is None or prepared.model is not model or not all(map(is_, states, step.states)):
        return None  # beams, for example, have put other states into the cache
    if positions is not None and not torch.equal(positions.flatten().long(), states[0].position):
        return None
    cache.length += 1
    return step(x)


def _parts_of(model: Any) -> ModelParts:
    layers = model.layers
    kinds = type(model), type(layers[0]), type(layers[0].mlp), nn.Embedding, nn.ModuleList, RMSNorm, nn.Linear
    blocks = [
        BlockParts(
            x.input_layernorm,
            x.self_attn,
            x.post_attention_layernorm,
            x.mlp.gate_proj,
            x.mlp.down_proj,
            x.mlp.up_proj,
        )
        for x in layers
    ]
    return ModelParts(model, kinds, blocks, model.norm)
