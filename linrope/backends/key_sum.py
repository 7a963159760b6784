"""The sum over keys that equation 19 is made of, in chunks, and its gradients.

    sum_j e^(D_i - D_j) <x_i, y_j> v_j        over the keys j that query i sees

With x = R phi and y = R psi it is the numerator; with x = phi, y = psi and v = 1 the denominator. D is the log decay
summed in the chunk, up to D_end at its end, S the state before the chunk, and T the gradient of the state after it:

    sum_i = e^(D_i) S^T x_i + sum_(j<=i) e^(D_i - D_j) <x_i, y_j> v_j
    S    <- e^(D_end) S + sum_j e^(D_end - D_j) y_j v_j^T

    dx_i  = e^(D_i) S g_i + sum_(j<=i) e^(D_i - D_j) <g_i, v_j> y_j
    dy_j  = e^(D_end - D_j) T v_j + sum_(i>=j) e^(D_i - D_j) <g_i, v_j> x_i
    dv_j  = e^(D_end - D_j) T^T y_j + sum_(i>=j) e^(D_i - D_j) <x_i, y_j> g_i
    T    <- e^(D_end) T + sum_i e^(D_i) x_i g_i^T
    da_t  = e^(D_end) <S, T> + sum_(i>=t) <x_i, e^(D_i) S g_i> + sum_(j<t) <y_j, e^(D_end - D_j) T v_j>
            + sum_(j<t<=i) e^(D_i - D_j) <x_i, y_j> <g_i, v_j>

where g is the gradient of the sum, and sums over i include the r query heads of a key/value head. With a decay per
feature, its factors stand inside the products, and da_t of a feature has that feature's products. Without causal order
nothing decays, all queries read the state after the last key, and nothing is summed within chunks.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from linrope.backends.chunk_decay import (
    Decay,
    DecayPerFeature,
    product,
    sums_before,
    sums_from,
    transposed_product,
)
from linrope.recurrence.chunks import Cut
from linrope.recurrence.transition import gradients_around, states_around


@dataclass
class KeySum:
    """The sum for all queries, with the states around each chunk."""

    x: Tensor  # (t, g, r, c, f)
    y: Tensor  # (t, g, 1, c, f), 0 for hidden keys
    v: Tensor  # (t, g or 1, 1, c, e)
    decay: Decay
    first: Tensor | None  # (s, g, f, e): the state before each sequence
    state_dtype: torch.dtype
    query_cut: Cut
    key_cut: Cut
    causal: bool

    def value(self) -> Tensor:
        """(t, g, r, c, e)."""
        total = product(self.x_from_start, self.state_read)
        if self.causal:
            total += product(self.scores, self.v)
        return total

    def last_state(self) -> Tensor:
        """(s, g, f, e)."""
        return self.states[1][self.key_cut.last]

    @property
    def x_from_start(self) -> Tensor:
        """e^(D_i) x_i."""
        return self.decay.from_start(self.x)

    @property
    def y_to_end(self) -> Tensor:
        """e^(D_end - D_j) y_j."""
        return self.decay.to_end(self.y, self.state_dtype)

    @property
    def scores(self) -> Tensor:
        """e^(D_i - D_j) <x_i, y_j> for j <= i, else 0: (t, g, r, c, c)."""
        return self.decay.scores(self.x, self.y)

    @cached_property
    def states(self) -> tuple[Tensor, Tensor]:
        """S before and after each chunk, (t, g, f, e)."""
        added = transposed_product(self.y_to_end, self.v, self.state_dtype)[:, :, 0]
        return states_around(self.decay.transition, added, self.key_cut, self.first)

    @cached_property
    def state_read(self) -> Tensor:
        """The S that the queries of each chunk read: (t, g, 1, f, e)."""
        before, after = self.states
        read = before if self.causal else after[self.key_cut.last][self.query_cut.owner]
        return read[:, :, None].to(self.x.dtype)


class KeySumGradients:
    """The gradients of a ``KeySum`` from the gradient g (t, g, r, c, e) of its value and that of its last state."""

    def __init__(self, key_sum: KeySum, g: Tensor, last: Tensor | None) -> None:
        self.key_sum, self.g = key_sum, g
        added = transposed_product(key_sum.x_from_start, g, key_sum.state_dtype)[:, :, 0]
        after, before = gradients_around(key_sum.decay.transition, added, key_sum.query_cut, last)
        self.first = before.flip(0)[key_sum.query_cut.reverse().last]
        """The gradient of the state before each sequence, (s, g, f, e)."""
        self.T = after if key_sum.causal else self.first[key_sum.key_cut.owner]
        T = self.T[:, :, None].to(key_sum.x.dtype)
        self.x_from_state = key_sum.decay.from_start(product(g, key_sum.state_read.mT))
        self.y_from_later = key_sum.decay.to_end(product(key_sum.v, T.mT))
        self.weights = product(g, key_sum.v.mT).tril_() if key_sum.causal else None

    def d_queries(self) -> Tensor:
        """dx (t, g, r, c, f)."""
        if self.weights is None:
            return self.x_from_state
        return self.key_sum.decay.to_queries(self.weights, self.key_sum.y).add_(self.x_from_state)

    def d_keys(self) -> Tensor:
        """dy (t, g, 1, c, f)."""
        if self.weights is None:
            return self.y_from_later
        return self.key_sum.decay.to_keys(self.weights, self.key_sum.x).add_(self.y_from_later)

    def d_values(self) -> Tensor:
        """dv (t, g, 1, c, e)."""
        d_v = product(self.key_sum.y_to_end, self.T[:, :, None])
        if self.key_sum.causal:
            d_v += transposed_product(self.key_sum.scores, self.g)
        return d_v

    def leave_out_own_pairs(self) -> Tensor:
        """Leaves each token's pair with itself out of dx and dy. Returns its weight <g_i, v_i>: (t, g, r, c, 1)."""
        assert self.weights is not None
        diagonal = self.weights.diagonal(dim1=-2, dim2=-1)
        own = diagonal.clone()[..., None]
        diagonal.zero_()
        return own

    def d_log_decay(self) -> Tensor:
        """da (t, g, c, f) float64, or (t, g, c, 1) if all features decay alike.

        Each pair of a key and a later query counts once. It has the factor e^(a_t) of every token t between them, so
        nothing cancels, and da_t of a closed gate is as small as the gate.
        """
        assert self.weights is not None
        (S, _), decay, x, y = self.key_sum.states, self.key_sum.decay, self.key_sum.x, self.key_sum.y
        by_feature = isinstance(decay, DecayPerFeature)

        def summed(terms: Tensor) -> Tensor:  # (t, g, r, c, f)
            return (terms.sum(2) if by_feature else terms.sum((2, 4))[..., None]).double()

        rows = decay.transition.apply((S * self.T).sum(-1).double())
        of_state = (rows if by_feature else rows.sum(-1, keepdim=True))[:, :, None]
        of_queries, of_keys = summed(x * self.x_from_state), summed(y * self.y_from_later)
        of_pairs = decay.pairs_around(self.weights, x, y)
        return of_state + sums_from(of_queries, 2) + sums_before(of_keys, 2) + of_pairs
