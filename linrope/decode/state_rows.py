"""Rows of linrope's states: several sequences of different lengths in one list of states."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from linrope.layer.key_value_state import KeyValueState
from linrope.layer.state import LayerState

_GROWING = ("k", "v")


@dataclass(frozen=True, eq=False, repr=False)
class PaddedState(KeyValueState):
    """A state of several sequences whose memory has a column for the next token of each.

    Args:
        lengths: (b,) int64: that column, and the token's position.
    """

    lengths: Tensor = field(kw_only=True)

    @property
    def position(self) -> Tensor:
        return self.lengths

    def append(self, later: KeyValueState) -> KeyValueState:
        """Writes the keys and values of one token into their columns. The mask and the positions have them."""
        row = torch.arange(len(self.k), device=self.k.device)
        self.k[row, self.position] = later.k[:, 0]
        self.v[row, self.position] = later.v[:, 0]
        return KeyValueState(self.k, self.v, self.positions, self.mask, self.identity)


class StateRows:
    """The rows of a model of linrope.

    Args:
        model: the model whose rows these are.
        states: those of a sequence, one for each layer.
    """

    def __init__(self, model: Any, states: list[LayerState | KeyValueState]) -> None:
        self.model, self.first = model, states

    def split(self, states: list[LayerState | KeyValueState]) -> tuple[list[Tensor], list[Tensor], int]:
        fixed = [x for state in states for x in _fixed(state).values()]
        growing = [x.transpose(1, 2) for state in states for x in _growing(state)]
        return fixed, growing, int(states[0].position)

    def view(self, fixed: list[Tensor], growing: list[Tensor]) -> list[LayerState | dict[str, Any]]:
        """A state for each linear layer, the fields of one for each softmax layer."""
        fixed_left, growing_left = iter(fixed), iter(growing)
        view: list[LayerState | dict[str, Any]] = []
        for state in self.first:
            tensors: dict[str, Any] = {name: next(fixed_left) for name in _fixed(state)}
            if isinstance(state, LayerState):
                view.append(LayerState.from_tensors(tensors, state.identity))
            else:
                k, v = (next(growing_left).transpose(1, 2) for _ in _GROWING)
                view.append({"k": k, "v": v, "identity": state.identity} | tensors)
        return view

    def decode(
        self, view: list[LayerState | dict[str, Any]], tokens: Tensor, lengths: Tensor, columns: int
    ) -> Tensor:
        positions = torch.arange(columns, device=tokens.device).expand(len(tokens), columns)
        padding: dict[str, Any] = {
            "positions": positions,
            "mask": positions <= lengths[:, None],
            "lengths": lengths,
        }
        states = [
            x.donate()
            if isinstance(x, LayerState)
            else PaddedState(**{**x, "k": x["k"][:, :columns], "v": x["v"][:, :columns]}, **padding)
            for x in view
        ]
        logits, after = self.model(tokens, states)
        for before, new in zip(view, after, strict=True):
            if isinstance(before, LayerState):
                before.write(new)  # copies only what the call has not written there itself
            elif new.conv is not None:
                before["conv"].copy_(new.conv)
        last: Tensor = logits[:, -1]
        return last


def _fixed(state: LayerState | KeyValueState) -> dict[str, Tensor]:
    if isinstance(state, LayerState):
        return state.tensors()
    return {} if state.conv is None else {"conv": state.conv}


def _growing(state: LayerState | KeyValueState) -> list[Tensor]:
    return [] if isinstance(state, LayerState) else [getattr(state, name) for name in _GROWING]
