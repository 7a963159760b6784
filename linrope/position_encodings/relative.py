"""Relative position encodings: terms of the scores, and of the values, that depend on p_i - p_j.

i counts queries and j keys; p are their positions. Each query head has its own weights.
"""

import math

import torch
from torch import Tensor, nn

from linrope.common.argument_checks import check_integers, check_sizes
from linrope.rotation.rotary import Rotary


class RelativeEncoding(nn.Module):
    """The base of relative encodings: scores of softmax attention that depend on positions.

        out_i = sum_j softmax_j(scores_ij) v_j

    Args:
        num_heads: h.
        head_dim: d, the size of queries and keys.
        value_head_dim: e, the size of values; default head_dim.

    Raises:
        TypeError: a size is not an integer.
        ValueError: a size is below 1.
    """

    def __init__(self, num_heads: int, head_dim: int, value_head_dim: int | None = None) -> None:
        super().__init__()
        check_integers(num_heads=num_heads, head_dim=head_dim, value_head_dim=value_head_dim)
        e = head_dim if value_head_dim is None else value_head_dim
        if num_heads < 1 or head_dim < 1 or e < 1:
            raise ValueError(
                f"num_heads={num_heads}, head_dim={head_dim}, value_head_dim={e}: expected at least 1"
            )
        self.num_heads, self.head_dim, self.value_head_dim = num_heads, head_dim, e

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, key_positions: Tensor, mask: Tensor
    ) -> Tensor:
        """softmax(scores) v, (b, n, h, e). mask: the keys that each query sees, bool (b, 1, n or 1, m)."""
        scores = self.scores(q, k, positions, key_positions)
        # Not -inf, which would make a row without keys NaN.
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1, torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
        return self.values(weights.masked_fill(~mask, 0), v, positions, key_positions)

    def scores(self, q: Tensor, k: Tensor, positions: Tensor, key_positions: Tensor) -> Tensor:
        """q (b, n, h, d), k (b, m, h, d), positions (b or 1, n), (b, m) -> (b, h, n, m), scaled."""
        raise NotImplementedError

    def values(self, weights: Tensor, v: Tensor, positions: Tensor, key_positions: Tensor) -> Tensor:
        """weights (b, h, n, m), v (b, m, h, e) -> (b, n, h, e)."""
        return torch.einsum("bhnm,bmhe->bnhe", weights, v)


class Shaw(RelativeEncoding):
    """Adds a learned vector for each clipped distance to keys and to values.

        scores_ij = <q_i, k_j + pk_r> / sqrt(d),   r = clip(p_i - p_j, -max_distance, max_distance)
        out_i = sum_j softmax_j(scores_ij) (v_j + pv_r)

    Args:
        max_distance: longer distances count as this one; the paper takes 16.

    Raises:
        ValueError: a size is below 1.

    Source: Shaw et al. 2018, arXiv 1803.02155, eq. 3 and 4; RoFormer eq. 5.

    >>> from linrope.position_encodings import Shaw, SoftmaxAttention
    >>> SoftmaxAttention(16, 2, positions=Shaw(2, 8, max_distance=4))(torch.randn(1, 10, 16)).shape
    torch.Size([1, 10, 16])
    """

    def __init__(
        self, num_heads: int, head_dim: int, value_head_dim: int | None = None, *, max_distance: int = 16
    ) -> None:
        super().__init__(num_heads, head_dim, value_head_dim)
        check_sizes(max_distance=max_distance)
        self.max_distance = max_distance
        self.pk = _table(num_heads, 2 * max_distance + 1, self.head_dim)
        self.pv = _table(num_heads, 2 * max_distance + 1, self.value_head_dim)

    def _rows(self, positions: Tensor, key_positions: Tensor) -> Tensor:
        return _rows(positions, key_positions, -self.max_distance, self.max_distance)

    def scores(self, q: Tensor, k: Tensor, positions: Tensor, key_positions: Tensor) -> Tensor:
        by_distance = _pick(torch.einsum("bnhd,hrd->bhnr", q, self.pk), self._rows(positions, key_positions))
        return (_products(q, k) + by_distance) / math.sqrt(self.head_dim)

    def values(self, weights: Tensor, v: Tensor, positions: Tensor, key_positions: Tensor) -> Tensor:
        rows = self._rows(positions, key_positions).expand_as(weights)
        per_row = weights.new_zeros(*weights.shape[:3], self.pv.shape[1]).scatter_add(-1, rows, weights)
        from_values = super().values(weights, v, positions, key_positions)
        return from_values + torch.einsum("bhnr,hre->bnhe", per_row, self.pv)


