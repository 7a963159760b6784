"""The derivative of each map, at its kinks and around them, in each dtype, against float64's."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import feature_maps, linear_rope_attention
from linrope.feature_maps import ELEMENTWISE
from tests.support.maps import MAPS, build, plain
from tests.support.oracle import NATIVE, computes

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
names = pytest.mark.parametrize("name", ELEMENTWISE)


def points(dtype: torch.dtype) -> Tensor:
    """0 and numbers of both signs around it: subnormal ones, those that vanish beside 1, and larger ones."""
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    sizes = [0, tiny / 4, tiny, eps / 16, eps / 4, eps / 2, eps, 4 * eps, 1e-4, 1e-3, 3e-3, 0.06, 0.3, 2, 5]
    x = torch.tensor(sizes, dtype=torch.float64).to(dtype)
    return torch.cat((x, -x))


def exact(name: str, x: Tensor) -> Tensor:
    """The derivative in float64. At 0 relu has its left derivative, 0, as in PyTorch."""
    x = x.double()
    s = x.sigmoid()
    return {
        "elu+1": x.clamp(max=0).exp(),
        "relu": (x > 0).double(),
        "relu2": 2 * x.relu(),
        "exp": x.exp(),
        "silu": s + x * s * (1 - s),
        "identity": torch.ones_like(x),
    }[name]


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype, digits: float = 4) -> None:
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    torch.testing.assert_close(got.double(), expected, rtol=digits * eps, atol=tiny)


@names
@every_dtype
def test_autograd_and_the_given_slope_are_the_exact_derivative(name: str, dtype: torch.dtype) -> None:
    value, slope, _ = ELEMENTWISE[name]
    far = points(dtype).new_tensor([-30, -9, 9])
    x = torch.cat((points(dtype), far)).requires_grad_()
    y = value(x)
    (by_autograd,) = torch.autograd.grad(y.sum(), x)
    assert_near(by_autograd, exact(name, x.detach()), dtype)
    # "eager" takes the slope in float32 or wider
    wide = x.detach().to(torch.promote_types(dtype, torch.float32))
    assert_near(slope(wide, value(wide)), exact(name, wide), wide.dtype)


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["elu+1", "relu", "relu2"])
def test_every_number_of_half_precision_has_the_exact_slope(name: str, dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.isfinite()].requires_grad_()
    (slopes,) = torch.autograd.grad(ELEMENTWISE[name].value(x).sum(), x)
    expected = exact(name, x.detach())
    fits = expected <= torch.finfo(dtype).max
    assert_near(slopes[fits], expected[fits], dtype)


@pytest.mark.parametrize("label", MAPS)
def test_maps_have_the_derivative_that_float64_gives(label: str) -> None:
    """Tokens at kinks: numbers that are 0, nearly 0, or equal, of which there is more than one largest."""
    torch.manual_seed(0)
    fmap = build(label)
    tokens = torch.randn(16, 4)
    tokens[1:5] *= torch.tensor([3, 1e-3, 1e-5, 1e-7])[:, None]
    tokens[5], tokens[6], tokens[7, ::2], tokens[8, 1:] = 0, 1, 0, 1e-3
    tokens[9:12] = points(torch.float32)[torch.randperm(30)[:12]].view(3, 4)

    def jacobian(fmap: Any, x: Tensor, side: str) -> Tensor:  # (8, 2, f, 4): tokens do not see each other
        x = x.clone().requires_grad_()
        y = plain(getattr(fmap, side)(x))
        rows = [torch.autograd.grad(y[..., i].sum(), x, retain_graph=True)[0] for i in range(y.shape[-1])]
        return torch.stack(rows, -2)[0]

    wide = copy.deepcopy(fmap).double()
    for dtype, side in product(DTYPES, ("queries", "keys")):
        x = tokens.view(1, 8, 2, 4).to(dtype)
        expected, got = jacobian(wide, x.double(), side), jacobian(fmap, x, side).double()
        # One gradient is a sum over features, and a feature's derivative one of several terms.
        largest = expected.abs().amax((-1, -2), keepdim=True)
        error = (got - expected).abs() / (largest + torch.finfo(dtype).tiny)
        # The relative error of exp(y) is the absolute error of y, whose terms are about as large as |x|^2.
        exponent = x.double().square().sum(-1)[0, :, :, None, None] if fmap.log_scaled else 0
        assert bool((error <= (16 + exponent) * torch.finfo(dtype).eps).all()), (side, dtype)


@names
@pytest.mark.parametrize("backend", ["reference", "eager", NATIVE, "triton"])
def test_backends_agree_on_the_slope(name: str, backend: str) -> None:
    """One query and one key, v = 1: dk = phi(q) slope(k) and dq = slope(q) phi(k) for each feature."""
    if not computes(backend, name):
        pytest.skip(f"{backend} leaves {name} to eager")
    dtypes = DTYPES[1:2] if backend == "triton" else DTYPES[1:]  # its interpreter is slow
    for dtype, side in product(dtypes, range(2)):
        x = points(dtype).view(1, 1, 1, -1)
        one, fmap = torch.ones_like(x), feature_maps.make(name, x.shape[-1])
        other = plain(fmap.queries(one.double()))
        inputs = [one.clone(), one.clone()]
        inputs[side] = x.clone()
        out = linear_rope_attention(
            *(y.requires_grad_() for y in inputs), one[..., :1],
            feature_map=fmap, normalize=False, backend=backend,
        )  # fmt: skip
        (got,) = torch.autograd.grad(out.sum(), inputs[side])
        assert_near(got, exact(name, x) * other, dtype, digits=8)
