"""The state of softmax attention: all keys and values."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from linrope.common.writable import rows_to_copy


@dataclass(frozen=True, eq=False, repr=False)
class KeyValueState:
    """The state of softmax attention: every key and value of the sequence so far.

    Each token adds to its memory and to the time of the next token; a LinearAttentionState does not grow.

    Args:
        k: (b, m, g, d) keys, rotated where RoPE rotates them.
        v: (b, m, g, e) values.
        positions: (b, m) int64.
        mask: (b, m) bool; False: padding.
        identity: the rotation of k; a layer with another rotation rejects the state.
        conv: (b, taps - 1, channels): the last inputs of a layer's short convolution.

    >>> from linrope.layer.softmax_attention import SoftmaxAttention
    >>> _, state = SoftmaxAttention(16, 2)(torch.randn(1, 5, 16), return_state=True)
    >>> state.k.shape, state.position
    (torch.Size([1, 5, 2, 8]), tensor([5]))
    """

    k: Tensor
    v: Tensor
    positions: Tensor
    mask: Tensor
    identity: str
    conv: Tensor | None = None

    def __repr__(self) -> str:
        kind = str(self.k.dtype).removeprefix("torch.")
        return f"KeyValueState(k {tuple(self.k.shape)}, v {tuple(self.v.shape)}, {kind})"

    @property
    def position(self) -> Tensor:
        """(b,) int64: the position of the next token."""
        if self.positions.shape[1] == 0:
            return self.positions.new_zeros(len(self.positions))
        return self.positions[:, -1] + 1

    @property
    def nbytes(self) -> int:
        """The size of all its tensors in bytes."""
        return sum(x.nbytes for x in self.tensors().values())

    def append(self, later: "KeyValueState") -> "KeyValueState":
        """This state followed by the keys and values of ``later``."""
        return self._map(lambda before, after: torch.cat((before, after), 1), later)

    def first(self, length: int, conv: Tensor | None) -> "KeyValueState":
        """Without the keys and values after the first ones, as many as length. conv: that of the shorter state."""
        return replace(replace(self, conv=None)._map(lambda x: x[:, :length]), conv=conv)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by field name; each has a row for each sequence."""
        return {field.name: x for field in fields(self) if isinstance(x := getattr(self, field.name), Tensor)}

    def _map(self, function: Callable[..., Tensor], *others: "KeyValueState") -> "KeyValueState":
        rows = {name: (x, *(getattr(other, name) for other in others)) for name, x in self.tensors().items()}
        return replace(self, **{name: function(*tensors) for name, tensors in rows.items()})  # type: ignore[arg-type]

    def detach(self) -> "KeyValueState":
        """A copy that is cut from the autograd graph."""
        return self._map(lambda tensor: tensor.detach().clone())

    def clone(self) -> "KeyValueState":
        return self._map(torch.clone)

    def rows(self) -> "KeyValueState":
        """Returns itself: it has no slots."""
        return self

    def donate(self) -> "KeyValueState":
        """Returns itself: a growing state has no memory that the next state could be written into."""
        return self

    def reorder(self, index: Tensor) -> "KeyValueState":
        """Selects the sequences at index (b',), as beam search does, which repeats some and drops others."""
        rows = rows_to_copy(index, len(self.k), self.k.device)
        return self._map(lambda tensor: tensor.index_select(0, rows))


torch.serialization.add_safe_globals([KeyValueState])