class TransformerXL(RelativeEncoding):
    """Adds a sinusoid of the distance as a second key, and two learned vectors to the query.

        scores_ij = (<q_i + u, k_j> + <q_i + w, W s(p_i - p_j)>) / sqrt(d)
        s(x)_2t = sin(x theta_t),   s(x)_2t+1 = cos(x theta_t),   theta_t = base^(-2t / (h d))

    s is not formed for pairs of tokens: s(p_i - p_j) = R(p_j - p_i) s(0) with RoPE's rotation R, so that
    <y, s(p_i - p_j)> = <R(p_i) y, R(p_j) s(0)>.

    Raises:
        ValueError: a size is below 1, num_heads * head_dim is odd, or base <= 0.

    Source: Dai et al. 2019, arXiv 1901.02860, section 3.3 (its v is w here).

    >>> from linrope.position_encodings import SoftmaxAttention
    >>> SoftmaxAttention(16, 2, positions="transformer-xl")(torch.randn(1, 10, 16)).shape
    torch.Size([1, 10, 16])
    """

    def __init__(
        self, num_heads: int, head_dim: int, value_head_dim: int | None = None, *, base: float = 10000.0
    ) -> None:
        super().__init__(num_heads, head_dim, value_head_dim)
        if num_heads * head_dim % 2:
            raise ValueError(f"num_heads={num_heads}, head_dim={head_dim}: expected an even product")
        self.rotary = Rotary(num_heads * head_dim, base=base)
        self.weight = _table(num_heads, head_dim, self.rotary.dim)
        self.u, self.w = (nn.Parameter(torch.zeros(num_heads, head_dim)) for _ in range(2))

    def scores(self, q: Tensor, k: Tensor, positions: Tensor, key_positions: Tensor) -> Tensor:
        y = torch.einsum("bnhd,hdf->bnhf", q + self.w, self.weight)
        s_0 = y.new_tensor([0.0, 1.0]).repeat(*key_positions.shape, 1, self.rotary.dim // 2)
        s = self.rotary(s_0, key_positions)[:, :, 0]  # (b, m, f)
        by_distance = torch.einsum("bnhf,bmf->bhnm", self.rotary(y, positions), s)
        return (_products(q + self.u, k) + by_distance) / math.sqrt(self.head_dim)


class DeBERTa(RelativeEncoding):
    """Disentangled attention: content to content, content to position, and position to content.

        scores_ij = (<q_i, k_j> + <q_i, kr_r(i,j)> + <qr_r(j,i), k_j>) / sqrt(3 d)
        r(i,j) = clip(p_i - p_j, -max_distance, max_distance - 1)

    In the paper each layer projects one shared table to its queries qr and keys kr. Here each layer learns
    its own qr and kr.

    Args:
        max_distance: longer distances count as this one; the paper takes 512.

    Raises:
        ValueError: a size is below 1.

    Source: He et al. 2020, arXiv 2006.03654, eq. 3 and 4; RoFormer eq. 10.

    >>> from linrope.position_encodings import DeBERTa, SoftmaxAttention
    >>> SoftmaxAttention(16, 2, positions=DeBERTa(2, 8, max_distance=4))(torch.randn(1, 10, 16)).shape
    torch.Size([1, 10, 16])
    """

    def __init__(
        self, num_heads: int, head_dim: int, value_head_dim: int | None = None, *, max_distance: int = 512
    ) -> None:
        super().__init__(num_heads, head_dim, value_head_dim)
        check_sizes(max_distance=max_distance)
        self.max_distance = max_distance
        self.qr = _table(num_heads, 2 * max_distance, head_dim)
        self.kr = _table(num_heads, 2 * max_distance, head_dim)

    def scores(self, q: Tensor, k: Tensor, positions: Tensor, key_positions: Tensor) -> Tensor:
        low, high = -self.max_distance, self.max_distance - 1
        to_keys = _rows(positions, key_positions, low, high)
        to_queries = _rows(key_positions, positions, low, high)
        content_position = _pick(torch.einsum("bnhd,hrd->bhnr", q, self.kr), to_keys)
        position_content = _pick(torch.einsum("bmhd,hrd->bhmr", k, self.qr), to_queries).transpose(-1, -2)
        return (_products(q, k) + content_position + position_content) / math.sqrt(3 * self.head_dim)


def _products(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bnhd,bmhd->bhnm", q, k)


def _rows(positions: Tensor, others: Tensor, low: int, high: int) -> Tensor:
    """Clipped distances as row numbers of a table, (b, 1, n, m)."""
    return (positions[:, None, :, None] - others[:, None, None, :]).clamp(low, high) - low


def _pick(products: Tensor, rows: Tensor) -> Tensor:
    """products (b, h, n, rows of the table) -> (b, h, n, m), without forming an (n, m, d) tensor."""
    return products.gather(-1, rows.expand(*products.shape[:2], -1, -1))


def _table(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.02)


RELATIVE: dict[str, type[RelativeEncoding]] = {
    "shaw": Shaw,
    "transformer-xl": TransformerXL,
    "deberta": DeBERTa,
}
