"""A language model's decoding step, prepared once for all tokens of a loop."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linrope.layer.norm import RMSNorm
from linrope.layer.step import Joined, LayerStep, linear, why_not_plain
from linrope.layer.step import why_not as why_not_layer
from linrope.models.language_model import Block, LanguageModel, States, SwiGLU, TiedEmbedding
from linrope.ops.norm import MOST_VALUES

_KINDS = (LanguageModel, Block, SwiGLU, TiedEmbedding, nn.ModuleList, RMSNorm, nn.Linear)
_ops = torch.ops.linrope_native


class DecodingStep:
    """Takes the next token of each sequence, and returns the logits of the one after it.

        logits = model(tokens, states)[0]        tokens (b, 1) -> (b, 1, vocab_size)

    It computes what the model computes, without gradients, with far fewer calls of PyTorch. Model and states are
    checked here, once, and a call checks only tokens and slots. It is for float32 on a CPU. It overwrites the states
    given to it with every step. Its attribute ``states`` has the states after the last token, from which ``model`` can
    continue. Small projections of the same vector become one, whose weights are a copy: make a new step after the
    model has changed.

    Args:
        model: the language model.
        states: the states after the last token, one per block. Do not use these objects again: read the
            attribute instead. A pool is the exception: each call takes the rows at its slots.

    Raises:
        ValueError: ``DecodingStep.why_not`` has a reason why only the model's own call can take the step.

    >>> from linrope.models import LanguageModel, LanguageModelConfig
    >>> model = LanguageModel(LanguageModelConfig(embed_dim=32, num_layers=2, num_heads=2)).requires_grad_(False)
    >>> tokens = torch.randint(256, (1, 10))
    >>> states = model(tokens[:, :9])[1]
    >>> if DecodingStep.why_not(model, states) is None:
    ...     step = DecodingStep(model, states)
    ...     torch.testing.assert_close(step(tokens[:, 9:]), model(tokens)[0][:, 9:], rtol=1e-4, atol=1e-5)
    """

    def __init__(self, model: LanguageModel, states: States) -> None:
        if (reason := self.why_not(model, states)) is not None:
            raise ValueError(f"states: a prepared decoding step is impossible here: {reason}")
        self.states: States = list(states)
        self._embedding = model.embed.weight.detach()
        self._blocks = BlocksStep([_parts(block) for block in model.blocks], model.norm, states)

    @torch.no_grad()
    def __call__(self, tokens: Tensor, slots: Tensor | None = None) -> Tensor:
        """tokens (b, 1) integers -> logits (b, 1, vocab_size). Overwrites ``states`` with the next ones.

        slots (b,) int64, all different: the row of ``states`` for each sequence of this call; the other rows stay as
        they are. Default: all rows, in order.
        """
        rows = len(self.states[0].position)
        b = rows if slots is None else self._check(slots, rows)
        if tokens.is_floating_point():
            raise TypeError(f"tokens: got {tokens.dtype}, expected integers")
        if tokens.shape != (b, 1):
            raise ValueError(f"tokens: got shape {tuple(tokens.shape)}, expected ({b}, 1)")
        try:
            x = F.embedding(tokens[:, 0], self._embedding)
        except IndexError as error:
            ids = f"{int(tokens.min())} .. {int(tokens.max())}"
            raise ValueError(f"tokens: got ids {ids}, expected 0 .. {len(self._embedding) - 1}") from error
        slots = None if slots is None else slots.contiguous()
        return linear(self._blocks(x, slots), self._embedding)[:, None]

    def _check(self, slots: Tensor, rows: int) -> int:
        """Raises unless slots are different rows; returns how many they are."""
        if slots.dtype != torch.int64:
            raise TypeError(f"slots: got {slots.dtype}, expected int64")
        if slots.ndim != 1:
            raise ValueError(f"slots: got shape {tuple(slots.shape)}, expected (b,)")
        numbers = slots.tolist()
        if len(set(numbers)) < len(numbers) or (numbers and not 0 <= min(numbers) <= max(numbers) < rows):
            raise ValueError(f"slots: got {numbers}, expected different rows 0 .. {rows - 1}")
        return len(numbers)

    @staticmethod
    def why_not(model: nn.Module, states: States) -> str | None:
        """The reason why a prepared step cannot take the place of ``model``'s call; None: it can."""
        if not isinstance(model, LanguageModel):
            return f"a model of another kind, {type(model).__name__}"
        if len(states) != len(model.blocks):
            return f"{len(states)} states for {len(model.blocks)} blocks"
        return why_not_blocks([_parts(block) for block in model.blocks], model, states, _KINDS)


