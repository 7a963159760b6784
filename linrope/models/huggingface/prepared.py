"""Lets generate() use prepared decoding steps if the model and its cache allow that, or a CUDA graph on request."""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from linrope.common.argument_checks import check_bools
from linrope.cuda_graphs import GraphedStep, check_on_cuda
from linrope.decode.generation import check_fixed_size
from linrope.decode.model_step import ModelStep
from linrope.decode.parts import BlockParts, ModelParts
from linrope.decode.preparation import prepare, why_not
from linrope.layer.norm import RMSNorm
from linrope.models.huggingface.cache import copy_of


class _Prepared:
    """The step of one call of generate(). The first one-token call on a cache with states makes it."""

    def __init__(self, graph: bool) -> None:
        self.graph = graph  # True: the step is a graph, which takes every one-token call or raises an error
        self.step: ModelStep | _GraphOfLayers | None = None
        self.model: nn.Module | None = None  # the model that the step was made for, or could not be made for


_prepared: ContextVar[_Prepared | None] = ContextVar("linrope_prepared_step", default=None)


def with_prepared_steps(generate: Callable[..., Any]) -> Any:
    """generate(), inside which the model's calls may take prepared steps, since weights do not change there.

    With graph=True, on a CUDA device, they replay a graph.
    """

    @wraps(generate)
    def call(model: Any, *arguments: Any, graph: bool = False, **options: Any) -> Any:
        check_bools(graph=graph)
        if graph:
            check_on_cuda("graph=True", model.device)
        token = _prepared.set(_Prepared(graph))
        try:
            return generate(model, *arguments, **options)
        finally:
            _prepared.reset(token)

    return call


def step_of_generate(
    model: Any,
    cache: Any,
    x: Tensor,
    tokens: Mapping[str, Tensor | None],
    output_hidden_states: bool | None = None,
    **_: Any,
) -> Tensor | None:
    """One token x (b, 1, hidden_size) through all layers and the norm. None: the layers have to be called one by one.

    tokens: the layers' arguments positions and key_mask. The states of the cache are overwritten.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or x.shape[1] != 1:
        return None
    prepared = _prepared.get()
    if prepared is None:
        return None
    hidden = output_hidden_states or getattr(model.config, "output_hidden_states", False)
    states = [layer.state for layer in cache.layers]
    if prepared.graph:
        return _step_of_graph(prepared, model, cache, x, tokens, bool(hidden))
    if hidden or tokens["key_mask"] is not None:
        return None
    if prepared.model is None and None not in states:
        prepared.model = model
        parts = parts_of(model)
        prepared.step = None if why_not(parts, states) else prepare(parts, states)
    step, positions = prepared.step, tokens["positions"]
    if step is None or prepared.model is not model or not all(map(is_, states, step.states)):
        return None  # beams, for example, have put other states into the cache
    if positions is not None and not torch.equal(positions.flatten().long(), states[0].position):
        return None
    _count_token(cache)
    return step(x)


def _count_token(cache: Any) -> None:
    """Prepares the cache for a step that overwrites its states."""
    for kept in cache.layers:
        if kept.record_past:
            kept.record(copy_of(kept.state), 1)
    cache.length += 1


def _step_of_graph(
    prepared: _Prepared, model: Any, cache: Any, x: Tensor, tokens: Mapping[str, Tensor | None], hidden: bool
) -> Tensor | None:
    """``step_of_generate`` with graph=True. None: the call is a prompt of one token.

    Raises:
        ValueError: the graph cannot take the call.
    """
    states = [layer.state for layer in cache.layers]
    if None in states:
        return None
    if hidden:
        raise ValueError("output_hidden_states: got True with graph=True, expected False")
    if prepared.step is None:
        prepared.model, prepared.step = model, _GraphOfLayers(model, states, tokens)
    step = prepared.step
    if prepared.model is not model or not all(map(is_, states, step.states)):
        raise ValueError(
            "graph=True: got other states in the cache than in the step before, which beam search puts there; "
            "expected greedy search or sampling"
        )
    _count_token(cache)
    return step(x, *(given for given in tokens.values() if given is not None))


class _GraphOfLayers:
    """All layers and the norm, for one token of each sequence, in a CUDA graph."""

    def __init__(self, model: Any, states: Sequence[Any], tokens: Mapping[str, Tensor | None]) -> None:
        check_fixed_size(states)
        self.states = list(states)
        names = [name for name, given in tokens.items() if given is not None]

        def step(x: Tensor, *given: Tensor) -> Tensor:
            for layer, state in zip(model.layers, self.states, strict=True):
                arguments = dict(zip(names, given, strict=True))
                x, new = layer(x, state=state.donate(), return_state=True, **arguments)
                state.write(new)  # copies only what the layer has not written there itself
            y: Tensor = model.norm(x)
            return y

        self._step: GraphedStep[Tensor] = GraphedStep(step)

    def __call__(self, *tensors: Tensor) -> Tensor:
        return self._step(*tensors)


def parts_of(model: Any) -> ModelParts:
    """The modules of a LinRopeModel for ``linrope.decode.prepare``."""
    kinds = *model.kinds(), nn.Embedding, nn.ModuleList, RMSNorm, nn.Linear
    blocks = [
        BlockParts(
            x.input_layernorm,
            x.self_attn,
            x.post_attention_layernorm,
            x.mlp.gate_proj,
            x.mlp.down_proj,
            x.mlp.up_proj,
        )
        for x in model.layers
    ]
    return ModelParts(model, kinds, blocks, model.norm)
