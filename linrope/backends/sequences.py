"""Packed sequences as calls of their own, for the reference backend."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from torch import Tensor

from linrope.backends.call import Call, Sums
from linrope.rotation.rotary import spell_out

PER_TOKEN = ("q", "k", "v", "log_decay", "angle_steps", "distances", "key_mask", "positions", "key_positions")


def separately(call: Call, sums: Sums) -> Iterator[tuple[Call, Sums]]:
    """The call of each packed sequence alone, with its incoming sums."""
    assert call.cu_seqlens is not None
    tensors: dict[str, Tensor | None] = {name: getattr(call, name) for name in PER_TOKEN}
    for name in ("positions", "key_positions"):
        if (positions := tensors[name]) is not None:
            tensors[name] = spell_out(positions, call.k.shape[1])
    for i, (low, high) in enumerate(pairwise(call.cu_seqlens.tolist())):
        part = {name: None if x is None else x[:, low:high] for name, x in tensors.items()}
        one = Sums(*(None if x is None else x[i : i + 1] for x in sums))  # type: ignore[arg-type]
        yield replace(call, cu_seqlens=None, **part), one  # type: ignore[arg-type]
