"""A model's decoding step: the steps of its layers, and what is between these."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linrope.backends import library
from linrope.common.private_names import parameters_of
from linrope.common.writable import check_slots
from linrope.decode.parts import ModelParts
from linrope.layer.norm import silu_product
from linrope.layer.state import LayerState
from linrope.layer.step import FEW_ROWS, LayerStep


class ModelStep:
    """Takes the next token of each sequence, and returns the logits of the one after it.

        logits = model(tokens, states)[0]        tokens (b, 1) -> (b, 1, vocab_size)

    Without an embedding it takes the tokens' vectors x (b, 1, dim), and returns those after the model's last norm.
    ``prepare`` makes it, and says what it is for.
    """

    def __init__(self, parts: ModelParts, states: Sequence[LayerState]) -> None:
        self.states = list(states)
        # The modules' own dicts of parameters are read in every call: a parameter may be replaced.
        self._embedding = None if parts.embedding is None else parameters_of(parts.embedding)
        self._head: Any = self._embedding if parts.head is None else parameters_of(parts.head)
        self._branches: list[tuple[Callable[..., Tensor], Callable[..., Tensor]]] = []
        for block, state in zip(parts.blocks, states, strict=True):
            memory = [*state.tensors().values()]
            attention = partial(LayerStep(block.attention), memory=memory)
            self._branches.append((_add_norm_of(block.attention_norm), attention))
            if block.feed_forward_norm is not None:
                modules: Any = block.w1, block.w3, block.w2
                swiglu = partial(_swiglu, [*map(parameters_of, modules)])
                self._branches.append((_add_norm_of(block.feed_forward_norm), swiglu))
        self._norm = _add_norm_of(parts.norm)

    @torch.no_grad()
    def __call__(self, tokens: Tensor, slots: Tensor | None = None) -> Tensor:
        """tokens (b, 1) integers -> logits (b, 1, vocab_size). Overwrites ``states`` with the next ones.

        slots (b,) int64, all different: the row of ``states`` for each sequence of this call; the other rows stay as
        they are. Default: all rows, in order.
        """
        if slots is not None:
            check_slots(slots, len(self.states[0].position), self.states[0].position.device)
            slots = slots.long().contiguous()
        if self._embedding is None:
            return self._of_rows(tokens[:, 0].clone(), slots)[:, None]
        x, head = self._of_rows(self._embed(tokens, slots), slots), self._head["weight"]
        few = len(x) <= FEW_ROWS
        logits: Tensor = library.run("linear", x, head, None) if few else F.linear(x, head)
        return logits[:, None]

    def _embed(self, tokens: Tensor, slots: Tensor | None) -> Tensor:
        assert self._embedding is not None
        b = len(self.states[0].position if slots is None else slots)
        weight = self._embedding["weight"]
        if tokens.is_floating_point():
            raise TypeError(f"tokens: got {tokens.dtype}, expected integers")
        if tokens.shape != (b, 1):
            raise ValueError(f"tokens: got shape {tuple(tokens.shape)}, expected ({b}, 1)")
        try:
            row = tokens[:, 0].int() if tokens.dtype == torch.uint8 else tokens[:, 0]
            return F.embedding(row, weight)
        except IndexError as error:
            ids = f"{int(tokens.min())} .. {int(tokens.max())}"
            raise ValueError(f"tokens: got ids {ids}, expected 0 .. {len(weight) - 1}") from error

    def _of_rows(self, x: Tensor, slots: Tensor | None) -> Tensor:
        """x (b, dim) through all blocks and the last norm. Overwrites x itself."""
        y = None
        for add_norm, branch in self._branches:
            y = branch(x=add_norm(x, y), slots=slots)
        return self._norm(x, y)


def _add_norm_of(norm: Any) -> Callable[[Tensor, Tensor | None], Tensor]:
    return partial(_add_norm, parameters_of(norm), norm.eps)


def _add_norm(norm: dict[str, Any], eps: float, x: Tensor, y: Tensor | None) -> Tensor:
    """x += y, and then the RMS norm of x (b, embed_dim)."""
    normed: Tensor = library.run("add_norm", x, y, norm["weight"], eps)
    return normed


def _swiglu(parts: list[dict[str, Any]], x: Tensor, slots: Tensor | None) -> Tensor:
    """The feed-forward network of a block."""
    w1, w3, w2 = [(part["weight"], part["bias"]) for part in parts]
    if len(x) <= FEW_ROWS:
        y: Tensor = library.run("swiglu", x, *w1, *w3, *w2)
        return y
    return F.linear(silu_product(F.linear(x, *w1), F.linear(x, *w3)), *w2)
