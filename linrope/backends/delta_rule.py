"""The delta rule in chunks: which values enter a sum over keys if each key first erases what it reads.

With E_i = b_i y_i, the symbols of ``key_sum.py``, and w_i v_i written v_i:

    u_i + sum_(j<i) e^(D_i - D_j) <E_i, y_j> u_j = v_i - e^(D_i) S^T E_i         the sum then has u in place of v
    S  <- e^(D_end) S + sum_j e^(D_end - D_j) y_j u_j^T

Backwards, E is one more query, whose gradient is -du and which does not see its own key:

    du_j + sum_(i>j) e^(D_i - D_j) <E_i, y_j> du_i = sum_(i>=j) e^(D_i - D_j) <x_i, y_j> g_i + e^(D_end - D_j) T^T y_j
    T  <- e^(D_end) T + sum_i e^(D_i) (x_i g_i^T - E_i du_i^T)

Both are unit triangular systems, one per chunk. They are solved chunk by chunk, for all sequences at once.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from linrope.backends.chunk_decay import transposed_product
from linrope.backends.key_sum import KeySum, KeySumGradients
from linrope.recurrence.chunks import Cut


def erased(key_sum: KeySum, b: Tensor) -> KeySum:
    """The sum with u in place of v, and with its states. b (t, g or 1, 1, c, 1)."""
    cut, decay, dtype = key_sum.key_cut, key_sum.decay, key_sum.state_dtype
    E = b * key_sum.y
    A, E_from_start = decay.scores(E, key_sum.y)[:, :, 0], decay.from_start(E)[:, :, 0]
    y_to_end, u = key_sum.y_to_end, key_sum.v.clone()
    shape = *key_sum.y.shape[:2], key_sum.y.shape[-1], u.shape[-1]
    before, after = u.new_zeros(shape, dtype=dtype), u.new_zeros(shape, dtype=dtype)
    first = None if key_sum.first is None else key_sum.first.to(dtype)[cut.owner]
    S = torch.zeros_like(after[: _rows(cut)])
    for chunks in _steps(cut):
        S = _starting(S, first, cut.begins, chunks)
        right = u[chunks, :, 0] - E_from_start[chunks] @ S.to(u.dtype)
        u[chunks, :, 0] = torch.linalg.solve_triangular(A[chunks], right, upper=False, unitriangular=True)
        before[chunks] = S
        added = transposed_product(y_to_end[chunks], u[chunks], dtype)[:, :, 0]
        S = decay.transition[chunks].apply(S) + added
        after[chunks] = S
    written = replace(key_sum, v=u)
    written.states = before, after
    return written


def erased_gradients(
    key_sum: KeySum, b: Tensor, g: Tensor, last: Tensor | None
) -> tuple[KeySumGradients, Tensor]:
    """The gradients of a sum that ``erased`` made, with E as the last of the r queries, and du (t, g, 1, c, e).

    g, last: the gradients of the sum and of the last state.
    """
    cut, decay, dtype = key_sum.key_cut, key_sum.decay, key_sum.state_dtype
    E = b * key_sum.y
    A, E_from_start = decay.scores(E, key_sum.y)[:, :, 0], decay.from_start(E)
    y_to_end = key_sum.y_to_end[:, :, 0]
    du = transposed_product(key_sum.scores, g)
    added = transposed_product(key_sum.x_from_start, g, dtype)[:, :, 0]
    ends, transition = cut.reverse().begins.flip(0), decay.transition
    last_of_chunk = None if last is None else last.to(dtype)[cut.owner]
    T = torch.zeros_like(added[: _rows(cut)])
    for chunks in reversed([*_steps(cut)]):
        T = _starting(T, last_of_chunk, ends, chunks)
        right = du[chunks, :, 0] + (y_to_end[chunks] @ T.to(y_to_end.dtype)).to(du.dtype)
        du[chunks, :, 0] = torch.linalg.solve_triangular(A[chunks].mT, right, upper=True, unitriangular=True)
        erasing = transposed_product(E_from_start[chunks], du[chunks], dtype)[:, :, 0]
        T = transition[chunks].apply(T) + added[chunks] - erasing
    with_readers = replace(key_sum, x=torch.cat((key_sum.x, E), 2))
    with_readers.states = key_sum.states
    gradients = KeySumGradients(with_readers, torch.cat((g, -du), 2), last)
    assert gradients.weights is not None
    gradients.weights[:, :, -1].diagonal(dim1=-2, dim2=-1).zero_()
    return gradients, du


def _rows(cut: Cut) -> int:
    """How many chunks are computed at once: one per sequence, but packed sequences follow each other."""
    return 1 if cut.packed else len(cut.last)


def _steps(cut: Cut) -> Iterator[slice]:
    """The chunks that are computed at once, in the order of the tokens."""
    length = len(cut.owner) // _rows(cut)
    for i in range(length):
        yield slice(i, None, length)


def _starting(state: Tensor, outer: Tensor | None, starts: Tensor, chunks: slice) -> Tensor:
    """The state that these chunks start from: the one before, or that of ``outer`` where a sequence starts."""
    new = torch.zeros_like(state) if outer is None else outer[chunks]
    return torch.where(starts[chunks].view(-1, 1, 1, 1), new, state)
