"""Decay between the tokens of one chunk, per key/value head or per feature.

(t, g, r, c, ..): t chunk, g key/value head, r its query head, c token in the chunk, f feature. a_i is the log decay of
token i in float64, and D_i its sum from the chunk's first token to token i. No exponent is positive.
"""

from functools import cached_property, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from linrope.recurrence.transition import Transition

# A matrix library adds the terms of a product from first to last. Sums of more terms are formed in parts.
MOST_TERMS = 64


class Decay:
    """e^(D_i - D_j) from key j to query i: one number per key/value head, or 1 without a log decay."""

    def __init__(self, a: Tensor | None, dtype: torch.dtype) -> None:
        """a (t, g or 1, 1, c, 1) float64; dtype: that of the scores."""
        self.a, self.dtype = a, dtype

    @cached_property
    def D(self) -> Tensor | None:
        return None if self.a is None else self.a.cumsum(-2)

    @property
    def transition(self) -> Transition:
        """The decay of the state over the whole chunk."""
        return Transition(None if self.D is None else self.D[:, :, 0, -1])

    def from_start(self, x: Tensor) -> Tensor:
        """x_i e^(D_i): decayed since the chunk's start."""
        return x if self.D is None else x * self.D.exp().to(x.dtype)

    def to_end(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x_j e^(D_end - D_j): decayed to the chunk's last token. dtype: that of the factor."""
        return x if self.a is None else x * sums_after(self.a, -2).exp().to(dtype or x.dtype)

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        """<x_i, y_j> e^(D_i - D_j) for j <= i, else 0: (t, g, r, c, c)."""
        scores = product(x, y.mT)
        if self.D is not None:
            scores *= self._factors
        return scores.tril_()

    def to_queries(self, weights: Tensor, y: Tensor) -> Tensor:
        """sum_j weights_ij e^(D_i - D_j) y_j: (t, g, r, c, f). weights (t, g, r, c, c) are 0 for j > i."""
        return product(self._decayed(weights), y)

    def to_keys(self, weights: Tensor, x: Tensor) -> Tensor:
        """sum_i weights_ij e^(D_i - D_j) x_i, over r too: (t, g, 1, c, f)."""
        return transposed_product(self._decayed(weights), x)

    def pairs_around(self, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """sum_(j<t<=i) weights_ij e^(D_i - D_j) <x_i, y_j> for each token t, over r too: (t, g, c, 1)."""
        pairs = self.scores(x, y) * weights
        pairs = pairs[:, :, 0] if pairs.shape[2] == 1 else pairs.sum(2)
        earlier_keys = pairs @ torch.ones_like(pairs[0, 0]).triu(1)  # (t, g, i, t): summed over j < t
        return earlier_keys.tril_().sum(2)[..., None]

    def _decayed(self, weights: Tensor) -> Tensor:
        return weights if self.D is None else weights * self._factors

    @cached_property
    def _factors(self) -> Tensor:
        """e^(D_i - D_j) for j <= i, else 1: (t, g or 1, 1, c, c)."""
        assert self.D is not None
        return (self.D - self.D.mT).clamp_(max=0).exp_().to(self.dtype)


class DecayPerFeature(Decay):
    """A Decay with an a for each feature, (t, g or 1, 1, c, f).

    A score is a sum over features, whose terms then have different factors: none can be applied to the score.

    e^(D_i - D_j) = e^(D_i - D_m) e^(D_m - D_j) is applied to query and key, with m between them: the last token of the
    left half of a block of 2, 4, .. c tokens, with j in that half and i in the other. Each pair i > j is in one block.
    """

    @cached_property
    def _halves(self) -> "list[Halves]":
        assert self.a is not None
        return [Halves.of(self.a, 1 << i, self.dtype) for i in range(self.a.shape[-2].bit_length() - 1)]

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        scores = x.new_zeros(*x.shape[:-1], x.shape[-2])
        _diagonal(scores).copy_((x * y).sum(-1, keepdim=True))
        for halves in self._halves:
            halves.block(scores).copy_(halves.queries(x) @ halves.keys(y).mT)
        return scores

    def to_queries(self, weights: Tensor, y: Tensor) -> Tensor:
        sums = _diagonal(weights) * y
        for halves in self._halves:
            halves.right(sums).addcmul_(halves.block(weights) @ halves.keys(y), halves.to_query)
        return sums

    def to_keys(self, weights: Tensor, x: Tensor) -> Tensor:
        sums = (_diagonal(weights) * x).sum(2, keepdim=True)
        for halves in self._halves:
            of_block = (halves.block(weights).mT @ halves.queries(x)).sum(2, keepdim=True)
            halves.left(sums).addcmul_(of_block, halves.from_key)
        return sums

    def pairs_around(self, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The sum for each feature: (t, g, c, f) float64.

        A token t between key and query lies in the key's half of their block, or in the query's.
        """
        sums = torch.zeros_like(y, dtype=torch.float64)
        for halves in self._halves:
            block, queries, keys = halves.block(weights), halves.queries(x), halves.keys(y)
            of_queries = (queries * (block @ keys)).sum(2, keepdim=True).double()
            of_keys = (keys * (block.mT @ queries)).sum(2, keepdim=True).double()
            halves.right(sums).add_(sums_from(of_queries, -2))
            halves.left(sums).add_(sums_before(of_keys, -2))
        return sums[:, :, 0]


class Halves(NamedTuple):
    """The chunk in blocks of 2 size tokens: queries in their right halves, keys in their left halves."""

    size: int
    to_query: Tensor  # (t, g or 1, 1, blocks, size, f): e^(D_i - D_m)
    from_key: Tensor  # the same shape: e^(D_m - D_j)

    @classmethod
    def of(cls, a: Tensor, size: int, dtype: torch.dtype) -> "Halves":
        left, right = a.unflatten(-2, (-1, 2, size)).unbind(-3)
        return cls(size, right.cumsum(-2).exp().to(dtype), sums_after(left, -2).exp().to(dtype))

    def left(self, x: Tensor) -> Tensor:
        """A view of the left halves of x (t, g, r, c, f): (t, g, r, blocks, size, f)."""
        left: Tensor = x.unflatten(-2, (-1, 2, self.size))[..., 0, :, :]
        return left

    def right(self, x: Tensor) -> Tensor:
        right: Tensor = x.unflatten(-2, (-1, 2, self.size))[..., 1, :, :]
        return right

    def queries(self, x: Tensor) -> Tensor:
        return self.right(x) * self.to_query

    def keys(self, y: Tensor) -> Tensor:
        return self.left(y) * self.from_key

    def block(self, scores: Tensor) -> Tensor:
        """A view of the scores between the two halves of each block: (t, g, r, blocks, size, size)."""
        blocks: Tensor = scores.unflatten(-1, (-1, 2, self.size)).unflatten(-4, (-1, 2, self.size))
        return blocks[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def sums_from(x: Tensor, dim: int) -> Tensor:
    """x summed from each token to the chunk's last, along dim."""
    return x.flip(dim).cumsum(dim).flip(dim)


def sums_after(x: Tensor, dim: int) -> Tensor:
    """x summed over the tokens after each. A difference of two sums would lose digits beside strong gates."""
    later = sums_from(x, dim).narrow(dim, 1, x.shape[dim] - 1)
    return torch.cat((later, torch.zeros_like(x.narrow(dim, 0, 1))), dim)


def sums_before(x: Tensor, dim: int) -> Tensor:
    """x summed over the tokens before each."""
    earlier = x.cumsum(dim).narrow(dim, 0, x.shape[dim] - 1)
    return torch.cat((torch.zeros_like(x.narrow(dim, 0, 1)), earlier), dim)


def _diagonal(scores: Tensor) -> Tensor:
    """A view of the diagonal of scores (.., c, c): (.., c, 1)."""
    return scores.diagonal(dim1=-2, dim2=-1)[..., None]


def product(x: Tensor, y: Tensor) -> Tensor:
    """x (t, g, r, c, k) times y (t, g, 1, k, l). A long sum over k is formed in parts, to round less."""
    if x.shape[-1] == 1:
        return x * y
    if y.shape[-1] == 1:  # a matrix library takes ten times as long for many small products with a vector
        return (x * y.mT).sum(-1, keepdim=True)
    rows, columns = x.flatten(2, 3), y[:, :, 0]
    if x.shape[-1] <= MOST_TERMS:
        xy = rows @ columns
    else:
        parts = -(-x.shape[-1] // MOST_TERMS)
        pairs = zip(rows.tensor_split(parts, -1), columns.tensor_split(parts, -2), strict=True)
        xy = reduce(torch.add, (part @ other for part, other in pairs))
    by_query: Tensor = xy.unflatten(2, x.shape[2:4])
    return by_query


def transposed_product(scores: Tensor, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """scores (t, g, r, c, k) transposed, times x (t, g, r, c, l), summed over r: (t, g, 1, k, l), a column in dtype."""
    if x.shape[-1] == 1:
        return (scores * x).sum((2, 3), dtype=dtype)[:, :, None, :, None]
    return (scores.flatten(2, 3).mT @ x.flatten(2, 3))[:, :, None]
