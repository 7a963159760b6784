"""Calls of native that go to the kernels as they are: they are those of the operator, whatever differs between them."""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from linrope import Rotary, linear_rope_attention, linear_rope_state
from linrope.backends import native
from linrope.operation import plan
from linrope.operation.attend import attend
from linrope.recurrence.call import Call
from tests.support.oracle import randoms

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
UNIT: dict[str, Any] = {"feature_map": "unit", "normalize": False}
HOWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "blocks with a saved state": {"n": 600},
    "no order": {"causal": False},
    "a state": {"return_state": True},
    "a state, signed": {"return_state": True, "normalize": False, "feature_map": "identity"},
    "a gate per head": {"gates": (4,)},
    "a gate for all": {"gates": (1,)},
    "a gate per unit": {"gates": (4, 8)},
    "write": {"write": True},
    "a mask": {"mask": True, "write": True},
    "more values": {"keys": 2, "gates": (4,)},
    "unit": UNIT,
    "erase": {"erase": True, "write": True, "n": 600, **UNIT},
    "erase, a state": {"erase": True, "gates": (4,), "return_state": True, **UNIT},
    "erase, more values": {"erase": True, "keys": 2, "gates": (4,), "write": True, **UNIT},
    "erase, a gate per unit": {"erase": True, "gates": (1, 8), "return_state": True, "n": 300, **UNIT},
}


@pytest.fixture(autouse=True)
def _no_plans() -> None:
    plan.forget_plans()


def problem(
    seed: int,
    *,
    n: int = 40,
    keys: int = 4,
    gates: tuple[int, ...] | None = None,
    write: bool = False,
    erase: bool = False,
    mask: bool = False,
    dtype: torch.dtype = torch.float32,
    **how: Any,
) -> dict[str, Any]:
    """The arguments of a call of 4 heads: q and k have ``keys``."""
    q, k, _ = randoms(2, n, keys, 16, dtype=dtype, seed=seed)
    v = randoms(2, n, 4, 12, dtype=dtype, seed=seed + 1)[2]
    draw = torch.Generator().manual_seed(seed)
    how |= {"q": q, "k": k, "v": v, "rotary": Rotary(16), "backend": "native"}
    if gates is not None:
        how["log_decay"] = -torch.rand(1, n, *gates, generator=draw)
        how["log_decay"][:, ::7] = -2e4  # clamped: their gradients are 0
        how["log_decay"] = how["log_decay"].to(dtype)
    if write:
        how["write"] = torch.rand(2, n, 1, generator=draw).to(dtype)
    if erase:
        how["erase"] = torch.rand(2, n, 4, generator=draw).to(dtype)
    if mask:
        how["key_mask"] = torch.rand(2, n, generator=draw) < 0.7
    return how


def by_operator(**call: Any) -> tuple[Tensor, ...]:
    """out, and the last kv and z: as the operator computes them for calls whose plan knows less."""
    out, state = attend(Call(**call), lambda of_backend, *given: of_backend(*given))
    return (out,) if state is None else (out, state.kv, state.z)


def directly(**call: Any) -> tuple[Tensor, ...]:
    found = linear_rope_attention(**call)
    return (found,) if isinstance(found, Tensor) else (found[0], found[1].kv, found[1].z)


def with_gradients(compute: Any, call: dict[str, Any], weights: Sequence[Tensor | None]) -> list[Tensor]:
    leaves = {
        name: x.detach().requires_grad_()
        for name, x in call.items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }
    results = compute(**call | leaves)
    used = [(y, w) for y, w in zip(results, weights) if w is not None]
    ys, given = zip(*used)
    gradients = torch.autograd.grad(ys, [*leaves.values()], given)
    assert all(x.dtype == like.dtype for x, like in zip(gradients, leaves.values(), strict=True))
    return [*results, *gradients]


def made_directly() -> list[bool]:
    return [x.direct is not None for x in plan.PLANS.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HOWS)
def test_they_have_the_bits_of_the_operator(name: str, dtype: torch.dtype) -> None:
    for seed in range(3):  # the third finds all that the plan keeps
        call = problem(seed, dtype=dtype, **HOWS[name])
        with torch.no_grad():
            results = by_operator(**call)
            assert all(map(torch.equal, directly(**call), results))
        weights = [torch.randn_like(x) for x in results]
        pairs: list[Sequence[Tensor | None]] = [weights]
        if len(weights) > 1:  # a loss that depends on some results
            pairs += [[weights[0], None, None], [None, weights[1], None]]
        for some in pairs:
            found, right = (with_gradients(f, call, some) for f in (directly, by_operator))
            assert all(map(torch.equal, found, right))
    assert made_directly() == [True]


