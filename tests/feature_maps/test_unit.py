"""Features of length 1: what they are of hostile inputs, and what the delta rule gains from them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from linrope import Rotary, feature_maps, linear_rope_attention
from linrope.backends import native
from linrope.decode import prepare_attention
from tests.support.oracle import FAST, everything, randoms

ACTIVATIONS = {"identity": lambda x: x, "silu": F.silu, "relu": F.relu, "elu+1": lambda x: F.elu(x) + 1}
WITHOUT: dict[str, Any] = {"normalize": False, "backend": "eager"}
every_fast = pytest.mark.parametrize("backend", FAST)


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


@every_fast
def test_keys_are_not_rounded_to_half_precision(backend: str) -> None:
    """An erase of 2 reflects the state at each key. A key rounded to bfloat16 is longer than 1, and the state grows."""
    q, k, v = randoms(1, 2000, 1, 16, dtype=torch.bfloat16)
    fmap, options = (
        feature_maps.make("unit", 16),
        {"normalize": False, "erase": torch.full((1, 2000, 1), 2.0)},
    )
    rounded = fmap.keys(k).to(torch.bfloat16)
    longest = rounded.double().norm(dim=-1).argmax()
    k, rounded = (x[:, longest, None].expand_as(k) for x in (k, rounded))
    out = linear_rope_attention(q, k, v, feature_map=fmap, backend=backend, **options)
    exact = linear_rope_attention(*(x.double() for x in (q, k, v)), feature_map=fmap, **options)
    assert (out - exact).abs().max() <= 2.0**-8 * exact.abs().max()
    outside = linear_rope_attention(
        fmap.queries(q).to(torch.bfloat16), rounded, v, feature_map=None, backend=backend, **options
    )
    assert (outside - exact).abs().max() > exact.abs().max()


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "relu2"])
@pytest.mark.parametrize("d", [3, 16, 40])
def test_native_has_the_gradients_of_rows_of_any_size(d: int, activation: str) -> None:
    """0, and lengths about sqrt(eps), where the features are shorter than 1, to 1e18.

    The gradient is a difference: of a part along the row nothing may be left but rounding errors of about u / |x|.
    """
    if native.why_not() is not None:
        pytest.skip(str(native.why_not()))
    q, k, v = randoms(1, 7, 2, d, dtype=torch.float32)
    largest = 1e8 if activation == "relu2" else 1e18
    for x in (q, k):
        x *= torch.tensor([1, 0, 1e-30, 1e-4, 1e-3, 1e3, largest])[None, :, None, None]
    fmap = feature_maps.make("unit", d, activation=activation, query_factor=0.25)
    found, exact = (
        everything(*qkv, feature_map=fmap, normalize=False, backend=backend)
        for qkv, backend in (((q, k, v), "native"), ([x.double() for x in (q, k, v)], "eager"))
    )
    assert_close(found["out"].double(), exact["out"], rtol=0, atol=1e-6 * float(exact["out"].abs().max()))
    for name, x in (("dq", q), ("dk", k)):
        error, most, length = (
            x.double().abs().amax((0, 2, 3)) for x in (found[name] - exact[name], exact[name], x)
        )
        assert (error <= 3e-6 * (most + 1 / length.clamp(min=1e-3))).all(), name


@pytest.mark.parametrize("activation", ["identity", "silu", "elu+1"])
def test_vectors_whose_squared_length_overflows_have_no_features_and_no_gradient(activation: str) -> None:
    if native.why_not() is not None:
        pytest.skip(str(native.why_not()))
    q, k, v = randoms(1, 4, 1, 8, dtype=torch.float32)
    k[0, 1] = 1e25
    fmap = feature_maps.make("unit", 8, activation=activation)
    found = everything(q, k, v, feature_map=fmap, normalize=False, backend="native")
    k[0, 1] = 0
    v[0, 1] = 0
    expected = everything(q, k, v, feature_map=fmap, normalize=False, backend="native")
    assert torch.equal(found["out"], expected["out"])
    assert not found["dk"][0, 1].any()


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


def test_prepared_steps_are_ordinary_calls() -> None:
    if native.why_not() is not None:
        pytest.skip(str(native.why_not()))
    q, k, v = randoms(2, 9, 2, 4, dtype=torch.float32)
    how: dict[str, Any] = {
        "feature_map": feature_maps.make("unit", 4, activation="silu", query_factor=0.5),
        "normalize": False,
        "rotary": Rotary(4),
    }
    erase = torch.rand(2, 9, 2, generator=torch.Generator().manual_seed(0))
    out = linear_rope_attention(q, k, v, erase=erase, **how)
    _, state = linear_rope_attention(
        q[:, :4], k[:, :4], v[:, :4], erase=erase[:, :4], return_state=True, **how
    )
    step = prepare_attention(state, **how)
    for t in range(4, 9):
        token = slice(t, t + 1)
        assert_close(step(q[:, token], k[:, token], v[:, token], erase=erase[:, token]), out[:, token])


def test_a_module_around_the_map_or_a_hook_on_it_is_called() -> None:
    q, k, v = randoms(1, 5, 2, 4, dtype=torch.float32)
    fmap, calls = feature_maps.make("unit", 4), []
    expected = linear_rope_attention(q, k, v, feature_map=fmap, normalize=False)
    fmap.register_forward_hook(lambda *_: calls.append(1))
    assert_close(linear_rope_attention(q, k, v, feature_map=fmap, normalize=False), expected)
    assert calls == [1]
