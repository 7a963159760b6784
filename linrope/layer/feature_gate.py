"""The forget gate of Kimi Delta Attention: every feature of a head has its own decay."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linrope.common.precision import full_precision
from linrope.layer.options import LONGEST
from linrope.layer.selective import spread
from linrope.ops.gates import log_sigmoid


class FeatureForgetGate(nn.Module):
    """Computes from each token the fraction of the past that each feature of each head keeps when that token arrives.

        log_decay = log sigmoid(y),  or with a bound  log_decay = -bound sigmoid(-y),      y = B A x + b of low rank

    The two features of a pair that turns share a number, a unit, or outputs would depend on absolute positions. The
    module maps x (b, n, embed_dim) to log_decay (b, n, num_heads, units) <= 0 in float32 or wider. b starts such that
    the half-lives of each head's units grow geometrically from 1 token to ``longest``: pairs that turn forget soonest,
    fast ones first. B starts at zero.

    Args:
        embed_dim: size of x.
        num_heads: g.
        units: the number of pairs that turn plus the number of features that do not.
        longest: half-life of a head's slowest unit at the start, in tokens.
        rank: rank of B A.
        bound: None; or the largest decay, at least 1: no unit keeps less than e^-bound. Then gates never close, and
            half-lives below 0.7 / bound tokens cannot be learned.

    Source: Kimi Delta Attention, arXiv 2510.26692, and GLA, arXiv 2312.06635, with other initial values.

    >>> from linrope.layer.feature_gate import FeatureForgetGate
    >>> FeatureForgetGate(16, 2, units=3, longest=16, rank=4, bound=5)(torch.zeros(1, 1, 16))[0, 0].exp()
    tensor([[0.5000, 0.8409, 0.9576],
            [0.5000, 0.8409, 0.9576]], grad_fn=<ExpBackward0>)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        units: int,
        longest: float = LONGEST,
        rank: int = 16,
        bound: float | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.longest, self.bound = longest, bound
        self.down = nn.Parameter(torch.empty(rank, embed_dim, device=device, dtype=dtype))
        self.up = nn.Parameter(torch.empty(num_heads, units, rank, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_heads, units, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.down, std=self.down.shape[1] ** -0.5)
        nn.init.zeros_(self.up)
        decay = spread(self.up.shape[1], self.longest)
        self.bias.copy_(decay.logit() if self.bound is None else -(-decay.log() / self.bound).logit())

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        with full_precision(x.device):
            y = F.linear(F.linear(x.to(wide), self.down.to(wide)), self.up.flatten(0, 1).to(wide))
            y = y.unflatten(-1, self.up.shape[:2]) + self.bias.to(wide)
            return log_sigmoid(y) if self.bound is None else -self.bound * (-y).sigmoid()

    def extra_repr(self) -> str:
        heads, units, rank = self.up.shape
        text = f"{self.down.shape[1]}, num_heads={heads}, units={units}, longest={self.longest}, rank={rank}"
        return text if self.bound is None else f"{text}, bound={self.bound}"
