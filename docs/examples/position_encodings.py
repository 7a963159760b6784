"""Absolute and relative position encodings beside RoPE, and a bound on RoPE's products that falls with the distance.

An absolute encoding is added to the input of either kind of attention. A relative encoding changes the n x m scores of
softmax attention, which linear attention never forms: its state sums keys before any query is known.

    python docs/examples/position_encodings.py
"""

import math
from functools import partial

import torch
from torch import Tensor, nn

from linrope import LinearRoPEAttention, Rotary


class Sinusoidal(nn.Module):
    """x_i + s(p_i) with s(p)_(2t) = sin(p theta_t), s(p)_(2t+1) = cos(p theta_t), as in arXiv 1706.03762, section 3.5.

    RoPE has the same frequencies theta.
    """

    def __init__(self, embed_dim: int, base: float = 10000.0) -> None:
        super().__init__()
        self.rotary = Rotary(embed_dim, base=base)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.rotary.cos_sin(positions, x.dtype)
        return x + torch.stack((sin, cos), -1).flatten(-3)


class Learned(nn.Module):
    """x_i + table_(p_i) for positions below max_length, as in BERT (arXiv 1810.04805) and GPT-2."""

    def __init__(self, embed_dim: int, max_length: int) -> None:
        super().__init__()
        self.table = nn.Embedding(max_length, embed_dim)
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.table(positions)


