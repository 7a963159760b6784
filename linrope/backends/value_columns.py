"""Fewer heads than threads: the columns of the values become values of more heads, which share queries and keys.

The columns of S do not depend on each other. A head with 128 values per token is thus four heads with 32, with the same
bits in each result, and a backend that computes a task per head has four tasks. Each of them forms the scores of the
keys again. In a backward pass the parts of dq and dk would be added up, and the bits would depend on the cut.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from linrope.recurrence.call import Call, Sums
from linrope.recurrence.state import LinearAttentionState

FEWEST_COLUMNS = 32  # in each part: the widest panel of columns, that of AVX-512 (NW in kernels/cpu/vector.h)
FEWEST_TOKENS = 256


def parts_of(call: Call) -> int:
    """Into how many parts to cut the values of each head, so that every thread has a task."""
    tasks, columns, parts = call.sequences * call.v.shape[2], call.v.shape[3], 1
    if call.k.shape[1] < FEWEST_TOKENS or call.group > 1 or tasks * columns == 0:
        return 1
    while 2 * parts * tasks <= torch.get_num_threads() and columns % (2 * parts * FEWEST_COLUMNS) == 0:
        parts *= 2
    return parts


class Divided(NamedTuple):
    """A call whose values have ``parts`` times as many heads."""

    call: Call
    state: LinearAttentionState | None
    parts: int

    @classmethod
    def of(cls, call: Call, state: LinearAttentionState | None, parts: int) -> "Divided":
        def heads(x: Tensor | None, dim: int) -> Tensor | None:
            return x if x is None or x.shape[dim] == 1 else x.repeat_interleave(parts, dim)

        names = ("log_decay", "write", "erase", "angle_steps")
        divided = call.changed(
            v=call.v.unflatten(3, (parts, -1)).flatten(2, 3),
            theta_turns=heads(call.theta_turns, 1),
            **{name: heads(getattr(call, name), 2) for name in names},
        )
        if state is None:
            return cls(divided, None, parts)
        rows = state.rows()
        tensors = {
            "kv": rows.kv.unflatten(3, (parts, -1)).movedim(3, 2).flatten(1, 2),
            "z": rows.z.repeat_interleave(parts, 1),
            "angle": heads(rows.angle, 1),
        }
        return cls(divided, rows._replace_unchecked(**tensors, donated=False), parts)

    def joined(self, out: Tensor, sums: Sums | None) -> tuple[Tensor, Sums | None]:
        """The results of the call itself, from those of ``self.call``."""
        parts = self.parts
        out = out.unflatten(2, (-1, parts)).flatten(3)
        if sums is None:
            return out, None
        kv, angle = sums.kv.unflatten(1, (-1, parts)).movedim(2, 3).flatten(3), sums.angle
        if angle is not None and angle.shape[1] > 1:
            angle = angle[:, ::parts]
        return out, Sums(kv, sums.z[:, ::parts], angle)