def test_a_state_alone_has_gradients() -> None:
    for seed in range(3):
        k, v = (x.requires_grad_() for x in randoms(2, 40, 4, 16, dtype=torch.float32, seed=seed)[1:])
        state = linear_rope_state(k, v, backend="native")
        _, right, _ = by_operator(q=None, k=k, v=v, normalize=False, return_state=True, backend="native")
        found, expected = (torch.autograd.grad(kv.square().sum(), (k, v)) for kv in (state.kv, right))
        assert all(map(torch.equal, found, expected))
    assert made_directly() == [True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_may_be_out_of_range_in_some_calls_alone(dtype: torch.dtype) -> None:
    for i, low in enumerate((-1.0, -2e4, -1e4, -torch.inf, torch.nan, -1.0)):
        call = problem(i, gates=(4,), dtype=dtype)
        call["log_decay"][:, ::7] = low
        found, right = (
            with_gradients(f, call, [torch.ones(2, 40, 4, 12).to(dtype)]) for f in (directly, by_operator)
        )
        for x, y in zip(found, right, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    assert made_directly() == [True]


@pytest.mark.parametrize("name", ["plain", "a mask", "a gate for all"])
def test_strides_may_differ_from_call_to_call(name: str) -> None:
    call = problem(0, **HOWS[name])
    weight = [torch.ones(()).expand(2, 40, 4, 12)]
    right = with_gradients(directly, call, weight)
    turned = {
        key: x.mT.contiguous().mT if isinstance(x, Tensor) and x.ndim > 1 else x for key, x in call.items()
    }
    assert all(map(torch.equal, with_gradients(directly, turned, weight), right))
    assert made_directly() == [True]


def test_what_needs_gradients_may_differ_from_call_to_call() -> None:
    call = problem(0, gates=(4,))
    out = [directly(**call)[0] for _ in range(3)][2]
    assert not out.requires_grad
    for name in ("q", "log_decay", "v"):
        leaf = call[name].clone().requires_grad_()
        with_leaf = directly(**call | {name: leaf})[0]
        assert torch.equal(with_leaf, out)
        (found,) = torch.autograd.grad(with_leaf.sum(), leaf)
        (right,) = torch.autograd.grad(by_operator(**call | {name: leaf})[0].sum(), leaf)
        assert torch.equal(found, right)
        with torch.no_grad():
            assert not directly(**call | {name: leaf})[0].requires_grad
    assert made_directly() == [True]


def test_transformations_of_the_backward_pass_and_second_derivatives_take_the_operator() -> None:
    call = problem(0, **HOWS["blocks with a saved state"])
    for _ in range(2):
        directly(**call)
    q = call["q"].clone().requires_grad_()
    weights = torch.randn(3, 2, 600, 4, 12)
    out = directly(**call | {"q": q})[0]
    rows = [torch.autograd.grad(out, q, w, retain_graph=True)[0] for w in weights]
    (together,) = torch.autograd.grad(out, q, weights, is_grads_batched=True, retain_graph=True)
    assert torch.equal(together, torch.stack(rows))
    (first,) = torch.autograd.grad(out, q, weights[0], create_graph=True)
    assert torch.equal(first, rows[0])
    with pytest.raises(RuntimeError, match="second derivatives: got backend='native'"):
        first.sum().backward()


def test_hooks_see_what_is_saved_and_a_write_after_the_call_is_an_error() -> None:
    call = problem(0)
    leaves = {name: call[name].requires_grad_() for name in ("q", "k", "v")}
    for _ in range(2):
        directly(**call)
    seen: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        out = directly(**call)[0]
    assert [x.data_ptr() for x in seen] == [x.data_ptr() for x in leaves.values()]
    out = directly(**call)[0]
    with torch.no_grad():
        leaves["k"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_plan_keeps_no_tensor_of_a_call() -> None:
    call = problem(0, gates=(4,), write=True)
    for _ in range(3):
        directly(**call)
    alive = [weakref.ref(x) for x in call.values() if isinstance(x, Tensor)]
    del call
    gc.collect()
    assert [x() for x in alive] == [None] * 5
    assert made_directly() == [True]


def test_errors_are_those_of_other_calls() -> None:
    call = problem(0, gates=(4,))
    for _ in range(3):
        directly(**call)
    with pytest.raises(ValueError, match="log_decay: got up to 1, expected numbers <= 0"):
        directly(**call | {"log_decay": torch.ones(1, 40, 4)})
    assert made_directly() == [True]
