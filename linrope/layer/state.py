"""The state of a layer: what a layer carries from call to call."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linrope.common.files import load_tensors, save_tensors
from linrope.common.private_names import pytree
from linrope.common.writable import check_sources, check_writable, write_rows
from linrope.recurrence.state import LinearAttentionState

_FORMAT, _VERSION = "linrope.LayerState", 1


class LayerState:
    """What a layer carries from one call to the next: the sums over past keys and values, and its last inputs.

    FSDP2 casts the tensors of every dataclass among its arguments to half precision, in which sums stall. It leaves
    other classes alone, so this one is not a dataclass.

    Args:
        sums: the state of the layer's linear attention. Every packed sequence has a row of its own.
        conv: (b, taps - 1, channels): the last inputs of the short convolution. None without short_conv.

    Raises:
        TypeError, ValueError: a tensor of another type or shape.

    >>> layer = LinearRoPEAttention(8, 2, short_conv=4)
    >>> y, state = layer(torch.randn(1, 5, 8), return_state=True)
    >>> state.sums.kv.shape, state.conv.shape, state.position
    (torch.Size([1, 2, 4, 4]), torch.Size([1, 3, 24]), tensor([5]))
    """

    def __init__(self, sums: LinearAttentionState, conv: Tensor | None = None) -> None:
        self.sums, self.conv = sums, conv
        if not isinstance(sums, LinearAttentionState):
            raise TypeError(f"state.sums: got {type(sums).__name__}, expected LinearAttentionState")
        if conv is None:
            return
        if not isinstance(conv, Tensor):
            raise TypeError(f"state.conv: got {type(conv).__name__}, expected Tensor")
        if conv.device != sums.kv.device:
            raise ValueError(f"state.conv: got a tensor on {conv.device}, expected {sums.kv.device}")
        if conv.ndim != 3 or conv.shape[0] != sums.kv.shape[0]:
            expected = f"({sums.kv.shape[0]}, taps - 1, channels)"
            raise ValueError(f"state.conv: got {tuple(conv.shape)}, expected {expected}")

    def __setstate__(self, values: dict[str, Any]) -> None:
        """Restores a copy or a pickle, with the checks of a new state."""
        if values.keys() != {"sums", "conv"}:
            raise ValueError(f"state: got {', '.join(map(str, values))}; expected sums, conv")
        self.__init__(**values)  # type: ignore[misc]

    def __repr__(self) -> str:
        inputs = "".join(f", {name} {tuple(x.shape)}" for name, x in self._inputs().items())
        return f"LayerState({self.sums}{inputs})"

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Any], identity: str) -> "LayerState":
        """The state with these tensors, named as in ``tensors()``, and this identity of its sums."""
        sums = {name: x for name, x in tensors.items() if name != "conv"}
        return cls(LinearAttentionState(identity=identity, **sums), tensors.get("conv"))

    @classmethod
    def cat(cls, states: Sequence["LayerState"]) -> "LayerState":
        """Joins states along the batch: one state with the sequences of all of them, in order.

        Raises:
            ValueError: states is empty, or they differ in identity, shapes, dtypes, devices or optional tensors.

        >>> layer, x = LinearRoPEAttention(8, 2, short_conv=4), torch.randn(3, 5, 8)
        >>> one, two = (layer(y, return_state=True)[1] for y in (x[:1], x[1:]))
        >>> LayerState.cat([one, two]).position
        tensor([5, 5, 5])
        """
        sums = LinearAttentionState.cat([state.sums for state in states])
        rows = [state.rows()._inputs() for state in states]
        kinds = [{name: (x.shape[1:], x.dtype) for name, x in inputs.items()} for inputs in rows]
        for kind in kinds:
            if kind != kinds[0]:
                raise ValueError(f"states: got {_told(kind)} and {_told(kinds[0])}, expected one kind")
        return cls(sums, **{name: torch.cat([inputs[name] for inputs in rows]) for name in rows[0]})

    def _inputs(self) -> dict[str, Tensor]:
        return {} if self.conv is None else {"conv": self.conv}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors with a row for each sequence, by name: those of the sums, then conv."""
        return self.sums.tensors() | self._inputs()

    @property
    def nbytes(self) -> int:
        """The size of all its tensors in bytes; of a pool, that of all its rows."""
        return sum(x.nbytes for x in self.tensors().values())

    @property
    def identity(self) -> str:
        """The feature map and the rotation that made the state. Layers with others reject it."""
        return self.sums.identity

    @property
    def position(self) -> Tensor:
        """(b,) int64: the position of the next token."""
        return self.sums.position

    @property
    def sequences(self) -> int:
        """b, or the number of slots."""
        return self.sums.sequences

    @property
    def slots(self) -> Tensor | None:
        """(b',) int64: rows of a pool; see ``at``."""
        return self.sums.slots

    @property
    def donated(self) -> bool:
        """See ``donate``."""
        return self.sums.donated

    def _map(self, sums: LinearAttentionState, function: Callable[[Tensor], Tensor]) -> "LayerState":
        return LayerState(sums, **{name: function(x) for name, x in self._inputs().items()})

    def detach(self) -> "LayerState":
        """A copy without gradients, for truncated backpropagation."""
        return self._map(self.sums.detach(), lambda x: x.detach().clone())

    def clone(self) -> "LayerState":
        return self._map(self.sums.clone(), torch.clone)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "LayerState":
        """A copy on that device, with the sums' kv in dtype (float32 or float64). Other tensors keep their dtypes."""
        sums = self.sums.to(device, dtype)
        return self if sums is self.sums else self._map(sums, lambda x: x.to(device, copy=True))

    def donate(self) -> "LayerState":
        """Lets the next decoding step (one token, no gradients) overwrite this state's memory with the next state.

        Do not use the donated state again. See ``LinearAttentionState.donate``.

        >>> layer, x = LinearRoPEAttention(8, 2, short_conv=4), torch.randn(1, 6, 8)
        >>> with torch.no_grad():
        ...     _, state = layer(x[:, :5], return_state=True)
        ...     _, after = layer(x[:, 5:], state=state.donate(), return_state=True)
        >>> after.conv is state.conv, after.position
        (True, tensor([6]))
        """
        return self._with(self.sums.donate())

    def at(self, slots: Tensor) -> "LayerState":
        """Rows of this state, used as a pool: calls without gradients read and write them in place.

        slots (b,) int64 or int32, all different: for each sequence of the call, its row. See
        ``LinearAttentionState.at``.

        >>> layer = LinearRoPEAttention(8, 2)
        >>> _, pool = layer(torch.zeros(8, 0, 8), return_state=True)  # 8 rows, all empty
        >>> with torch.no_grad():
        ...     y = layer(torch.randn(2, 1, 8), state=pool.at(torch.tensor([6, 1])))
        >>> pool.position
        tensor([0, 1, 0, 0, 0, 0, 1, 0])
        """
        return self._with(self.sums.at(slots))

    def _with(self, sums: LinearAttentionState) -> "LayerState":
        """A state with other sums of as many rows. Skips the checks, which conv has passed."""
        state = LayerState.__new__(LayerState)
        state.sums, state.conv = sums, self.conv
        return state

    def at_slots(self, x: Tensor) -> Tensor:
        """A tensor of this state in the rows of the call: a copy of those at the slots, or x itself without slots."""
        return x if self.slots is None else x.index_select(0, self.slots)

    def rows(self) -> "LayerState":
        """A copy of the rows at the slots; without slots, the state itself."""
        return self if self.slots is None else self._map(self.sums.rows(), self.at_slots)

    def reorder(self, index: Tensor) -> "LayerState":
        """A copy of the sequences at index (b',), which may repeat or omit some, as in beam search.

        With slots, index counts the slots, and the copy has none.
        """
        sums = self.sums.reorder(index)
        rows = index.to(sums.kv.device).long()
        return self._map(sums, lambda x: x.index_select(0, rows if self.slots is None else self.slots[rows]))

    def write(self, new: "LayerState | Mapping[str, Tensor | None]") -> None:
        """Copies another state, or some tensors by name, into this one's memory: at the slots, if it has slots.

        Raises:
            ValueError: the other state has another identity or other optional tensors, a shape does not fit, or the
                memory is not writable. Nothing is written then.

        >>> _, state = LinearRoPEAttention(8, 2)(torch.randn(3, 5, 8), return_state=True)
        >>> pool = state.detach()
        >>> pool.at(torch.tensor([2])).write(pool.at(torch.tensor([0])).rows())  # row 2 is now a copy of row 0
        >>> torch.equal(pool.sums.kv[2], pool.sums.kv[0])
        True
        """
        sums: LinearAttentionState | dict[str, Tensor | None]
        if isinstance(new, LayerState):
            inputs, sums = new.rows()._inputs(), new.sums
            if inputs.keys() != self._inputs().keys():
                got, expected = ", ".join(new.tensors()), ", ".join(self.tensors())
                raise ValueError(f"state: got {got}; expected {expected}")
        else:
            inputs = {"conv": conv} if (conv := new.get("conv")) is not None else {}
            sums = {name: x for name, x in new.items() if name != "conv"}
        check_sources(self.tensors(), inputs, self.sequences)
        self.sums.write(sums)
        write_rows(self._inputs(), inputs, self.slots)

    def check_inputs_writable(self, tokens: int) -> None:
        """Raises ValueError if a call on this many tokens overwrites conv, but must not write to it.

        The call itself checks the memory of the sums, before it writes to any.
        """
        if self.sums.slots is not None or (self.sums.donated and tokens == 1):
            # A call with gradients leaves a donated state alone.
            check_writable({name: x for name, x in self._inputs().items() if not x.requires_grad})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a safetensors file, atomically."""
        metadata = {"format": _FORMAT, "version": str(_VERSION), "identity": self.identity}
        save_tensors(Path(path), self.rows().detach().tensors(), metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "LayerState":
        """Reads a file that ``save`` wrote.

        Raises:
            FileNotFoundError: no such file. ValueError: it is damaged, newer, or holds something else.
        """
        tensors, metadata = load_tensors(Path(path), _FORMAT, _VERSION)
        try:
            return cls.from_tensors(tensors, metadata["identity"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: does not hold the state of a layer ({error})") from error


def next_state(
    state: LayerState | None, sums: LinearAttentionState | None, conv: Tensor | None
) -> LayerState | None:
    """The state after a call. None: the call returns none.

    conv is written into the memory of the incoming state if the operation wrote the sums there, or if that state is
    rows of a pool.

    Args:
        state: the state before the call.
        sums: those that the operation returned.
    """
    if state is not None and (state.slots is not None or (sums is not None and sums.kv is state.sums.kv)):
        write_rows({"conv": state.conv}, {"conv": conv}, state.slots)
        return None if sums is None else state._with(sums)
    return None if sums is None else LayerState(sums, conv)


def _told(kind: dict[str, Any]) -> str:
    return (
        ", ".join(f"{name} (b, {', '.join(map(str, x[0]))}) {x[1]}" for name, x in kind.items()) or "neither"
    )


def _children(state: LayerState) -> dict[str, Any]:
    return {"sums": state.sums} | state._inputs()


def _flatten(state: LayerState) -> tuple[list[Any], str]:
    children = _children(state)
    return list(children.values()), " ".join(children)


def _flatten_with_keys(state: LayerState) -> tuple[list[Any], str]:
    return [(pytree.GetAttrKey(name), x) for name, x in _children(state).items()], _flatten(state)[1]


def _unflatten(children: Any, context: Any) -> LayerState:
    """Without the checks: tracing rebuilds the state with placeholders."""
    state = LayerState.__new__(LayerState)
    state.conv = None
    for name, x in zip(context.split(), children, strict=True):
        setattr(state, name, x)
    return state


torch.serialization.add_safe_globals([LayerState])  # torch.load accepts no other classes
pytree.register_pytree_node(
    LayerState,
    _flatten,
    _unflatten,
    serialized_type_name="linrope.LayerState",
    flatten_with_keys_fn=_flatten_with_keys,
)
