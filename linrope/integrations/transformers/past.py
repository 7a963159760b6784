"""Going back: the sums of a recurrent layer after fewer tokens, which ``cache.crop`` needs after a rejected draft.

    S_j = the recurrence over k_1 .. k_j, v_1 .. v_j and their gates, from the sums S_0 before them

A cache that records its past (``cache.activate_past_recording()``, which assisted generation calls) keeps S_0 and these
tokens' inputs since the last crop. ``crop(-m)`` of n tokens computes S_(n - m) from them, without reading a weight.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from functools import wraps
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linrope.common.private_names import GENERATES_WITH_DRAFTS, REFUSES_DRAFTS
from linrope.decode.with_cache import CACHES
from linrope.layer.recording import TOKENS_BACK
from linrope.operation.from_sums import state_from_sums
from linrope.operation.functional import linear_rope_attention
from linrope.recurrence.state import LinearAttentionState

_ATTRIBUTE = "linrope_past"  # the attribute of a cache's layer that holds its Past


class Past:
    """The tokens that a layer has read since the last crop.

    Args:
        columns: those of the convolution's inputs in the cache before these tokens.
        swapped: the cache's sums are (b, h, p, s), not (b, h, s, p).
        constants: arguments of ``linear_rope_attention`` that are the same for all tokens.
    """

    def __init__(self, columns: int, swapped: bool, constants: Mapping[str, Any]) -> None:
        self.columns, self.swapped, self.constants = columns, swapped, constants
        self.read = 0  # tokens since the last crop
        self.before: Tensor | None = None  # (b, h, s, p); None: zeros
        self.calls: list[dict[str, Tensor]] = []  # by argument, each (b, n, ..)

    @property
    def tokens(self) -> int:
        """How many of them can be removed."""
        return sum(call["v"].shape[1] for call in self.calls)

    def add(self, before: Tensor | None, tokens: dict[str, Tensor]) -> None:
        """Adds the tokens of a call. before: the sums before them, which the caller may overwrite later."""
        if not self.calls:
            self.before = None if before is None else before.clone()
        self.calls.append(tokens)
        self.read += tokens["v"].shape[1]
        if (surplus := self.tokens - TOKENS_BACK) > TOKENS_BACK:
            self.before, inputs = self.sums(surplus), self._joined()
            self.calls = [{name: x[:, surplus:].clone() for name, x in inputs.items()}]

    def begin_anew(self, columns: int) -> None:
        self.columns, self.read = columns, 0
        self.calls.clear()

    def sums(self, count: int) -> Tensor | None:
        """(b, h, s, p) after the first tokens, as many as count. None: zeros."""
        if count == 0:
            return self.before
        inputs = {name: x[:, :count] for name, x in self._joined().items()}
        options = {**self.constants, **inputs, "normalize": False, "return_state": True}
        before = self.before
        if before is not None:
            options["state"] = state_from_sums(before, feature_map=self.constants["feature_map"])
        after: LinearAttentionState
        _, after = linear_rope_attention(q=inputs["k"], **options)  # the queries change no sums
        return after.kv

    def _joined(self) -> dict[str, Tensor]:
        if len(self.calls) == 1:
            return self.calls[0]
        return {name: torch.cat([call[name] for call in self.calls], 1) for name in self.calls[0]}


# The layer of a recording cache whose mixer runs now
_layer: ContextVar[Any] = ContextVar("linrope_recording_layer", default=None)


def recording_layer() -> Any:
    """The layer of the cache that records the present call; None: no cache does."""
    return None if torch.compiler.is_compiling() else _layer.get()


def record(
    layer: Any, before: Tensor | None, swapped: bool, tokens: Mapping[str, Tensor | None], **constants: Any
) -> None:
    """Records the tokens of a call of ``recording_layer()``, unless a backward pass will need the states."""
    given = {name: x for name, x in tokens.items() if x is not None}
    if torch.is_grad_enabled() and any(x.requires_grad for x in given.values()):
        return
    past = getattr(layer, _ATTRIBUTE, None)
    if past is None:
        past = Past(layer.conv_states[0].shape[-1] - given["v"].shape[1], swapped, constants)
        setattr(layer, _ATTRIBUTE, past)
    past.add(before, given)


def targets(classes: Collection[type]) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """For a family with these classes: owner, name, and the function that makes linrope's owner.name of the old one."""
    mixers = [x for x in classes if calls(x, "update_recurrent_state")]
    if not mixers:  # transformers itself goes back in convolutions
        return
    yield from ((x, "forward", forward_of_mixer) for x in mixers)
    yield from ((x, REFUSES_DRAFTS, lambda _: False) for x in classes if vars(x).get(REFUSES_DRAFTS))
    caches = import_module("transformers.cache_utils")
    layer: Any = caches.LinearAttentionCacheLayerMixin
    yield from ((layer, name, forget_past) for name in ("reorder_cache", "reset"))
    yield caches.Cache, "crop", crop_all
    yield layer, "crop", crop
    yield layer, "is_croppable", is_croppable
    yield import_module("transformers.generation").GenerationMixin, GENERATES_WITH_DRAFTS, stop_recording


