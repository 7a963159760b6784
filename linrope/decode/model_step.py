"""A model's decoding step: the steps of its layers, and what is between these."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linrope.backends import library
from linrope.common.writable import check_slots
from linrope.decode.layer_step import PreparedLayer
from linrope.decode.parts import BlockParts, ModelParts
from linrope.layer.norm import silu_product
from linrope.layer.state import LayerState
from linrope.layer.step import FEW_ROWS


class ModelStep:
    """Takes the next token of each sequence, and returns the logits of the one after it.

        logits = model(tokens, states)[0]        tokens (b, 1) -> (b, 1, vocab_size)

    Without an embedding it takes the tokens' vectors x (b, 1, dim), and returns those after the model's last norm.
    ``prepare`` makes it, and says what it is for.
    """

    def __init__(self, parts: ModelParts, states: Sequence[LayerState]) -> None:
        self.states = list(states)
        self._embedding = None if parts.embedding is None else parts.embedding.weight
        self._head = self._embedding if parts.head is None else parts.head.weight
        self._branches: list[tuple[_AddNorm, PreparedLayer | _SwiGLU]] = []
        for block, state in zip(parts.blocks, states, strict=True):
            attention: Any = block.attention
            self._branches.append((_AddNorm(block.attention_norm), PreparedLayer(attention, state)))
            if block.feed_forward_norm is not None:
                self._branches.append((_AddNorm(block.feed_forward_norm), _SwiGLU(block)))
        self._norm = _AddNorm(parts.norm)

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
        assert self._head is not None
        x = self._of_rows(self._embed(tokens, slots), slots)
        few = len(x) <= FEW_ROWS
        logits: Tensor = library.run("linear", x, self._head, None) if few else F.linear(x, self._head)
        return logits[:, None]

    def _embed(self, tokens: Tensor, slots: Tensor | None) -> Tensor:
        assert self._embedding is not None
        b = len(self.states[0].position if slots is None else slots)
        if tokens.is_floating_point():
            raise TypeError(f"tokens: got {tokens.dtype}, expected integers")
        if tokens.shape != (b, 1):
            raise ValueError(f"tokens: got shape {tuple(tokens.shape)}, expected ({b}, 1)")
        try:
            row = tokens[:, 0].int() if tokens.dtype == torch.uint8 else tokens[:, 0]
            return F.embedding(row, self._embedding)
        except IndexError as error:
            ids = f"{int(tokens.min())} .. {int(tokens.max())}"
            raise ValueError(f"tokens: got ids {ids}, expected 0 .. {len(self._embedding) - 1}") from error

    def _of_rows(self, x: Tensor, slots: Tensor | None) -> Tensor:
        """x (b, dim) through all blocks and the last norm. Overwrites x itself."""
        y = None
        for add_norm, branch in self._branches:
            y = branch.of_rows(add_norm(x, y), slots)
        return self._norm(x, y)


class _AddNorm:
    """x += y, and then the RMS norm of x (b, embed_dim)."""

    def __init__(self, norm: Any) -> None:
        self.weight, self.eps = norm.weight, norm.eps

    def __call__(self, x: Tensor, y: Tensor | None) -> Tensor:
        normed: Tensor = library.run("add_norm", x, y, self.weight, self.eps)
        return normed


class _SwiGLU:
    """The feed-forward network of a block."""

    def __init__(self, block: BlockParts) -> None:
        modules: Any = block.w1, block.w3, block.w2
        self._parts = [(x.weight, x.bias) for x in modules]
        self._weights = [x for part in self._parts for x in part]

    def of_rows(self, x: Tensor, slots: Tensor | None) -> Tensor:
        if len(x) <= FEW_ROWS:
            y: Tensor = library.run("swiglu", x, *self._weights)
            return y
        w1, w3, w2 = self._parts
        return F.linear(silu_product(F.linear(x, *w1), F.linear(x, *w3)), *w2)
