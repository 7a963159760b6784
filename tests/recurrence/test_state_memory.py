"""A call in a state's own memory either does all of it, or raises and leaves every tensor as it was."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import LinearAttentionState, linear_rope_attention, linear_rope_state
from linrope.recurrence.identities import WITHOUT_Z
from tests.support.oracle import NATIVE, every_kernel

ROWS, G, H, D, E = 3, 2, 2, 4, 6
SLOTS = torch.tensor([2, 0])
MADE_WITH = "features; None"
CALLS = {"donated": (ROWS, 1), "pool": (2, 1), "packed": (1, 7)}  # batch and tokens


def made_in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def overlapping(x: Tensor) -> Tensor:
    """Rows that begin in the middle of the one before."""
    return torch.as_strided(torch.cat((x, x)).flatten(), x.shape, (x.stride(0) // 2, *x.stride()[1:]))


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda x: x[:1].expand_as(x),
    "inference": made_in_inference_mode,
    "overlapping": overlapping,
}
TAKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "leaf": lambda x: x.clone().requires_grad_(x.is_floating_point()),
    "gaps": lambda x: torch.stack((x, x), -1)[..., 0],
    "transposed": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x,
}
every_call = pytest.mark.parametrize("call", CALLS)
every_map = pytest.mark.parametrize("fmap", ["elu+1", "exp"])
every_backend_quickly = pytest.mark.parametrize(
    "backend", ["reference", "eager", NATIVE, pytest.param("triton", marks=pytest.mark.long)]
)


def data(b: int, n: int, **more: tuple[int, ...]) -> dict[str, Tensor]:
    shapes = {"k": (G, D), "v": (G, E), "log_decay": (G,), "angle_steps": (G, 2)} | more
    generator = torch.Generator().manual_seed(n)
    made = {name: torch.randn(b, n, *shape, generator=generator) for name, shape in shapes.items()}
    return made | {"log_decay": -made["log_decay"].abs()}


def some_state(fmap: str) -> LinearAttentionState:
    return linear_rope_state(**data(ROWS, 5), feature_map=fmap)


def run(state: LinearAttentionState, call: str, **how: Any) -> LinearAttentionState:
    """The state after new tokens in its memory; of a pool its rows."""
    if call == "packed":
        how["cu_seqlens"] = torch.tensor([0, 3, 7])
    inputs = data(*CALLS[call], q=(H, D))
    return linear_rope_attention(**inputs, state=state, return_state=True, **how)[1].rows()


def in_place(state: LinearAttentionState, call: str) -> LinearAttentionState:
    return state.donate() if call == "donated" else state.at(SLOTS)


def assert_equal(state: LinearAttentionState, before: LinearAttentionState) -> None:
    for name, x in before.tensors().items():
        torch.testing.assert_close(getattr(state, name), x, rtol=0, atol=0, msg=name)


def names(fmap: str) -> list[str]:
    return ["kv", "z", "position", "angle", *(["log_scale"] if fmap == "exp" else [])]


@every_kernel
@every_map
@every_call
@torch.no_grad()
def test_memory_that_cannot_be_written_is_named_and_nothing_changes(call, fmap, backend) -> None:
    for name, kind in product(names(fmap), REFUSED):
        good = some_state(fmap)
        state = replace(good, **{name: REFUSED[kind](getattr(good, name))})
        before = state.clone()
        with pytest.raises(ValueError, match=rf"^state\.{name}: got"):
            run(in_place(state, call), call, backend=backend, feature_map=fmap)
        assert_equal(state, before)


@every_backend_quickly
@every_map
@every_call
@torch.no_grad()
def test_memory_of_any_other_kind_is_written_to(call: str, fmap: str, backend: str) -> None:
    for name, kind in product(names(fmap), TAKEN):
        good = some_state(fmap)
        copied = good if call == "donated" else good.at(SLOTS).rows()
        expected = run(copied, call, backend=backend, feature_map=fmap)
        state = replace(good.clone(), **{name: TAKEN[kind](getattr(good, name))})
        after = run(in_place(state, call), call, backend=backend, feature_map=fmap)
        memory = state if call == "donated" else state.at(SLOTS).rows()
        for got in (after, memory):
            torch.testing.assert_close(got.tensors(), expected.tensors())


@every_kernel
@every_call
def test_a_leaf_that_requires_gradients_is_left_alone_or_refused(call: str, backend: str) -> None:
    for name in ("kv",) if backend == "triton" else ("kv", "z", "log_scale"):
        good = some_state("exp")
        state = replace(good, **{name: getattr(good, name).clone().requires_grad_()})
        before = state.detach()
        if call == "donated":  # a call with gradients makes a new state
            after = run(in_place(state, call), call, backend=backend, feature_map="exp")
            assert after.kv.data_ptr() != state.kv.data_ptr()
            assert name != "kv" or torch.autograd.grad(after.kv.sum(), state.kv)[0].any()
        else:
            with pytest.raises(RuntimeError, match="state: got rows of a pool in a call with gradients"):
                run(in_place(state, call), call, backend=backend, feature_map="exp")
        assert_equal(state.detach(), before)


@every_kernel
def test_a_query_that_needs_gradients_leaves_the_state_to_the_backward_pass(backend: str) -> None:
    q, k, v = torch.randn(1, 1, H, D, requires_grad=True), torch.randn(1, 1, G, D), torch.randn(1, 1, G, E)
    state = linear_rope_state(torch.randn(1, 5, G, D), torch.randn(1, 5, G, E))
    before = state.clone()
    out, _ = linear_rope_attention(q, k, v, state=state.donate(), return_state=True, backend=backend)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="rows of a pool in a call with gradients"):
        linear_rope_attention(q, k, v, state=state.at(torch.tensor([0])), backend=backend)
    assert_equal(state, before)


@every_kernel
@pytest.mark.parametrize("way", ["donated", "loop", "pool"])
def test_a_backward_pass_through_a_state_that_was_overwritten_since_raises(way: str, backend: str) -> None:
    k, v = torch.randn(2, 1, G, D), torch.randn(2, 1, G, E)
    state = linear_rope_state(k, v)

    @torch.no_grad()
    def step(state: LinearAttentionState) -> LinearAttentionState:
        return linear_rope_attention(k, k, v, state=state, return_state=True, backend=backend)[1]

    if way == "loop":
        state = step(state.donate())
    q, positions = k.clone().requires_grad_(), torch.ones(1, dtype=torch.int64)
    out = linear_rope_attention(q, k, v, state=state, positions=positions, backend=backend)
    step(state.at(torch.tensor([1, 0])) if way == "pool" else state.donate())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@every_kernel
@every_call
@torch.no_grad()
def test_a_sum_of_steps_of_another_shape(call: str, backend: str) -> None:
    good = some_state("elu+1")
    twice = replace(good.clone(), angle=torch.cat((good.angle, good.angle), -1))
    shared = replace(good.clone(), angle=good.angle[:, :1].clone())
    for state in (twice, shared):
        before = state.clone()
        if call == "donated" and state is shared:  # no room for a sum per head: the next state has its own
            after = run(in_place(state, call), call, backend=backend)
            torch.testing.assert_close(after.tensors(), run(before, call, backend="eager").tensors())
            continue
        with pytest.raises(ValueError, match=r"^state\.angle: got"):
            run(in_place(state, call), call, backend=backend)
        assert_equal(state, before)


@torch.no_grad()
def test_write_checks_all_shapes_first() -> None:
    pool, other = some_state("elu+1"), some_state("elu+1").reorder(torch.tensor([0, 1]))
    before = pool.clone()
    with pytest.raises(ValueError, match=r"state\.position: got shape \(2,\), expected \(1,\)"):
        pool.at(torch.tensor([1])).write({"kv": other.kv[:1], "position": other.position})
    with pytest.raises(ValueError, match=r"state\.kv: got shape"):
        pool.write(other)
    with pytest.raises(ValueError, match=r"state: got kev; expected some of kv, z, position, angle$"):
        pool.write({"kv": pool.kv + 1, "kev": pool.kv})
    assert_equal(pool, before)


@torch.no_grad()
@pytest.mark.parametrize(
    ("change", "message"),
    [({"identity": "another map"}, "state: made with another map; expected "),
     ({"identity": f"{MADE_WITH}{WITHOUT_Z}"}, "state: made with .*; without z; expected "),
     ({"angle": None}, "state: got kv, z, position, log_scale; expected kv, z, position, angle, log_scale"),
     ({"log_scale": None}, "state: got kv, z, position, angle; expected kv, z, position, angle, log_scale")],
    ids=["map", "without z", "without angle", "without log_scale"],
)  # fmt: skip
def test_write_refuses_a_state_of_another_kind(change: dict[str, Any], message: str) -> None:
    pool = replace(some_state("exp"), identity=MADE_WITH)
    before = pool.clone()
    with pytest.raises(ValueError, match=message):
        pool.write(replace(pool.clone(), kv=pool.kv + 1, **change))
    assert_equal(pool, before)


@torch.no_grad()
@pytest.mark.parametrize(
    ("identity", "change"),
    [("T2R#0123456789abcdef; None", {"identity": "T2R#?; None"}),  # a compiled call made it
     (f"{MADE_WITH}{WITHOUT_Z}", {"identity": MADE_WITH}),
     (MADE_WITH, {"angle_gradient_path": torch.zeros(ROWS, G, 2)}),  # a call with gradients made it
     (MADE_WITH, {"slots": torch.tensor([1, 2, 0])})],
    ids=["digest unknown", "with z", "with gradients", "rows"],
)  # fmt: skip
def test_write_takes_what_the_calls_on_a_pool_could_continue(identity: str, change: dict[str, Any]) -> None:
    pool = replace(some_state("exp"), identity=identity)
    new = replace(pool.clone(), kv=pool.kv + 1, **change)
    pool.write(new)
    assert torch.equal(pool.kv, new.rows().kv)
