"""Recognizes tensors (batch, heads, length, dim), the order of other libraries, as far as their shapes allow."""

import warnings

from torch import Tensor

from linrope.common.tracing import values_readable
from linrope.operation.request import Request
from linrope.recurrence.state import LinearAttentionState
from linrope.rotation.rotary import Rotary

HINT = (
    "heads and tokens look swapped: tensors are (batch, length, heads, dim), and gates (batch, length, heads); "
    "pass x.transpose(1, 2) if x has its heads first"
)
MANY_HEADS = 512


def suspected(request: Request) -> bool:
    """True if a refused call would fit better with heads and tokens swapped in some of its tensors."""
    q, k, v = request.q, request.k, request.v
    if any(not isinstance(x, Tensor) or x.ndim != 4 for x in (k, v)):
        return False
    m, g = k.shape[1:3]
    if m in (0, g):
        return False
    if v.shape[1] != m == v.shape[2] or _queries_swapped(q, k):
        return True
    g = v.shape[2]  # gates, steps, theta and states have v's heads
    swapped = (g, m)
    per_token = (request.log_decay, request.angle_steps, request.write)
    return (
        any(isinstance(x, Tensor) and x.shape[1:3] in (swapped, (g, 1)) for x in per_token)
        or (isinstance(request.key_mask, Tensor) and request.key_mask.shape[1:] == (g,))
        or (isinstance(request.positions, Tensor) and request.positions.shape[-1:] == (g,))
        or (isinstance(request.decay, Tensor) and request.decay.shape == (m,))
        or (isinstance(request.rotary, Rotary) and request.rotary.heads == m > 1)
        or (isinstance(request.state, LinearAttentionState) and request.state.kv.shape[1] == m)
        or _ends_at(request.cu_seqlens, g)
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


def warn_of_many_heads(request: Request) -> None:
    """Warns if k (b, m, g, d) has fewer tokens than heads, and more heads than models have.

    Up to MANY_HEADS heads it stays silent: consistent head-first tensors look like short sequences of many heads. With
    a state it also stays silent, because check_state has compared the state's heads with v's.
    """
    m, g = request.k.shape[1:3]
    # Heads are compared first: in a trace m is a symbol, and comparing it would fix the length.
    if request.state is None and g > MANY_HEADS and m < g:
        warnings.warn(f"k: got {m} tokens and {g} heads; {HINT}", stacklevel=5)
