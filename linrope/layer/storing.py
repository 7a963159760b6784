"""Stores in the state what a layer carries from call to call in addition to the operation's sums."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from linrope.recurrence.state import LinearAttentionState


def store_in_state(
    name: str, x: Tensor, state: LinearAttentionState | None, last: LinearAttentionState | None
) -> LinearAttentionState | None:
    """Stores x (s, ..) as the last state's tensor of that name, in place if the operation wrote the state in place.

    Args:
        name: "conv" or "last_token".
        state: the state before the call. If it is rows of a pool, x is written into these rows.
        last: the state that the operation returned. None: the call returns no state.
    """
    pool = state if state is not None and state.slots is not None else None
    if pool is None and (last is None or getattr(last, name) is None or x.requires_grad):
        changes: dict[str, Any] = {name: x}
        return None if last is None else replace(last, **changes)
    target = last if pool is None else pool
    assert target is not None
    memory: Tensor = getattr(target, name)
    if x.requires_grad:
        raise RuntimeError("state: got rows of a pool in a call with gradients, expected torch.no_grad()")
    if target.slots is None:
        memory.copy_(x)
    else:
        memory.index_copy_(0, target.slots, x.to(memory.dtype))
    return last
