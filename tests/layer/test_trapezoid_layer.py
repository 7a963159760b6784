"""LinearRoPEAttention with trapezoid=True. ``test_gated_attention`` holds it to the promises of all options."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linrope import LinearRoPEAttention
from linrope.distributed import Shard
from tests.layer import cases
from tests.layer.cases import numbers


def make(dtype: torch.dtype = torch.float64, **options) -> LinearRoPEAttention:
    defaults = {"forget_gate": True, "write_gate": "tied", "out_norm": True, "trapezoid": True}
    return cases.make(dtype, **{**defaults, **options})


def test_the_gate_starts_at_one_half_and_has_a_place_in_the_repr() -> None:
    layer = LinearRoPEAttention(16, 4, out_norm=True, trapezoid=True)
    assert torch.equal(layer.trapezoid(torch.zeros(1, 1, 16)), torch.full((1, 1, 4), 0.5))
    assert "trapezoid" in layer.extra_repr()
    layer.trapezoid.weight.data.fill_(5)
    layer.reset_parameters()
    assert float(layer.trapezoid.weight.detach().abs().max()) < 0.2


def test_a_layer_whose_share_is_one_is_the_layer_without_the_option() -> None:
    with_option, without = (make(trapezoid=x, rotary="selective") for x in (True, False))
    without.load_state_dict({k: x for k, x in with_option.state_dict().items() if "trapezoid" not in k})
    with torch.no_grad():
        with_option.trapezoid.weight.zero_()
        with_option.trapezoid.bias.fill_(100)
    x = numbers(2, 9, 16)
    assert_close(with_option(x), without(x), rtol=1e-6, atol=1e-8)  # the normalizer's eps is the difference


@torch.no_grad()
def test_exported_with_any_length_the_layer_computes_the_same() -> None:
    layer = make(rotary="selective")
    lengths = ({1: torch.export.Dim("n", min=2, max=64)},)
    exported = torch.export.export(layer, (numbers(2, 9, 16),), dynamic_shapes=lengths).module()
    for n in (2, 13):
        assert_close(exported(numbers(2, n, 16)), layer(numbers(2, n, 16)))


def test_per_sample_gradients_are_those_of_each_sample_alone() -> None:
    layer, x = make(num_kv_heads=2, rotary="selective"), numbers(3, 6, 16)
    weights = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(layer, weights, row[None]).square().sum()

    together = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    for i in range(3):
        assert_close({name: x[i] for name, x in together.items()}, torch.func.grad(loss)(weights, x[i]))


def test_states_with_and_without_the_rule_are_not_mixed_up() -> None:
    x = numbers(1, 5, 16)
    with_option, without = make(), make(trapezoid=False)
    _, state = with_option(x, return_state=True)
    _, other = without(x, return_state=True)
    with pytest.raises(ValueError, match=r"^state: made with .*; trapezoid; expected "):
        without(x, state=state)
    with pytest.raises(ValueError, match=r"^state: made with .*; expected .*; trapezoid, as in this call"):
        with_option(x, state=other)
    with pytest.raises(TypeError, match=r"^state: got int, expected LayerState"):
        with_option(x, state=3)
    with pytest.raises(ValueError, match=r"^state\.last_token: got shape \(1, .*expected \(2, "):
        with_option(x.expand(2, -1, -1), state=state)


NORM = "trapezoid=True: got no out_norm per head .*; expected out_norm=True or normalize=False"
SKIP = "trapezoid=True: got skip='before', .*; expected skip='after' or normalize=False"
ROTATION = "rotary=.*: expected a rotation without axes, xpos and attention factor"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"out_norm": x}, NORM) for x in (False, "all")),
        ({"skip": "before"}, SKIP),
        ({"causal": False, "forget_gate": False, "write_gate": None}, "trapezoid: got causal=False"),
        ({"rope_order": "before"}, "trapezoid=True: got rope_order='before', expected 'after'"),
        ({"feature_map": "exp", "normalize": False}, "feature_map='exp': its features have scales, .*such as 'elu"),
        ({"feature_map": {"name": "cosformer", "max_length": 64}, "rotary": None}, "feature_map=.*: its features dep"),
        *(({"rotary": rotary}, ROTATION) for rotary in ({"axes": 2}, {"xpos": 512}, YARN)),
    ],
)  # fmt: skip
def test_what_the_rule_does_not_support_is_refused_by_name(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_calls_that_the_rule_does_not_support_are_refused_by_name() -> None:
    layer, x = make(), numbers(1, 5, 16)
    with pytest.raises(ValueError, match=r"^context: got a tensor, expected a layer without trapezoid"):
        make(forget_gate=False, write_gate=None)(x, x)
    with pytest.raises(ValueError, match=r"^shard: got a shard with trapezoid=True, expected None"):
        layer(x, shard=Shard(lengths=[5]))
    with pytest.raises(TypeError, match=r"^trapezoid=True: got float16"):
        make(torch.float16)(x.half())
