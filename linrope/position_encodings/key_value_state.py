"""The state of softmax attention: all keys and values."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False)
class KeyValueState:
    """What softmax attention remembers: every key and value it has seen.

    It grows with each token, in memory and in the time of the next one; a LinearAttentionState does not.

    Args:
        k: (b, m, g, d) keys, rotated where RoPE rotates them.
        v: (b, m, g, e) values.
        positions: (b, m) int64.
        mask: (b, m) bool, True = attend.
        identity: of the rotation that turned k; another one is refused.

    >>> from linrope.position_encodings import SoftmaxAttention
    >>> _, state = SoftmaxAttention(16, 2)(torch.randn(1, 5, 16), return_state=True)
    >>> state.k.shape, state.position
    (torch.Size([1, 5, 2, 8]), tensor([5]))
    """

    k: Tensor
    v: Tensor
    positions: Tensor
    mask: Tensor
    identity: str

    def __repr__(self) -> str:
        kind = str(self.k.dtype).removeprefix("torch.")
        return f"KeyValueState(k {tuple(self.k.shape)}, v {tuple(self.v.shape)}, {kind})"

    @property
    def position(self) -> Tensor:
        """(b,) int64, of the next token."""
        if self.positions.shape[1] == 0:
            return self.positions.new_zeros(len(self.positions))
        return self.positions[:, -1] + 1

    def append(self, later: "KeyValueState") -> "KeyValueState":
        """The keys and values of both, these first."""
        return self._map(lambda mine, other: torch.cat((mine, other), 1), later)

    def _map(self, function: Callable[..., Tensor], *others: "KeyValueState") -> "KeyValueState":
        names = ("k", "v", "positions", "mask")
        sides = (self, *others)
        made: dict[str, Any] = {name: function(*(getattr(side, name) for side in sides)) for name in names}
        return replace(self, **made)

    def detach(self) -> "KeyValueState":
        """The same numbers, cut from the graph."""
        return self._map(lambda tensor: tensor.detach().clone())

    def clone(self) -> "KeyValueState":
        return self._map(torch.clone)

    def donate(self) -> "KeyValueState":
        """Itself: a state that grows has no memory to write the next one into."""
        return self

    def reorder(self, index: Tensor) -> "KeyValueState":
        """The states of the sequences index (b',): repeats and drops them, as beam search does."""
        if index.ndim != 1 or index.is_floating_point() or index.dtype == torch.bool:
            raise ValueError(
                f"index: got {index.dtype} {tuple(index.shape)}, expected integers of shape (b,)"
            )
        return self._map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))


torch.serialization.add_safe_globals([KeyValueState])
