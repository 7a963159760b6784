"""The modules from which ``prepare`` makes a model's step. A model lists its own: this package cannot import models."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn


class BlockParts(NamedTuple):
    """The modules of a block: x += attention(norm(x)), and then x += w2(silu(w1(norm(x))) * w3(norm(x)))."""

    attention_norm: nn.Module
    attention: nn.Module
    feed_forward_norm: nn.Module | None
    w1: nn.Module | None
    w2: nn.Module | None
    w3: nn.Module | None


class ModelParts(NamedTuple):
    """The modules of a model: its blocks in order, the norm after them, and the embedding.

    Args:
        model: the whole model. A step stands in for it only if all of its modules are known.
        kinds: the classes that its modules outside of the attention may have.
        blocks: the parts of each block.
        norm: the norm after the last block.
        embedding: the embedding of the tokens. None: the step takes vectors, and returns those after the norm.
        head: the last matrix. None: the embedding's weight.
    """

    model: nn.Module
    kinds: tuple[type, ...]
    blocks: Sequence[BlockParts]
    norm: nn.Module
    embedding: nn.Embedding | None = None
    head: nn.Linear | None = None


@runtime_checkable
class DecodableModel(Protocol):
    """A model of tokens with a state per block, such as ``linrope.models.LanguageModel``."""

    def __call__(self, tokens: Tensor, states: Any = None, /, *, logits_to_keep: Any = 0) -> Any:
        """tokens (b, n) and states -> the logits (b, n, vocab_size), and the next states.

        logits_to_keep: how many tokens at the end get logits, or a tensor with their indices; 0: all tokens.
        """

    def decoding_parts(self) -> ModelParts:
        """The modules of which a decoding step consists."""
