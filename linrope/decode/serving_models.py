"""Models as an ``Engine`` calls them: with slots, each of which holds a sequence that is read piece by piece."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from linrope.decode.batched import batched
from linrope.decode.parts import DecodableModel
from linrope.decode.preparation import prepare, why_not
from linrope.decode.separate import integers
from linrope.decode.state_rows import StateRows
from linrope.decode.with_cache import WithCache
from linrope.layer.state import LayerState


class ServingModel(Protocol):
    """A model and the sequences in its slots.

    model: with the call of a LanguageModel.
    empty: the states of a sequence before its first token. None: its states cannot be saved to a file.
    failed: by slot, the errors of sequences that the last call could not read. It returns no logits for these.
    least_piece: fewer tokens of a prompt in one call would take longer for each token.
    """

    model: Any
    empty: list[LayerState] | None
    failed: dict[int, Exception]
    least_piece: int

    def join(self, slot: int, states: Any) -> None:
        """Begins a sequence with these states, which it may overwrite; None: with those before the first token."""

    def read(self, slots: list[int], pieces: list[list[int]], ended: list[int]) -> Tensor:
        """Reads a piece of a prompt in each slot.

        Returns the logits (len(ended), vocab_size) after the pieces with these indices.
        """

    def decode(self, slots: list[int], tokens: list[list[int]]) -> Tensor:
        """Reads one token in each slot; returns the logits (len(slots), vocab_size) after it.

        A sequence that has been decoded takes part in every later call until it leaves.
        """

    def states(self, slot: int) -> Any:
        """The states in the slot, which the next call may overwrite. Of a batch: only while it reads the prompt."""

    def leave(self, slot: int) -> None:
        """Ends a sequence."""


def serving_model(model: Any, slots: int) -> ServingModel:
    """A pool for a model of linrope whose layers are all linear, a batch for any other model that allows it.

    The rest keeps states for each sequence, and says in ``Separate.reason`` why.

    Raises:
        ValueError: the model is of a kind that cannot be served.
    """
    if hasattr(model, "with_states"):  # a LinRopeForCausalLM
        model = model.with_states()
    if not isinstance(model, DecodableModel):
        model = WithCache(model)
        from linrope.decode.cache_rows import CacheRows  # which imports transformers

        return batched(model, CacheRows)
    _, empty = model(integers(model, [[]]))
    linear = all(isinstance(state, LayerState) for state in empty)
    return Pool(model, empty, slots) if linear else batched(model, StateRows)


class Pool:
    """Each sequence has a row in every block's pool of states. The model reads all of them in one call."""

    least_piece = 16

    def __init__(self, model: Any, empty: list[LayerState], slots: int) -> None:
        self.model, self.first, self.device = model, empty, empty[0].position.device
        self.empty: list[LayerState] | None = empty
        self.failed: dict[int, Exception] = {}  # a call fails for all sequences, and raises
        self.pool = [state.reorder(self.integers([0] * slots)) for state in empty]
        self.prepared = None if why_not(model, self.pool) else prepare(model, self.pool)

    def integers(self, numbers: Sequence[Any]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def at(self, slots: list[int]) -> list[LayerState]:
        rows = self.integers(slots)
        return [state.at(rows) for state in self.pool]

    def join(self, slot: int, states: list[LayerState] | None) -> None:
        for row, state in zip(self.at([slot]), states or self.first, strict=True):
            row.write(state)

    def read(self, slots: list[int], pieces: list[list[int]], ended: list[int]) -> Tensor:
        tokens = self.integers([[*chain.from_iterable(pieces)]])
        ends = self.integers([len(piece) for piece in pieces]).cumsum(0)
        bounds, last = F.pad(ends, (1, 0)), ends[self.integers(ended)] - 1
        logits: Tensor
        logits, _ = self.model(
            tokens, self.at(slots), cu_seqlens=bounds, return_states=False, logits_to_keep=last
        )
        return logits[0]

    def decode(self, slots: list[int], tokens: list[list[int]]) -> Tensor:
        if self.prepared is not None:
            return self.prepared(self.integers(tokens), self.integers(slots))[:, 0]
        logits: Tensor
        logits, _ = self.model(self.integers(tokens), self.at(slots), return_states=False)
        return logits[:, 0]

    def states(self, slot: int) -> list[LayerState]:
        return [state.rows() for state in self.at([slot])]

    def leave(self, slot: int) -> None:
        """The next sequence in the slot overwrites its rows."""
