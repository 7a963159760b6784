"""Features of length 1: what they are of hostile inputs, and what the delta rule gains from them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from linrope import Rotary, feature_maps, linear_rope_attention
from tests.support.equation import Equation
from tests.support.oracle import everything, randoms

ACTIVATIONS = {"identity": lambda x: x, "silu": F.silu, "relu": F.relu, "elu+1": lambda x: F.elu(x) + 1}
WITHOUT: dict[str, Any] = {"normalize": False, "backend": "eager"}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_features_are_the_formula(activation: str) -> None:
    fmap = feature_maps.make("unit", 8, activation=activation, query_factor=8**-0.5)
    x = randoms(1, 5, 2, 8)[0]
    y = ACTIVATIONS[activation](x)
    expected = y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert_close(fmap.keys(x), expected, rtol=1e-14, atol=0)
    assert_close(fmap.queries(x), expected / 8**0.5, rtol=1e-14, atol=0)
    assert fmap.positive == (activation in ("relu", "elu+1"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_any_size_have_finite_features_and_gradients(dtype: torch.dtype) -> None:
    sizes = [0, 1e-30, 1e-7, 1, 6e4, *([] if dtype == torch.float16 else [1e18])]
    x = (torch.tensor(sizes)[:, None] * torch.tensor([1.0, -1, 0.5, 0.25])).to(dtype).requires_grad_()
    for activation in ("identity", "silu"):
        psi = feature_maps.make("unit", 4, activation=activation).keys(x)
        lengths = psi.norm(dim=-1)
        assert_close(lengths[3:], torch.ones(len(sizes) - 3), rtol=1e-5, atol=0)
        assert bool((lengths <= 1 + 1e-6).all())
        (slope,) = torch.autograd.grad(psi[:, 0].sum(), x)
        assert bool(slope.isfinite().all())
        assert round(float(slope[0, 0])) == (1000 if activation == "identity" else 500)


def test_infinity_and_nan_stay_with_their_token() -> None:
    x = randoms(1, 6, 2, 4)[0]
    expected = feature_maps.make("unit", 4).keys(x)
    x[0, 2, 0, 1], x[0, 4, 1] = torch.inf, torch.nan
    found = feature_maps.make("unit", 4).keys(x)
    assert found[0, 2, 0].isnan().any()
    assert found[0, 4, 1].isnan().all()
    found[0, 2, 0], found[0, 4, 1] = expected[0, 2, 0], expected[0, 4, 1]
    assert torch.equal(found, expected)


def test_keys_are_not_rounded_to_half_precision_on_their_way_to_the_backend() -> None:
    """An erase of 2 reflects the state at each key. A key rounded to bfloat16 is longer than 1, and the state grows."""
    q, k, v = randoms(1, 2000, 1, 16, dtype=torch.bfloat16)
    fmap, options = feature_maps.make("unit", 16), {**WITHOUT, "erase": torch.full((1, 2000, 1), 2.0)}
    rounded = fmap.keys(k).to(torch.bfloat16)
    longest = rounded.double().norm(dim=-1).argmax()
    k, rounded = (x[:, longest, None].expand_as(k) for x in (k, rounded))
    out = linear_rope_attention(q, k, v, feature_map=fmap, **options)
    exact = linear_rope_attention(*(x.double() for x in (q, k, v)), feature_map=fmap, **options)
    assert (out - exact).abs().max() <= 2.0**-8 * exact.abs().max()
    outside = linear_rope_attention(
        fmap.queries(q).to(torch.bfloat16), rounded, v, feature_map=None, **options
    )
    assert (outside - exact).abs().max() > exact.abs().max()


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_a_call_in_float32_stays_within_the_bound_of_its_features(backend: str) -> None:
    q, k, v = randoms(1, 200, 2, 8, g=1, dtype=torch.float32)
    fmap, equation = feature_maps.make("unit", 8, activation="silu", query_factor=8**-0.5), Equation()
    data = {"erase": torch.rand(1, 200, 1, generator=torch.Generator().manual_seed(1))}
    options: dict[str, Any] = {"feature_map": fmap, "normalize": False, "rotary": Rotary(8)}
    found = everything(q, k, v, **options, **data, backend=backend)
    wide = {name: x.double() for name, x in data.items()}
    exact = everything(*(x.double() for x in (q, k, v)), call=equation, **options, **wide)
    assert ((found["out"].double() - exact["out"]).abs() <= 16 * 2.0**-24 * equation.sizes.out).all()
    for name, x in exact.items():
        assert (found[name].double() - x).abs().max() <= 1e-5 * x.abs().max(), name


def test_states_of_other_maps_are_refused_and_those_of_another_query_factor_are_not() -> None:
    q, k, v = randoms(1, 5, 2, 4)
    unit, silu = (
        feature_maps.make("unit", 4, query_factor=0.5),
        feature_maps.make("unit", 4, activation="silu"),
    )
    _, state = linear_rope_attention(q, k, v, feature_map="unit", return_state=True, **WITHOUT)
    for other in ("identity", silu):
        with pytest.raises(
            ValueError, match=r"state: made with UnitMap\(4, activation='identity'\); None; expected "
        ):
            linear_rope_attention(q, k, v, feature_map=other, state=state, **WITHOUT)
    linear_rope_attention(q, k, v, feature_map=unit, state=state, **WITHOUT)


def test_compiled_and_exported_calls_are_the_same() -> None:
    class Call(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = feature_maps.make("unit", 4, activation="silu", query_factor=0.5)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return linear_rope_attention(q, k, v, feature_map=self.map, rotary=Rotary(4), **WITHOUT)

    qkv, module = tuple(randoms(1, 5, 2, 4)), Call()
    expected = module(*qkv)
    assert_close(torch.compile(module, backend="aot_eager", fullgraph=True)(*qkv), expected)
    assert_close(torch.export.export(module, qkv).module()(*qkv), expected)


def test_a_prepared_step_refuses_the_map() -> None:
    from linrope.backends import native
    from linrope.decode import prepare_attention

    if native.why_not() is not None:
        pytest.skip(str(native.why_not()))
    q, k, v = randoms(1, 5, 2, 4, dtype=torch.float32)
    _, state = linear_rope_attention(q, k, v, feature_map="unit", normalize=False, return_state=True)
    with pytest.raises(ValueError, match="expected a feature map that the kernels apply"):
        prepare_attention(state, feature_map="unit", normalize=False)
