"""torch.func's transformations: those that fused backends follow, and those that they refuse."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from linrope import LinearRoPEAttention, Rotary, linear_rope_attention, linear_rope_state
from tests.support.contract import refused
from tests.support.oracle import NATIVE, randoms

BACKENDS = ("eager", NATIVE)
ROTARY = Rotary(8)


def attend(x: Tensor, backend: str, **options: Any) -> Tensor:
    return linear_rope_attention(x, x.flip(1), x * 0.5, rotary=ROTARY, backend=backend, **options)


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def loss(x: Tensor, backend: str, **options: bool) -> Tensor:
    return attend(x, backend, **options).square().sum()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_grad_and_their_likes_are_those_of_reference(backend: str) -> None:
    x, gates = inputs(3, 2, 20, 2, 8), -inputs(2, 20, 2).abs()
    ways = {
        "vmap": lambda name: vmap(lambda y: attend(y, name))(x),
        "vmap of one input": lambda name: vmap(lambda y: attend(y, name, log_decay=gates))(x),
        "grad": lambda name: grad(loss)(x[0], name),
        "jacrev": lambda name: jacrev(lambda y: attend(y, name).square().sum((1, 2, 3)))(x[0]),
        "per sample": lambda name: vmap(grad(lambda y: loss(y[None], name)))(x[0]),
        "two levels": lambda name: vmap(vmap(lambda y: attend(y[None], name)))(x),
    }
    if "erase" not in refused(backend):
        share = gates.sigmoid() / 20

        def delta(y: Tensor, b: Tensor, name: str) -> Tensor:
            return attend(y, name, erase=b, feature_map="unit", normalize=False)

        ways |= {
            "vmap with erase": lambda name: vmap(lambda y: delta(y, share, name))(x),
            "vmap of erase": lambda name: vmap(lambda b: delta(x[0], b[None], name))(share),
            "grad of erase": lambda name: grad(lambda b: delta(x[0], b, name).square().sum())(share),
            "erase, per sample": lambda name: vmap(
                grad(lambda b, y: delta(y[None], b[None], name).square().sum())
            )(share, x[0]),
        }
    for name, way in ways.items():
        assert_close(way(backend), way("reference"), rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
@pytest.mark.parametrize("with_state", [False, True])
@torch.no_grad()
def test_vmap_of_one_token_is_that_of_reference(with_state: bool, backend: str) -> None:
    x, past = inputs(3, 2, 1, 2, 8), inputs(2, 5, 2, 8)
    state = linear_rope_state(past, past, rotary=ROTARY) if with_state else None
    expected = vmap(lambda y: attend(y, "reference", state=state))(x)
    assert_close(vmap(lambda y: attend(y, backend, state=state))(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_per_sample_gradients_of_a_layer_are_those_of_one_sample_at_a_time(backend: str) -> None:
    torch.manual_seed(0)
    layer, x = LinearRoPEAttention(16, 2, forget_gate=True, backend=backend), inputs(3, 10, 16)
    weights = dict(layer.named_parameters())

    def one(weights: dict[str, Tensor], sample: Tensor) -> Tensor:
        out: Tensor = functional_call(layer, weights, (sample[None],))
        return out.square().sum()

    found = vmap(grad(one), in_dims=(None, 0))(weights, x)
    for i, sample in enumerate(x):
        expected = torch.autograd.grad(one(weights, sample), list(weights.values()))
        for name, gradient in zip(weights, expected, strict=True):
            assert_close(found[name][i], gradient, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_forward_mode_is_refused_not_zero(backend: str) -> None:
    x = inputs(1, 5, 2, 8)
    message = rf"backend='{backend}': got inputs with tangents \(forward mode\), expected 'reference'"
    with pytest.raises(RuntimeError, match=message):
        jvp(lambda y: attend(y, backend), (x,), (x,))
    with pytest.raises(RuntimeError, match=message):
        jacfwd(lambda y: attend(y, backend))(x)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=message):
        attend(forward_ad.make_dual(x, x), backend)
    share = torch.full((1, 5, 2), 0.1)
    with pytest.raises(RuntimeError, match=message):
        jvp(lambda b: attend(x, backend, erase=b, feature_map=None, normalize=False), (share,), (share,))
    with forward_ad.dual_level():  # without a tangent there is nothing to follow
        attend(x, backend)


def test_reference_has_forward_mode() -> None:
    (x, tangent, _) = randoms(1, 6, 2, 8)
    _, found = jvp(lambda y: attend(y, "reference"), (x,), (tangent,))
    above, below = (attend(x + near * tangent, "reference") for near in (1e-6, -1e-6))
    assert_close(found, (above - below) / 2e-6, rtol=1e-6, atol=1e-6)
    erase = torch.full((1, 6, 2), 0.1, dtype=x.dtype)

    def delta(b: Tensor) -> Tensor:
        return attend(x, "reference", erase=b, feature_map="unit", normalize=False)

    _, found = jvp(delta, (erase,), (erase,))
    assert_close(found, (delta(erase * (1 + 1e-6)) - delta(erase * (1 - 1e-6))) / 2e-6, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
def test_second_derivatives_are_refused(backend: str) -> None:
    x = inputs(1, 4, 1, 8)

    def slope(y: Tensor) -> Tensor:
        leaf = y.requires_grad_()
        return torch.autograd.grad(loss(leaf, backend), leaf, create_graph=True)[0]

    def slope_through_the_dispatcher(y: Tensor) -> Tensor:
        with FlopCounterMode(display=False):
            return slope(y)

    message = f"second derivatives: got backend='{backend}', expected 'reference', .* call disable\\(\\)"
    for second in (
        lambda: slope(x.clone()).sum().backward(),
        lambda: slope_through_the_dispatcher(x.clone()).sum().backward(),
        lambda: torch.autograd.functional.hessian(lambda y: loss(y, backend), x),
        lambda: grad(lambda y: grad(loss)(y, backend).sum())(x),
        lambda: jacrev(grad(lambda y: loss(y, backend)))(x),
        lambda: hessian(lambda y: loss(y, backend))(x),
        lambda: jvp(grad(lambda y: loss(y, backend)), (x,), (x,)),
        lambda: vmap(hessian(lambda y: loss(y, backend)))(x[None]),
    ):
        with pytest.raises(RuntimeError, match=message):
            second()


def test_reference_has_second_derivatives() -> None:
    x, *_ = randoms(1, 2, 1, 8)
    expected = torch.autograd.functional.hessian(lambda y: loss(y, "reference"), x)
    assert_close(hessian(lambda y: loss(y, "reference"))(x), expected)
    near = 1e-6 * torch.eye(16, dtype=x.dtype).view(16, *x.shape)
    changes = [grad(loss)(x + d, "reference") - grad(loss)(x - d, "reference") for d in near]
    assert_close(torch.stack(changes).view(16, 16) / 2e-6, expected.view(16, 16), rtol=1e-6, atol=1e-6)
