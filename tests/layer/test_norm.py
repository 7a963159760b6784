"""RMSNorm and silu_product against PyTorch's functions, with their gradients."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from linrope.layer.norm import RMSNorm, silu_product

SHAPES = (5,), (3, 8), (2, 3, 448), (2, 3, 4, 64), (0, 3, 8), (2, 2**16)  # the last too long for the kernels
DIGITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dtype", DIGITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_they_are_torchs_and_so_are_their_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, gate, weight = numbers(*shape, seed=0), numbers(*shape, seed=1), numbers(shape[-1], seed=2)
    x, gate, weight = (y.to(dtype).requires_grad_() for y in (x, gate, weight))
    norm = RMSNorm(shape[-1], eps=1e-5)
    norm.weight = nn.Parameter(weight.detach())
    exact = F.rms_norm(x.double(), shape[-1:], weight.double(), eps=1e-5)
    y, z, product = norm(x), silu_product(gate, x), F.silu(gate.double()) * x.double()
    assert_close((y, z), (exact.to(dtype), product.to(dtype)))
    dy = numbers(*shape, seed=3)
    of_norm = (
        torch.autograd.grad(y, (x, norm.weight), dy.to(dtype)),
        torch.autograd.grad(exact, (x, weight), dy),
    )
    of_product = torch.autograd.grad(z, (gate, x), dy.to(dtype)), torch.autograd.grad(product, (gate, x), dy)
    for a, b in (*zip(*of_norm, strict=True), *zip(*of_product, strict=True)):
        largest = float(b.abs().max()) if b.numel() else 1.0  # a weight's gradient is a sum over all rows
        assert_close(a, b, rtol=DIGITS[dtype], atol=2 * DIGITS[dtype] * max(1.0, largest))


def test_rows_may_have_any_strides() -> None:
    x, gate = numbers(6, 5, 3, seed=0).float().mT, numbers(3, 6, 5, seed=1).float().permute(1, 0, 2)
    norm = RMSNorm(5)
    assert torch.equal(norm(x), norm(x.contiguous()))
    assert torch.equal(silu_product(gate, x), silu_product(gate.contiguous(), x.contiguous()))
