"""Recognizes tensors (batch, heads, length, dim), the order of other libraries, as far as their shapes allow."""

from torch import Tensor

from linrope.common.tracing import values_readable
from linrope.recurrence.call import TOKEN_INPUTS, Call
from linrope.recurrence.state import LinearAttentionState
from linrope.rotation.rotary import Rotary

HINT = (
    "heads and tokens look swapped: tensors are (batch, length, heads, dim), and gates (batch, length, heads); "
    "pass x.transpose(1, 2) if x has its heads first"
)
MANY_HEADS = 512


def suspected(call: Call) -> bool:
    """True if a refused call would fit better with heads and tokens swapped in some of its tensors."""
    q, k, v = call.q, call.k, call.v
    if any(not isinstance(x, Tensor) or x.ndim != 4 for x in (k, v)):
        return False
    m, g = k.shape[1:3]
    if m in (0, g):
        return False
    if v.shape[1] != m == v.shape[2] or _queries_swapped(q, k):
        return True
    g = v.shape[2]  # gates, steps, theta and states have v's heads
    if m == g:
        return False
    swapped = (g, m)
    per_token = [getattr(call, name) for name in TOKEN_INPUTS]
    return (
        any(isinstance(x, Tensor) and x.shape[1:3] in (swapped, (g, 1)) for x in per_token)
        or (isinstance(call.key_mask, Tensor) and call.key_mask.shape[1:] == (g,))
        or (isinstance(call.positions, Tensor) and call.positions.shape[-1:] == (g,))
        or (isinstance(call.decay, Tensor) and call.decay.shape == (m,))
        or (isinstance(call.rotary, Rotary) and call.rotary.heads == m > 1)
        or (isinstance(call.state, LinearAttentionState) and call.state.kv.shape[1] == m)
        or _ends_at(call.cu_seqlens, g)
    )


def _queries_swapped(q: Tensor | None, k: Tensor) -> bool:
    """True if q or k looks head-first, or both do. Both are recognized only if there are fewer key than query heads."""
    if not isinstance(q, Tensor) or q.ndim != 4:
        return False
    (n, h), (m, g) = q.shape[1:3], k.shape[1:3]
    return (n, h) == (g, m) or (h == g > n > m > 0 and n % m == 0)


def _ends_at(cu_seqlens: Tensor | None, length: int) -> bool:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.ndim != 1 or not len(cu_seqlens):
        return False
    return values_readable(cu_seqlens) and int(cu_seqlens[-1]) == length


def warning(call: Call) -> str | None:
    """What to warn of if k (b, m, g, d) has fewer tokens than heads, and more heads than models have.

    Up to MANY_HEADS heads there is none: consistent head-first tensors look like short sequences of many heads. Nor is
    there one with a state, whose heads have been compared with v's.
    """
    m, g = call.k.shape[1:3]
    # Heads are compared first: in a trace m is a symbol, and comparing it would fix the length.
    if call.state is None and g > MANY_HEADS and m < g:
        return f"k: got {m} tokens and {g} heads; {HINT}"
    return None
