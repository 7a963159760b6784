"""Rows of a transformers cache: several sequences of different lengths in one."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, cache_utils

from linrope.decode.with_cache import WithCache

# The layers whose states are read whole: other ones have a window, or choose among the keys.
_NAMES = "DynamicLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer", "DummyLayer"
_KINDS = {getattr(cache_utils, name, None) for name in _NAMES}  # None: transformers lacks it
_FIXED, _GROWING = ("conv_states", "recurrent_states"), ("keys", "values")


class PaddedCache(Cache):
    """Reads one token of each row, which goes to a column of its own, and returns the columns of the longest row."""

    lengths: Tensor
    row: Tensor
    columns: int

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        layer: Any = self.layers[layer_idx]
        layer.keys[self.row, :, self.lengths] = key_states[:, :, 0]
        layer.values[self.row, :, self.lengths] = value_states[:, :, 0]
        return layer.keys[:, :, : self.columns], layer.values[:, :, : self.columns]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns - 1

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        return self.columns, 0


class CacheRows:
    """The rows of a model of transformers.

    Args:
        model: the model whose rows these are.
        states: those of a sequence, whose layers show what the model's caches consist of.

    Raises:
        ValueError: the rows of one call would change each other, or not all states are known.
    """

    def __init__(self, model: WithCache, states: tuple[Any, int]) -> None:
        cache, _ = states
        if type(cache) is not DynamicCache:
            raise ValueError(f"a cache of another kind, {type(cache).__name__}")
        if others := sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in _KINDS}):
            raise ValueError(f"layers of another kind in the cache, {', '.join(others)}")
        if any("longrope" in str(getattr(x, "rope_type", "")) for x in model.modules()):
            raise ValueError("longrope, whose angles depend on the longest sequence of a call")
        self.model, self.layers = model, cache.layers

    def split(self, states: tuple[Any, int]) -> tuple[list[Tensor], list[Tensor], int]:
        cache, length = states
        fixed = [x for layer in cache.layers for name in _FIXED for x in _listed(getattr(layer, name, None))]
        growing = [
            x for layer in cache.layers for name in _GROWING for x in _listed(getattr(layer, name, None))
        ]
        return fixed, growing, length

    def view(self, fixed: list[Tensor], growing: list[Tensor]) -> PaddedCache:
        layers = [copy.copy(layer) for layer in self.layers]
        for names, tensors in ((_FIXED, iter(fixed)), (_GROWING, iter(growing))):
            for layer, name in ((layer, name) for layer in layers for name in names):
                x = getattr(layer, name, None)
                if isinstance(x, dict):
                    setattr(layer, name, {i: None if y is None else next(tensors) for i, y in x.items()})
                elif x is not None:
                    setattr(layer, name, next(tensors))
        return PaddedCache(layers=layers)

    def decode(self, view: PaddedCache, tokens: Tensor, lengths: Tensor, columns: int) -> Tensor:
        view.lengths, view.columns = lengths, columns
        view.row = torch.arange(len(tokens), device=tokens.device)
        mask = (torch.arange(columns, device=tokens.device) <= lengths[:, None]).long()
        logits, _ = self.model.read(tokens, view, lengths[:, None], 1, mask)
        return logits[:, -1]


def _listed(x: Any) -> list[Tensor]:
    """The tensors in a layer's attribute: newer releases of transformers keep several states by their index."""
    return [y for y in (x.values() if isinstance(x, dict) else [x]) if y is not None]
