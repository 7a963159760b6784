"""Models as an ``Engine`` calls them: with slots, each of which holds a sequence that is read piece by piece."""

import logging
from collections.abc import Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from linrope.decode.parts import DecodableModel
from linrope.decode.reasons import why_not
from linrope.decode.step import prepare
from linrope.decode.with_cache import WithCache
from linrope.layer.state import LayerState


class ServingModel(Protocol):
    """A model and the sequences in its slots.

    empty: the states of a sequence before its first token. None: its states can be neither saved nor given.
    failed: by slot, the errors of sequences that the last call could not read. It returns no logits for these.
    """

    empty: list[LayerState] | None
    failed: dict[int, Exception]

    def join(self, slot: int, states: list[LayerState] | None) -> None:
        """Begins a sequence with these states; None: with those before the first token."""

    def read(self, slots: list[int], pieces: list[list[int]], ended: list[int]) -> Tensor:
        """Reads a piece of a prompt in each slot.

        Returns the logits (len(ended), vocab_size) after the pieces with these indices.
        """

    def decode(self, slots: list[int], tokens: list[list[int]]) -> Tensor:
        """Reads one token in each slot; returns the logits (len(slots), vocab_size) after it."""

    def states(self, slot: int) -> list[LayerState]:
        """A copy of the states in the slot."""

    def leave(self, slot: int) -> None:
        """Ends a sequence."""


def serving_model(model: Any, slots: int) -> ServingModel:
    """A pool for a model of linrope whose layers are all linear; states for each sequence otherwise.

    Raises:
        ValueError: the model is of a kind that cannot be served.
    """
    if hasattr(model, "with_states"):  # a LinRopeForCausalLM
        model = model.with_states()
    if not isinstance(model, DecodableModel):
        return Separate(WithCache(model))
    _, empty = model(_integers(model, [[]]))
    linear = all(isinstance(state, LayerState) for state in empty)
    return Pool(model, empty, slots) if linear else Separate(model)


def _integers(model: Any, numbers: Sequence[Any]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=next(model.parameters()).device)


class Pool:
    """Each sequence has a row in every block's pool of states. The model reads all of them in one call."""

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


class Separate:
    """Each sequence has states of its own, and the model reads one sequence after another.

    The states may be of any kind: a cache of transformers, or a list with softmax attention's keys and values.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.empty: list[LayerState] | None = None
        self.failed: dict[int, Exception] = {}
        self.kept: dict[int, Any] = {}

    def join(self, slot: int, states: list[LayerState] | None) -> None:
        self.kept[slot] = states

    def read(self, slots: list[int], pieces: list[list[int]], ended: list[int]) -> Tensor:
        logits = []
        for i, (slot, piece) in enumerate(zip(slots, pieces, strict=True)):
            try:
                last, self.kept[slot] = self.model(
                    _integers(self.model, [piece]), self.kept[slot], logits_to_keep=1
                )
            except Exception as error:  # such as that of a sequence too long for a table of positions
                logging.exception("a sequence failed")
                self.failed[slot] = error
                continue
            if i in ended:
                logits.append(last[:, -1])
        return torch.cat(logits) if logits else torch.empty(0)

    def decode(self, slots: list[int], tokens: list[list[int]]) -> Tensor:
        return self.read(slots, tokens, [*range(len(slots))])

    def states(self, slot: int) -> list[LayerState]:
        raise NotImplementedError("only a pool's states can be saved")

    def leave(self, slot: int) -> None:
        del self.kept[slot]