class RelativeAttention(nn.Module):
    """Causal softmax attention whose scores, and in Shaw's case values, depend on p_i - p_j.

    x (b, n, embed_dim), positions (n,); query head h has its own weights.
    """

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.h, self.d = num_heads, embed_dim // num_heads
        self.qkv, self.o_proj = nn.Linear(embed_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.h, self.d)).unbind(2)
        n = x.shape[1]
        later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        weights = self.scores(q, k, positions).masked_fill(later, -torch.inf).softmax(-1)
        return self.o_proj(self.values(weights, v, positions).flatten(-2))

    def scores(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        """q, k (b, n, h, d) -> (b, h, n, n), scaled."""
        raise NotImplementedError

    def values(self, weights: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        return torch.einsum("bhnm,bmhe->bnhe", weights, v)


class Shaw(RelativeAttention):
    """A learned vector for each clipped distance, added to keys and to values. arXiv 1803.02155, eq. 3 and 4.

    scores_ij = <q_i, k_j + pk_r> / sqrt(d),   r = clip(p_i - p_j, -max_distance, max_distance)
    out_i = sum_j softmax_j(scores_ij) (v_j + pv_r)
    """

    def __init__(self, embed_dim: int, num_heads: int, max_distance: int = 16) -> None:
        super().__init__(embed_dim, num_heads)
        self.most = max_distance
        self.pk, self.pv = (table(num_heads, 2 * max_distance + 1, self.d) for _ in range(2))

    def scores(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        rows = clipped(positions, -self.most, self.most)
        by_distance = pick(torch.einsum("bnhd,hrd->bhnr", q, self.pk), rows)
        return (products(q, k) + by_distance) / math.sqrt(self.d)

    def values(self, weights: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        rows = clipped(positions, -self.most, self.most).expand_as(weights)
        per_row = weights.new_zeros(*weights.shape[:3], self.pv.shape[1]).scatter_add(-1, rows, weights)
        return super().values(weights, v, positions) + torch.einsum("bhnr,hre->bnhe", per_row, self.pv)


class TransformerXL(RelativeAttention):
    """A sinusoid of the distance as a second key, and two learned vectors u, w beside the query. arXiv 1901.02860.

        scores_ij = (<q_i + u, k_j> + <q_i + w, W s(p_i - p_j)>) / sqrt(d)

    s(p_i - p_j) = R(p_j - p_i) s(0) with RoPE's rotation R, so that <y, s(p_i - p_j)> = <R(p_i) y, R(p_j) s(0)>.
    """

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__(embed_dim, num_heads)
        self.rotary, self.weight = Rotary(embed_dim), table(num_heads, self.d, embed_dim)
        self.u, self.w = (nn.Parameter(torch.zeros(num_heads, self.d)) for _ in range(2))

    def scores(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        y = torch.einsum("bnhd,hdf->bnhf", q + self.w, self.weight)
        s_0 = y.new_tensor([0.0, 1.0]).repeat(1, len(positions), 1, self.rotary.dim // 2)
        s = self.rotary(s_0, positions)[0, :, 0]
        by_distance = torch.einsum("bnhf,mf->bhnm", self.rotary(y, positions), s)
        return (products(q + self.u, k) + by_distance) / math.sqrt(self.d)


class DeBERTa(RelativeAttention):
    """Disentangled attention: content to content, to position, and position to content. arXiv 2006.03654, eq. 3 and 4.

        scores_ij = (<q_i, k_j> + <q_i, kr_r(i,j)> + <qr_r(j,i), k_j>) / sqrt(3 d)
        r(i,j) = clip(p_i - p_j, -max_distance, max_distance - 1)

    In the paper all layers project one table to qr and kr. Here each layer learns its own.
    """

    def __init__(self, embed_dim: int, num_heads: int, max_distance: int = 512) -> None:
        super().__init__(embed_dim, num_heads)
        self.most = max_distance
        self.qr, self.kr = (table(num_heads, 2 * max_distance, self.d) for _ in range(2))

    def scores(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        rows = clipped(positions, -self.most, self.most - 1)
        content_position = pick(torch.einsum("bnhd,hrd->bhnr", q, self.kr), rows)
        position_content = pick(torch.einsum("bmhd,hrd->bhmr", k, self.qr), rows).mT
        return (products(q, k) + content_position + position_content) / math.sqrt(3 * self.d)


def products(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bnhd,bmhd->bhnm", q, k)


def clipped(positions: Tensor, low: int, high: int) -> Tensor:
    """Clipped distances p_i - p_j as row numbers of a table, (n, n)."""
    return (positions[:, None] - positions).clamp(low, high) - low


def pick(by_row: Tensor, rows: Tensor) -> Tensor:
    """by_row (b, h, n, rows of the table) -> (b, h, n, m), without a tensor (n, m, d)."""
    return by_row.gather(-1, rows.expand(*by_row.shape[:2], -1, -1))


def table(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.02)


def long_term_decay(distances: Tensor, dim: int, base: float = 10000.0) -> Tensor:
    """RoPE's long-term decay (RoFormer, section 3.4.3): it falls with the distance, though not at every step.

        S_i = sum_{t<i} exp(1j distance theta_t),   decay = mean over i = 1 .. dim/2 of |S_i|

    Let h_t be the product of the t-th pairs of q and k as complex numbers, and 0 after the last pair. Then
    |<R(p) q, R(p') k>| <= dim/2 * decay * max |h_(t+1) - h_t|.
    """
    angles = Rotary(dim, base=base).angles(distances).squeeze(-2)
    return torch.polar(torch.ones_like(angles), angles).cumsum(-1).abs().mean(-1)


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    x, positions = torch.randn(1, 50, 64), torch.arange(50)
    linear, rotated = LinearRoPEAttention(64, 4, rotary=None), LinearRoPEAttention(64, 4)
    sinusoidal, learned = Sinusoidal(64), Learned(64, 200)
    calls = {
        "sinusoidal": lambda p: linear(sinusoidal(x, p)),
        "learned": lambda p: linear(learned(x, p)),
        "RoPE": lambda p: rotated(x, positions=p),
    }
    calls |= {kind.__name__: partial(kind(64, 4), x) for kind in (Shaw, TransformerXL, DeBERTa)}
    for name, call in calls.items():
        change = (call(positions + 100) - call(positions)).abs().max() / call(positions).abs().max()
        print(f"{name}: outputs change by {change:.0e} of their largest when all positions move by 100")
    distances = torch.tensor([0, 8, 50, 100, 250])
    print("RoPE's long-term decay:", [f"{x:.1f}" for x in long_term_decay(distances, 128).tolist()])


if __name__ == "__main__":
    main()
