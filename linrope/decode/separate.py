"""The serving model of any model: each sequence has states of its own."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linrope.layer.state import LayerState


def integers(model: Any, numbers: Sequence[Any]) -> Tensor:
    """A tensor of these numbers on the model's device."""
    return torch.tensor(numbers, dtype=torch.int64, device=next(model.parameters()).device)


class Separate:
    """Each sequence has states of its own, and the model reads one sequence after another.

    The states may be of any kind: a cache of transformers, or a list with softmax attention's keys and values.

    Args:
        model: maps tokens and states to logits and the next states.
        reason: why the model cannot read its sequences together.
    """

    least_piece = 128  # each piece is a call of its own

    def __init__(self, model: Any, reason: str | None = None) -> None:
        self.model, self.reason = model, reason
        self.empty: list[LayerState] | None = None
        self.failed: dict[int, Exception] = {}
        self.kept: dict[int, Any] = {}

    def join(self, slot: int, states: Any) -> None:
        self.kept[slot] = states

    def read(self, slots: list[int], pieces: list[list[int]], ended: list[int]) -> Tensor:
        logits = []
        for i, (slot, piece) in enumerate(zip(slots, pieces, strict=True)):
            try:
                last, self.kept[slot] = self.model(
                    integers(self.model, [piece]), self.kept[slot], logits_to_keep=1
                )
            except Exception as error:  # such as that of a sequence too long for a table of positions
                self.fail([slot], error)
                continue
            if i in ended:
                logits.append(last[:, -1])
        return torch.cat(logits) if logits else torch.empty(0)

    def decode(self, slots: list[int], tokens: list[list[int]]) -> Tensor:
        return self.read(slots, tokens, [*range(len(slots))])

    def fail(self, slots: Sequence[int], error: Exception) -> None:
        """Keeps the error of these slots. To be called while it is handled."""
        logging.exception("the model failed")
        self.failed |= dict.fromkeys(slots, error)

    def states(self, slot: int) -> Any:
        return self.kept[slot]

    def leave(self, slot: int) -> None:
        self.kept.pop(slot, None)
