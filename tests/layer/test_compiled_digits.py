"""What PyTorch's compiler makes of the formulas keeps their digits. It may write expm1(x) as e^x - 1, for one."""

import copy
import shutil

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linrope import Rotary, feature_maps
from linrope.layer.selective import ForgetGate, SelectiveSteps, WriteGate

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler for CPUs calls g++"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated", "ignore:.*Triton.*", "ignore:.*CUDA.*"),
]
BOUND = 2e-6  # some thirty roundings of 6e-8


def error(got: Tensor, expected: Tensor) -> float:
    """The largest relative error of any number."""
    return float(((got.detach().double() - expected) / expected).abs().max())


class Gates(nn.Module):
    """A layer's gates with half-lives up to a million tokens, and steps of 1e-6 rad and less."""

    def __init__(self) -> None:
        super().__init__()
        self.forget, self.write = ForgetGate(8, 5, 1e6), WriteGate(8, 5, 1e6)
        self.steps = SelectiveSteps(8, Rotary(6), 5)
        nn.init.normal_(self.steps.up, std=1e-6)

    def forward(self, x: Tensor) -> list[Tensor]:
        gates = [*self.forget(x, writes=True), self.write(x), self.steps(x)]
        small = F.softplus(20 * x - 12)  # as in a Mamba-2 layer's step sizes
        return [*gates, small]


def with_gradients(module: nn.Module, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs, and for each the gradient of x of its sum."""
    x = x.clone().requires_grad_()
    outputs = module(x)
    gradients = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in outputs]
    return [y.detach() for y in outputs], gradients


def test_compiled_gates_keep_the_digits_of_small_arguments() -> None:
    torch.manual_seed(0)
    gates, x = Gates(), 0.5 * torch.randn(3, 7, 8)
    expected, gradients = with_gradients(copy.deepcopy(gates).double(), x.double())
    assert float(expected[1].min()) < 1e-5  # else no digit could be lost
    outputs, d_x = with_gradients(torch.compile(gates, fullgraph=True), x)
    for index, (y, z, eager) in enumerate(zip(outputs, expected, gates(x), strict=True)):
        assert error(y, z) < 2 * error(eager, z) + BOUND, index  # steps are sums, of which some cancel
    for index, (y, z) in enumerate(zip(d_x, gradients, strict=True)):  # sums, of which some cancel
        assert float((y - z).abs().max()) < BOUND * float(z.abs().max()), index


class Maps(nn.Module):
    """phi and psi of all maps."""

    def __init__(self) -> None:
        super().__init__()
        seeds = {"favor+": {"seed": 0}}
        self.maps = nn.ModuleList(
            feature_maps.make(name, 8, **seeds.get(name, {})) for name in feature_maps.NAMES
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        pairs = [fmap(x, -x) for fmap in self.maps]
        return [y for pair in pairs for side in pair for y in (side if isinstance(side, tuple) else (side,))]


@pytest.mark.long
@torch.no_grad()
@pytest.mark.parametrize("size", [1e-6, 1.0])
def test_compiled_maps_keep_the_digits_of_small_arguments(size: float) -> None:
    torch.manual_seed(0)
    maps, x = Maps(), size * torch.randn(2, 5, 3, 8)
    expected = copy.deepcopy(maps).double()(x.double())
    eager = maps(x)
    for y, z, reference in zip(torch.compile(maps, fullgraph=True)(x), eager, expected, strict=True):
        nearest = (z.double() - reference).abs().amax()
        assert float((y.double() - reference).abs().max()) <= 2 * nearest + 2**-22 * reference.abs().max()
