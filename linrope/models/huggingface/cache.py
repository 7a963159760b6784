"""The cache of the Hugging Face models: one state per layer."""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from linrope.common.writable import is_read_only
from linrope.layer.key_value_state import KeyValueState
from linrope.layer.recording import TOKENS_BACK, StateAfter
from linrope.layer.state import LayerState
from linrope.layer.states import State, read_states, write_states
from linrope.models.huggingface.cache_name import CACHE
from linrope.models.huggingface.configuration import LinRopeConfig

_FORMAT = "linrope.LinRopeCache"


class _Call(NamedTuple):
    """A call of a layer with a cache that records its past."""

    tokens: int
    # The state before it. Of softmax attention the number of keys and conv: the later state holds these keys too
    before: LayerState | tuple[int, Tensor | None] | None
    after: StateAfter | None  # None: it read one token


class StateLayer:
    """The state of one layer (None before the first token), with the methods that a Cache calls.

    After ``activate_past_recording`` it keeps what ``crop`` needs to go back: the states before the last calls, and
    what computes the state in the midst of a call.
    """

    is_compileable = False
    supports_early_init = False

    def __init__(self, state: State | None = None) -> None:
        self.state = state
        self.record_past = False
        self.past: list[_Call] = []

    def __repr__(self) -> str:
        return f"StateLayer({self.state})"

    def __getstate__(self) -> dict[str, Any]:
        """Without the past, which holds on to the layers: a copy goes back no further than where it was made."""
        return self.__dict__ | {"past": []}

    @property
    def is_croppable(self) -> bool:
        return self.record_past

    def activate_past_recording(self) -> None:
        self.record_past = True

    def take(self) -> State | None:
        """Gives the state away, since nobody else holds it: decoding may overwrite its memory."""
        if self.state is None or _is_read_only(self.state):
            return self.state
        return self.state.donate()

    def record(self, before: State | None, tokens: int, after: StateAfter | None = None) -> None:
        """Keeps the state before a call, whose memory nobody else may overwrite, and what ``record`` gave for it."""
        if after is None and tokens > 1:  # a compiled call, within which there is no way back
            self.past.clear()
            return
        kept = (before.k.shape[1], before.conv) if isinstance(before, KeyValueState) else before
        self.past.append(_Call(tokens, kept, after))
        while sum(x.tokens for x in self.past[1:]) >= TOKENS_BACK:
            del self.past[0]

    def put(self, state: State | None) -> None:
        """Replaces the state; while the past is recorded in its memory, for which a step may be prepared."""
        old = self.state
        in_place = self.record_past and not torch.is_grad_enabled()
        if (
            in_place
            and isinstance(old, LayerState)
            and isinstance(state, LayerState)
            and not _is_read_only(old)
        ):
            old.write(state)
        else:
            self.state = state

    def crop(self, tokens_to_remove: int) -> None:
        """Goes back by -tokens_to_remove tokens, and forgets the past.

        Raises RuntimeError if fewer have been recorded since the last crop.
        """
        count, recorded = -tokens_to_remove, sum(call.tokens for call in self.past)
        if not 0 <= count <= recorded:
            raise RuntimeError(
                f"crop({tokens_to_remove}): expected 0 .. {-recorded}, the tokens recorded since the last crop; call "
                "cache.activate_past_recording() before the model reads them, or keep a copy.deepcopy of the cache"
            )
        while count > 0:
            call = self.past.pop()
            count -= call.tokens
            if count == 0 and isinstance(call.before, tuple):
                assert isinstance(self.state, KeyValueState)
                self.put(self.state.first(*call.before))
            elif count == 0 and not isinstance(call.before, tuple):
                self.put(call.before)
            elif count < 0 and call.after is not None:
                self.put(call.after(-count))
        self.past.clear()

    def reset(self) -> None:
        self.state = None
        self.past.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.past.clear()
        self.state = None if self.state is None else self.state.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """indices: integers, or a bool mask (b,)."""
        self.reorder_cache(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            index = torch.arange(len(self.state.position), device=self.state.position.device)
            self.reorder_cache(index.repeat_interleave(repeats))

    def get_max_length(self) -> int:
        return -1


def copy_of(state: State | None) -> State | None:
    """A copy of a LayerState, whose memory decoding overwrites. Other states are returned themselves: they grow."""
    return state.clone() if isinstance(state, LayerState) else state


class LinRopeCache(Cache):
    """The states of all layers, for generate() and for forward's ``cache``.

    Its memory does not grow with the sequence, except in the "full_attention" layers of a hybrid model, which
    keep all their keys and values. ``copy.deepcopy`` forks a sequence.

    Args:
        config: the configuration of the model.

    >>> from linrope.models.huggingface import LinRopeCache, LinRopeConfig, LinRopeForCausalLM
    >>> config = LinRopeConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    ...                        num_attention_heads=2)
    >>> model, cache = LinRopeForCausalLM(config), LinRopeCache(config)
    >>> logits = model(torch.randint(50, (1, 10)), cache=cache).logits
    >>> cache.get_seq_length(), cache.layers[0].state.sums.kv.shape
    (10, torch.Size([1, 2, 16, 32]))
    >>> cache
    LinRopeCache(2 layers, 10 tokens, 11,792 bytes)
    """

    layers: list[StateLayer]  # type: ignore[assignment]

    def __init__(self, config: LinRopeConfig) -> None:
        super().__init__(layers=[])
        self.layers += [StateLayer() for _ in range(config.num_hidden_layers)]
        self.length = 0

    @property
    def nbytes(self) -> int:
        """The size of all states in bytes."""
        return sum(layer.state.nbytes for layer in self.layers if layer.state is not None)

    def __repr__(self) -> str:
        return f"LinRopeCache({len(self.layers)} layers, {self.length} tokens, {self.nbytes:,} bytes)"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens seen so far, padding included."""
        return self.length

    def reset(self) -> None:
        super().reset()
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove tokens, which ``activate_past_recording`` must precede."""
        super().crop(tokens_to_remove)
        self.length += tokens_to_remove

    def stop_recording(self) -> None:
        """Frees what ``activate_past_recording`` has kept, and ends it."""
        for layer in self.layers:
            layer.record_past = False
            layer.past.clear()

    @property
    def batch_size(self) -> int:
        """-1 before the first token."""
        state = self.layers[0].state if self.layers else None
        return -1 if state is None else len(state.position)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one safetensors file, atomically."""
        states = [layer.state for layer in self.layers]
        write_states(path, _FORMAT, states, {"length": str(self.length)})

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str | None = None) -> "LinRopeCache":
        """Reads a file that ``save`` wrote. device: the model's; default: the CPU.

        A model of another configuration rejects the cache in its first call.

        Raises:
            FileNotFoundError, ValueError: there is no such file; it is damaged, newer, or of another kind.
        """
        states, metadata = read_states(path, _FORMAT, device)
        cache = cls.__new__(cls)
        Cache.__init__(cache, layers=[])
        cache.layers += map(StateLayer, states)
        try:
            cache.length = int(metadata["length"])
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path}: does not hold the states of a model ({error})") from error
        return cache


def check_lengths(inputs: Tensor, name: str, model_kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError unless generate() can tell which inputs are new to the cache.

    inputs (b, n, ..) are either all tokens, with a mask (b, n) or none, or only the new tokens, with a mask
    (b, seen + n). Embeddings are always those of all tokens.
    """
    cache, attention_mask = model_kwargs.get(CACHE), model_kwargs.get("attention_mask")
    seen = cache.get_seq_length() if isinstance(cache, LinRopeCache) else 0
    b, n = inputs.shape[:2]
    length = n if attention_mask is None else attention_mask.shape[-1]
    if length == n and (n > seen or not seen):
        return
    if name == "input_ids" and length == seen + n:
        return
    got = None if attention_mask is None else f"shape {tuple(attention_mask.shape)}"
    if name != "input_ids":
        if n <= seen:
            raise ValueError(f"{name}: got {n} tokens, expected the cache's {seen} tokens and the new ones")
        raise ValueError(f"attention_mask: got {got}, expected {(b, n)}")
    if not seen:
        raise ValueError(f"attention_mask: got {got}, expected {(b, n)}")
    alternative = f", or {(b, n)} if they are all tokens" if n > seen else ""
    raise ValueError(
        f"attention_mask: got {got} with {n} input_ids and a cache of {seen} tokens, expected shape "
        f"{(b, seen + n)} if they are the new tokens{alternative}"
    )


def _is_read_only(state: State) -> bool:
    """True if this call may not overwrite the state."""
    compiling = torch.compiler.is_compiling()
    return not compiling and isinstance(state, LayerState) and is_read_only(state.sums.kv)
