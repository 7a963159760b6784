"""RMSNorm and silu_product against PyTorch's functions in float64."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from linrope.layer.norm import RMSNorm, silu_product

SHAPES = (5,), (3, 8), (2, 3, 448), (2, 3, 4, 64), (0, 3, 8), (2, 2**16)  # the last too long for the kernels
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
TOLERANCE = {torch.float64: (1e-12, 1e-12), torch.float32: (1e-5, 2e-5), torch.bfloat16: (2e-2, 4e-2)}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def same(y: Tensor, expected: Tensor, inputs: list[Tensor], exact: list[Tensor]) -> None:
    """Compares a result and its gradients with those of the same computation in float64."""
    rtol, atol = TOLERANCE[y.dtype]
    dy = numbers(*y.shape, seed=9).detach()
    found = torch.autograd.grad(y, inputs, dy.to(y.dtype))
    wanted = torch.autograd.grad(expected, exact, dy)
    for a, b in ((y.detach(), expected.detach()), *zip(found, wanted, strict=True)):
        largest = float(b.abs().max()) if b.numel() else 1.0  # a weight's gradient is a sum over all rows
        assert_close(a.double(), b, rtol=rtol, atol=atol * max(1.0, largest))


@every_dtype
@every_shape
def test_rms_norm_is_torchs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, norm = numbers(*shape, seed=0, dtype=dtype), RMSNorm(shape[-1], eps=1e-5, dtype=dtype)
    with torch.no_grad():
        norm.weight.copy_(numbers(shape[-1], seed=1))
    oracle = nn.RMSNorm(shape[-1], eps=1e-5, dtype=torch.float64)
    oracle.load_state_dict(norm.state_dict())
    wide = x.detach().double().requires_grad_()
    y = norm(x)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    same(y, oracle(wide), [x, norm.weight], [wide, oracle.weight])


@every_dtype
@every_shape
def test_silu_product_is_torchs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate, x = numbers(*shape, seed=0, dtype=dtype), numbers(*shape, seed=1, dtype=dtype)
    wide = [z.detach().double().requires_grad_() for z in (gate, x)]
    y = silu_product(gate, x)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    same(y, F.silu(wide[0]) * wide[1], [gate, x], wide)


def test_rows_may_have_any_strides() -> None:
    x, gate = numbers(6, 5, 3, seed=0).float().mT, numbers(3, 6, 5, seed=1).float().permute(1, 0, 2)
    norm = RMSNorm(5)
    assert torch.equal(norm(x), norm(x.contiguous()))
    assert torch.equal(silu_product(gate, x), silu_product(gate.contiguous(), x.contiguous()))