def calls(kind: type, name: str) -> bool:
    """True if a method of the class itself calls a function or method of this name."""
    methods = [inspect.unwrap(x) for x in vars(kind).values() if isinstance(x, FunctionType)]
    return any(name in method.__code__.co_names for method in methods)


def forward_of_mixer(original: Callable[..., Any]) -> Callable[..., Any]:
    """The ``forward`` of a recurrent layer: tells ``record`` which layer of the cache it belongs to."""

    @wraps(original)
    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        layer = None
        for x in (*[options.get(name) for name in CACHES], *arguments):
            if hasattr(x, "layers"):
                layer = x.layers[self.layer_idx]
                break
        if not getattr(layer, "record_past", False):
            return original(self, *arguments, **options)
        token = _layer.set(layer)
        try:
            return original(self, *arguments, **options)
        finally:
            _layer.reset(token)
            _cut_inputs(layer)

    return forward


def _cut_inputs(layer: Any) -> None:
    """Cuts the convolution's inputs, which transformers keeps since the last crop, to those that a crop may need."""
    past: Past | None = getattr(layer, _ATTRIBUTE, None)
    for i, x in layer.conv_states.items():
        surplus = 0 if x is None else x.shape[-1] - layer.conv_kernel_size[i] - 2 * TOKENS_BACK
        if surplus > 0:
            layer.conv_states[i] = x[..., surplus:].clone()
            if past is not None and i == 0:
                past.columns -= surplus


def _whole_past(layer: Any) -> Past | None:
    """The past of a cache's layer. None: it has none, or transformers alone has read some of its tokens."""
    past: Past | None = getattr(layer, _ATTRIBUTE, None)
    return past if past is not None and layer.conv_states[0].shape[-1] - past.columns == past.read else None


def _check_crop(layer: Any, count: int) -> None:
    past = _whole_past(layer)
    if any(layer.is_recurrent_states_initialized.values()) and count > (have := past.tokens if past else 0):
        raise RuntimeError(
            f"crop({-count}): got {count} tokens, expected at most {have}, those that linrope has recorded since the "
            "last crop; call enable() and cache.activate_past_recording() before the model reads them, under "
            "torch.no_grad()"
        )


def crop_all(original: Callable[..., Any]) -> Callable[..., Any]:
    """``crop`` of a cache: no layer is cropped if one cannot be."""

    @wraps(original)
    def call(self: Any, tokens_to_remove: int) -> None:
        for layer in self.layers:
            if hasattr(layer, "is_recurrent_states_initialized"):
                _check_crop(layer, -tokens_to_remove)
        original(self, tokens_to_remove)

    return call


def crop(original: Callable[..., Any]) -> Callable[..., Any]:
    """``crop`` of a cache's layer, which transformers' own does for the convolution alone."""

    @wraps(original)
    def call(self: Any, tokens_to_remove: int) -> None:
        past, count = getattr(self, _ATTRIBUTE, None), -tokens_to_remove
        _check_crop(self, count)
        if any((*self.is_recurrent_states_initialized.values(), *self.is_conv_states_initialized.values())):
            original(self, tokens_to_remove)  # else the layer holds nothing, as an MLP's
        if past is None:
            return
        if count:
            sums = past.sums(past.tokens - count)
            state = self.recurrent_states[0]
            if sums is None:
                state.zero_()
            else:
                state.copy_(sums.mT if past.swapped else sums)
        past.begin_anew(self.conv_states[0].shape[-1])

    return call


def is_croppable(original: Any) -> property:
    """``is_croppable`` of a cache's layer: true for recurrent states that linrope records."""

    def croppable(self: Any) -> bool:
        return bool(original.fget(self) or (self.record_past and _whole_past(self) is not None))

    return property(croppable)


def forget_past(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method after which a cache's layer has other sequences."""

    @wraps(original)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        setattr(self, _ATTRIBUTE, None)
        return original(self, *arguments, **options)

    return call


def stop_recording(original: Callable[..., Any]) -> Callable[..., Any]:
    """Assisted decoding, after which its caller's cache stops recording: otherwise it would keep all later tokens."""

    @wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        caches = [options[name] for name in CACHES if options.get(name) is not None]
        layers = [layer for cache in caches for layer in getattr(cache, "layers", ())]
        silent = [layer for layer in layers if not getattr(layer, "record_past", True)]
        try:
            return original(*arguments, **options)
        finally:
            for layer in silent:
                layer.record_past = False
                setattr(layer, _ATTRIBUTE, None)
                for i, x in getattr(layer, "conv_states", {}).items():
                    if x is not None:  # a layer that does not record expects columns for all taps
                        layer.conv_states[i] = F.pad(x, (max(0, layer.conv_kernel_size[i] - x.shape[-1]), 0))

    return call
