"""Modules that compute a layer's decay and rotation from its input, and the decays that they start from."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linrope.common.argument_checks import check_name, is_integer
from linrope.common.constants import Constant
from linrope.common.precision import full_precision
from linrope.layer.options import LONGEST, check_longest
from linrope.ops import forget_and_write_gates, gates
from linrope.rotation.rotary import Rotary

BOUNDS = ("multiply", "add")


def spread(heads: int, longest: float = LONGEST) -> Tensor:
    """Decays whose half-lives T grow geometrically from 1 token to ``longest``: (heads,) float64.

        gamma_i = 2^(-1 / T_i),   T_i = longest^(i / (heads - 1));   a single head has T = sqrt(longest)

    Raises:
        ValueError: longest is below 1 or not finite.

    >>> from linrope.layer.selective import spread
    >>> spread(3, longest=16.0)  # half-lives 1, 4 and 16
    tensor([0.5000, 0.8409, 0.9576], dtype=torch.float64)
    """
    check_longest(longest)
    i = torch.arange(heads, dtype=torch.float64, device="cpu")
    exponent = i / (heads - 1) if heads > 1 else i + 0.5
    return 2.0 ** -(float(longest) ** -exponent)


class ForgetGate(nn.Module):
    """Computes from each token the fraction f of the past that each head keeps when that token arrives.

        log_decay = log f = log sigmoid(W x + b)        w = 1 - f

    It maps x (b, n, embed_dim) to log_decay (b, n, num_heads) <= 0 or, with writes=True, to log_decay and the tied
    write gate w, the argument ``write`` of ``linear_rope_attention``. Both are float32 or wider whatever the dtypes of
    x and the weights, because half precision has few numbers near 1. b starts from ``spread``, and W starts small.

    Args:
        embed_dim: size of x.
        num_heads: g.
        longest: half-life of the slowest head at the start, in tokens. With 1, all heads start at a decay of 1/2.

    Source: the gate per head of Mamba-2 (arXiv 2405.21060) and GLA (arXiv 2312.06635), with other initial values; the
    tied gates of the minimal GRU (arXiv 1603.09420) and of HGRN (arXiv 2311.04823).

    >>> from linrope.layer.selective import ForgetGate
    >>> ForgetGate(16, 2, longest=100)(torch.zeros(1, 1, 16)).exp()  # half-lives 1 and 100
    tensor([[[0.5000, 0.9931]]], grad_fn=<ExpBackward0>)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        longest: float = LONGEST,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.longest = longest
        self.weight = nn.Parameter(torch.empty(num_heads, embed_dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        self.bias.copy_(spread(len(self.bias), self.longest).logit())

    def forward(self, x: Tensor, writes: bool = False) -> Any:
        return (forget_and_write_gates if writes else gates)(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, num_heads={self.weight.shape[0]}, longest={self.longest}"


class SigmoidGate(nn.Module):
    """Computes a number from 0 to 1 from each token for each head, in float32 or wider: sigmoid(W x + b).

    It maps x (b, n, embed_dim) to (b, n, num_heads). W starts small.

    Args:
        embed_dim: size of x.
        num_heads: g.
        start: b's initial value; with 0 the numbers start near 1/2.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        start: float = 0.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(torch.empty(num_heads, embed_dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        nn.init.constant_(self.bias, self.start)

    def forward(self, x: Tensor) -> Tensor:
        return gates(x, self.weight, self.bias, activation="sigmoid")

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, num_heads={self.weight.shape[0]}"


class WriteGate(SigmoidGate):
    """Computes from each token how much of its value each head writes into the state: w = sigmoid(W x + b).

    It maps x (b, n, embed_dim) to w (b, n, num_heads) in float32 or wider, the argument ``write`` of
    ``linear_rope_attention``. W starts small, and b such that the gate begins like one tied to a ``ForgetGate``.

    Args:
        embed_dim: size of x.
        num_heads: g.
        longest: as in the ForgetGate.

    Source: the input gates of the LSTM and of xLSTM (arXiv 2405.04517), with other initial values.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        longest: float = LONGEST,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.longest = longest
        super().__init__(embed_dim, num_heads, device=device, dtype=dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.bias.copy_(-spread(len(self.bias), self.longest).logit())


class EraseGate(SigmoidGate):
    """Computes for each token the share of the value read by its key that the delta rule takes out of the state.

        b = largest sigmoid(W x + b_0)

    It maps x (b, n, embed_dim) to b (b, n, num_heads) in float32 or wider, the argument ``erase`` of
    ``linear_rope_attention``. W starts small. b_0 starts at -4, so b near 0: a gate that starts open takes out what the
    layer has to learn to use. If the gate is tied, b_0 starts at 0, since nothing would be written otherwise. With keys
    of length 1 the state is multiplied by 1 - b in the direction of the key: b = 1 replaces what it holds there. Beyond
    that, up to 2, the factor is negative, with which a layer can track a state such as a parity.

    Args:
        embed_dim: size of x.
        num_heads: g.
        largest: 1 or 2, the upper end of the range of b.
        tied: whether b is the write factor too.

    Source: the gate beta of DeltaNet (arXiv 2406.06484) and Gated DeltaNet (arXiv 2412.06464); up to 2:
    arXiv 2411.12537.

    >>> from linrope.layer.selective import EraseGate
    >>> EraseGate(16, 2)(torch.zeros(1, 1, 16))
    tensor([[[0.0180, 0.0180]]], grad_fn=<MulBackward0>)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        largest: int = 1,
        *,
        tied: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads, 0.0 if tied else -4.0, device=device, dtype=dtype)
        self.largest = largest

    def forward(self, x: Tensor) -> Tensor:
        return self.largest * super().forward(x)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, largest={self.largest}"


class SelectiveSteps(nn.Module):
    """Computes from each token the angle by which it turns the features further, or less far, than theta.

        angle_steps = theta tanh(y)  ("multiply")   or   pi tanh(y)  ("add"),      y = B A x of low rank

    Together with a Rotary of that theta, the angle between consecutive tokens is theta (1 + tanh y) or
    theta + pi tanh(y). "multiply" suits recall. "add" can turn any pair by any angle and suits tracking a state. B
    starts at zero, so the rotation starts as the fixed one. The module maps x (b, n, embed_dim) to
    (b, n, heads, pairs) in float32 or wider: in half precision the summed angles would be off by 0.4 rad after a few
    thousand tokens.

    Args:
        embed_dim: size of x.
        rotary: the rotation whose angles the steps are added to. It determines theta and the number of pairs.
        num_heads: 1: all heads share the steps. Otherwise each key/value head has steps of its own, which takes
            rank * pairs weights per head, well under 1% of a layer's weights.
        rank: rank of B A.
        bound: "multiply" or "add".

    Raises:
        ValueError: bound is unknown, rank is below 1, or rotary has axes or xpos.

    Source: Selective RoPE, arXiv 2511.17388, and Mamba-3, arXiv 2603.15569. Here the steps are bounded and start at
    0, so that the rotation starts as RoPE's.

    >>> from linrope.layer.selective import SelectiveSteps
    >>> SelectiveSteps(16, Rotary(8), num_heads=2)(torch.randn(1, 5, 16)).shape
    torch.Size([1, 5, 2, 4])
    """

    def __init__(
        self,
        embed_dim: int,
        rotary: Rotary,
        num_heads: int,
        rank: int = 16,
        bound: str = "multiply",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_name("bound", bound, BOUNDS)
        if not (is_integer(rank) and rank >= 1):
            raise ValueError(f"rank={rank!r}: expected an integer, at least 1")
        if rotary.axes is not None or rotary.xpos is not None:
            raise ValueError(f"rotary: got {rotary}, expected one without axes and xpos for selective steps")
        self.rotary, self.bound = rotary, bound
        theta = rotary.frequencies[0]
        self._theta = Constant(theta)
        self.down = nn.Parameter(torch.empty(rank, embed_dim, device=device, dtype=dtype))
        self.up = nn.Parameter(torch.empty(num_heads, theta.shape[1], rank, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.down, std=self.down.shape[1] ** -0.5)
        nn.init.zeros_(self.up)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        with full_precision(x.device):
            y = F.linear(F.linear(x.to(wide), self.down.to(wide)), self.up.flatten(0, 1).to(wide))
            y = y.unflatten(-1, self.up.shape[:2]).tanh()
            steps: Tensor = y * (math.pi if self.bound == "add" else self._theta.on(x.device).to(wide))
        return steps

    def extra_repr(self) -> str:
        heads, _, rank = self.up.shape
        return f"{self.down.shape[1]}, heads={heads}, rank={rank}, bound={self.bound!r}"
