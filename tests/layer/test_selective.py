"""What a layer makes from its input: forget gates and steps of the rotation; decays spread over heads."""

import copy
import math

import pytest
import torch
from torch.testing import assert_close

from linrope import Rotary
from linrope.layer.selective import ForgetGate, SelectiveSteps, spread
from tests.layer.cases import numbers


def filled(module: torch.nn.Module) -> torch.nn.Module:
    """With weights of which none is 0."""
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.add_(numbers(*parameter.shape, seed=i))
    return module


@pytest.mark.parametrize(
    ("heads", "longest", "half_lives"),
    [(4, 4096.0, [1, 16, 256, 4096]), (3, 100, [1, 10, 100]), (1, 4096.0, [64]), (2, 1.0, [1, 1])],
)
def test_half_lives_are_spread_geometrically(heads: int, longest: float, half_lives: list[float]) -> None:
    decay = spread(heads, longest)
    assert decay.dtype == torch.float64
    assert_close(decay ** torch.tensor(half_lives).double(), torch.full((heads,), 0.5).double())


@pytest.mark.parametrize("longest", [0.5, math.inf, math.nan, True, "4096"])
def test_a_longest_half_life_that_is_none_is_refused(longest: object) -> None:
    with pytest.raises(ValueError, match="longest="):
        spread(4, longest)


def test_a_gate_starts_near_its_spread_and_is_the_log_sigmoid_of_a_projection() -> None:
    torch.manual_seed(0)
    gate, x = ForgetGate(64, 4, longest=512.0), numbers(2, 5, 64).float()
    start = gate.bias.double().sigmoid()
    assert_close(start, spread(4, 512.0), rtol=1e-6, atol=0)  # a float32 logit
    half_lives = math.log(0.5) / gate(x)
    ratio = half_lives / (math.log(0.5) / start.log())
    assert bool(((ratio > 0.5) & (ratio < 2)).all())
    filled(gate.double())
    assert_close(gate(x.double()), (x.double() @ gate.weight.T + gate.bias).sigmoid().log())


@pytest.mark.parametrize("bound", ["multiply", "add"])
@pytest.mark.parametrize(
    ("rotary", "heads"),
    [(Rotary(8, base=100.0, layout="half"), 1), (Rotary(8, base=100.0), 3), (Rotary.whole_model(2, 8), 2)],
    ids=["one head", "three heads", "theta of each head"],
)
def test_steps_start_at_zero_and_stay_within_their_bound(rotary: Rotary, heads: int, bound: str) -> None:
    steps, x = SelectiveSteps(16, rotary, heads, rank=4, bound=bound).double(), numbers(2, 5, 16)
    assert steps(x).shape == (2, 5, heads, 4)
    assert not steps(x).any()
    filled(steps)
    most = rotary.theta if bound == "multiply" else torch.full((4,), math.pi).double()
    assert_close(steps(x), torch.einsum("hpr,rd,bnd->bnhp", steps.up, steps.down, x).tanh() * most)
    assert bool((steps(1000 * x).abs() <= most).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bound": "multiplied"}, "bound='multiplied': expected one of multiply, add; did you mean 'multiply'"),
        ({"rank": 0}, "rank=0: expected an integer, at least 1"),
        ({"rank": 1.5}, "rank=1.5: expected an integer"),
        ({"rotary": Rotary.axial(8)}, "rotary: got .* expected one without axes and xpos"),
        ({"rotary": Rotary(8, xpos=512.0)}, "rotary: got .* expected one without axes and xpos"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SelectiveSteps(16, **({"rotary": Rotary(8), "num_heads": 2} | options))


MODULES = {
    "forget gate": lambda **to: ForgetGate(16, 2, **to),
    "steps": lambda **to: SelectiveSteps(16, Rotary(8), 2, **to),
}
every_module = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)


@every_module
def test_they_compute_in_float32_in_half_precision_and_under_autocast(make) -> None:
    """With the same weights and inputs, rounded once: not a bit differs."""
    module, x = filled(make()), numbers(1, 7, 16).float()
    with torch.autocast("cpu", torch.bfloat16):
        inside = module(x)
    assert torch.equal(inside, module(x))
    half = copy.deepcopy(module).bfloat16()
    got = half(x.bfloat16())
    assert got.dtype == torch.float32
    assert torch.equal(got, half.float()(x.bfloat16().float()))


@every_module
def test_reset_parameters_fills_what_left_the_meta_device(make) -> None:
    module = make(device="meta", dtype=torch.float64)
    assert {p.device.type for p in module.parameters()} == {"meta"}
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    torch.manual_seed(3)
    module.reset_parameters()
    torch.manual_seed(3)
    assert_close(module.state_dict(), make(dtype=torch.float64).state_dict(), rtol=0, atol=0)