class BlockParts(NamedTuple):
    """The modules of a block: x += attention(norm(x)), and then x += w2(silu(w1(norm(x))) * w3(norm(x)))."""

    attention_norm: nn.Module
    attention: nn.Module
    feed_forward_norm: nn.Module | None
    w1: nn.Module | None
    w2: nn.Module | None
    w3: nn.Module | None


class BlocksStep:
    """One token of each sequence through all blocks and the last norm: x (b, embed_dim) to the same shape.

    x itself is overwritten. So are the states, or their rows at the slots (b,).
    """

    def __init__(self, blocks: Sequence[BlockParts], norm: nn.Module, states: States) -> None:
        self.states = list(states)
        self._branches: list[tuple[_AddNorm, LayerStep | _SwiGLU]] = []
        state: Any
        for block, state in zip(blocks, states, strict=True):
            attention: Any = block.attention
            self._branches.append((_AddNorm(block.attention_norm), LayerStep(attention, state)))
            if block.feed_forward_norm is not None:
                self._branches.append((_AddNorm(block.feed_forward_norm), _SwiGLU(block)))
        self._norm = _AddNorm(norm)

    def __call__(self, x: Tensor, slots: Tensor | None = None) -> Tensor:
        y = None
        for add_norm, branch in self._branches:
            normed = add_norm(x, y)
            y = branch(normed, slots) if isinstance(branch, LayerStep) else branch(normed)
        return self._norm(x, y)


def why_not_blocks(
    blocks: Sequence[BlockParts], model: nn.Module, states: Sequence[Any], kinds: tuple[type, ...]
) -> str | None:
    """The reason why ``BlocksStep`` cannot take the place of the blocks' calls; None: it can.

    kinds: the types that the model's modules outside of the attention may have.
    """
    attention: set[nn.Module] = set()
    for block, state in zip(blocks, states, strict=True):
        if (reason := why_not_layer(block.attention, state)) is not None:
            return reason
        if not torch.equal(state.position, states[0].position):
            return "states at different positions"
        attention.update(block.attention.modules())
    outside = [x for x in model.modules() if x not in attention]
    if any(max(x.weight.shape) > MOST_VALUES for x in outside if isinstance(x, nn.Linear)):
        return f"vectors of more than {MOST_VALUES} numbers"
    return why_not_plain(outside, kinds)


def _parts(block: Any) -> BlockParts:
    network = block.feed_forward
    projections = (None, None, None) if network is None else (network.w1, network.w2, network.w3)
    return BlockParts(block.attention_norm, block.attention, block.feed_forward_norm, *projections)


class _AddNorm:
    """x += y, and then the RMS norm of x (b, embed_dim)."""

    def __init__(self, norm: Any) -> None:
        self.weight, self.eps = norm.weight.detach(), norm.eps

    def __call__(self, x: Tensor, y: Tensor | None) -> Tensor:
        normed: Tensor = _ops.add_norm.default(x, y, self.weight, self.eps)
        return normed


class _SwiGLU:
    """The feed-forward network of a block, its first two products in one."""

    def __init__(self, block: BlockParts) -> None:
        self.w1_w3, self.w2 = Joined(block.w1, block.w3), Joined(block.w2)

    def __call__(self, x: Tensor) -> Tensor:
        return self.w2(_ops.silu_product.default(self.w1_w3(x)))
