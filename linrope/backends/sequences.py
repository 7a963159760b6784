"""Helpers of the backends reference and onnx: the incoming sums, and packed sequences one by one."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from linrope.recurrence.call import INPUTS, Call, Sums, sums_of
from linrope.recurrence.state import LinearAttentionState
from linrope.rotation.rotary import spell_out

PER_TOKEN = (*INPUTS, "positions", "key_positions", "key_mask", "distances")


def incoming_sums(call: Call, state: LinearAttentionState | None) -> Sums:
    """The sums before the first key: the state's, or zeros."""
    if (sums := sums_of(None if state is None else state.rows())) is not None:
        return sums
    (_, _, g, f), e = call.k.shape, call.v.shape[3]
    kv = call.v.new_zeros(call.sequences, g, f, e, dtype=torch.promote_types(call.v.dtype, torch.float32))
    return Sums(kv, kv.new_zeros(kv.shape[:3], dtype=torch.float64), None)


def each_sequence(call: Call, sums: Sums) -> Iterator[tuple[Call, Sums]]:
    """Splits a call with packed sequences: one call for each, with the sums before its first key."""
    assert call.bounds is not None
    tensors: dict[str, Tensor | None] = {name: getattr(call, name) for name in PER_TOKEN}
    for name in ("positions", "key_positions"):
        if (positions := tensors[name]) is not None:
            tensors[name] = spell_out(positions, call.k.shape[1])
    for i, (low, high) in enumerate(pairwise(call.bounds.tolist())):
        part = {name: None if x is None else x[:, low:high] for name, x in tensors.items()}
        one = Sums(*(None if x is None else x[i : i + 1] for x in sums))  # type: ignore[arg-type]
        yield replace(call, cu_seqlens=None, **part), one  # type: ignore[arg-type]


def pad_outside_tokens(out: Tensor, call: Call) -> Tensor:
    """(1, n, h, e): out, padded with zeros for the tokens before the first bound and after the last."""
    assert call.bounds is not None
    if call.q is None:
        return out
    first, *_, last = call.bounds.tolist()
    return F.pad(out, (0, 0, 0, 0, first, call.k.shape[1] - last))
