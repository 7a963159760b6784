"""A layer's call on one token takes one operator where it can.

The other code of the layer, which a call with positions of its own takes, is compared with the equation elsewhere.
"""

import gc
import sys
import weakref
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

import linrope
from linrope.layer.state import LayerState
from tests.decode.test_prepare import OPTIONS
from tests.layer.steps import assert_same, make, needs_native, steps, taken

pytestmark = needs_native


@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_it_computes_what_the_other_code_computes(name: str) -> None:
    layer, x, state = make(9, **OPTIONS[name])
    for b in (1, 2, 8, 9, 0):
        assert taken(layer, x[:b], state.reorder(torch.arange(b))), b


@pytest.mark.parametrize(("name", "b"), [*zip(OPTIONS, cycle((2, 9)))])
@torch.no_grad()
def test_a_donated_state_a_pool_and_a_state_that_is_kept_give_the_same_bits(name: str, b: int) -> None:
    layer, x, state = make(b, **OPTIONS[name])
    before = state.clone()
    y, after = layer(x, state=state, return_state=True)
    torch.testing.assert_close(state.tensors(), before.tensors(), rtol=0, atol=0)
    assert torch.equal(layer(x, state=state), y)
    torch.testing.assert_close(state.tensors(), before.tensors(), rtol=0, atol=0)

    donated = state.clone()
    z, last = layer(x, state=donated.donate(), return_state=True)
    assert torch.equal(y, z)
    assert all(x is y for x, y in zip(last.tensors().values(), donated.tensors().values(), strict=True))
    torch.testing.assert_close(last.tensors(), after.tensors(), rtol=0, atol=0)

    slots = torch.randperm(b + 3)[:b]
    pool = state.reorder(torch.arange(b + 3) % b)
    others = [row for row in range(b + 3) if row not in slots]
    pool.at(slots).write(state)
    idle = pool.reorder(torch.tensor(others)).tensors()
    z, last = layer(x, state=pool.at(slots), return_state=True)
    assert torch.equal(y, z)
    assert torch.equal(last.slots, slots)
    torch.testing.assert_close(pool.at(slots).rows().tensors(), after.tensors(), rtol=0, atol=0)
    torch.testing.assert_close(pool.reorder(torch.tensor(others)).tensors(), idle, rtol=0, atol=0)


@torch.no_grad()
def test_calls_that_are_not_one_more_token_take_the_other_code() -> None:
    layer, x, state = make()
    two = torch.cat((x, x), 1)
    calls = [
        lambda: layer(x),
        lambda: layer(x, return_state=True),
        lambda: layer(two, state=state),
        lambda: layer(x[:, :0], state=state),
        lambda: layer(x, state=state, key_mask=torch.ones(2, 1, dtype=torch.bool)),
        lambda: layer(two.view(1, 4, 32), state=state, cu_seqlens=torch.tensor([0, 2, 4])),
    ]
    for call in calls:
        with steps() as names:
            call()
        assert "mixer_step" not in names


def changed(state: LayerState, **tensors: Tensor) -> LayerState:
    return LayerState.from_tensors(state.tensors() | tensors, state.identity)


@torch.no_grad()
def test_states_that_the_operator_cannot_take_go_to_the_other_code() -> None:
    layer, x, state = make()
    assert not taken(layer, x, state.to(dtype=torch.float64))
    assert not taken(layer, x.double().to(torch.float32), changed(state, z=state.sums.z.float()))
    swapped = changed(state.clone(), kv=state.sums.kv.mT.contiguous().mT)
    kept = swapped.sums.kv.clone(memory_format=torch.preserve_format)
    y, _ = layer(x, state=swapped.donate(), return_state=True)
    torch.testing.assert_close(y, layer(x, state=state), rtol=1e-5, atol=1e-5)
    assert not torch.equal(swapped.sums.kv, kept)  # in place, by the operation


WRONG: dict[str, tuple[Callable[[Tensor, LayerState], tuple[Any, Any]], type[Exception]]] = {
    r"^x: got torch\.int64, expected a floating-point": (lambda x, state: (x.long(), state), TypeError),
    r"^x: got shape \(2, 1, 31\)": (lambda x, state: (x[..., 1:], state), ValueError),
    r"^x: got shape \(2, 32\)": (lambda x, state: (x[:, 0], state), ValueError),
    r"^x: got list": (lambda x, state: (x.tolist(), state), TypeError),
    r"^state: got 2 sequences, expected 1": (lambda x, state: (x[:1], state), ValueError),
    r"^state: got LinearAttentionState": (lambda x, state: (x, state.sums), TypeError),
    r"^state: got conv of": (lambda x, state: (x, LayerState(state.sums)), ValueError),
    r"^state: .*features": (
        lambda x, state: (x, LayerState.from_tensors(state.tensors(), "features; None")), ValueError
    ),
    r"^angle_steps: got None, expected a tensor": (
        lambda x, state: (x, changed(state, angle=torch.ones(2, 1, 1, dtype=torch.int64))), ValueError
    ),
    r"^state: got positions \[3, 2147483648\] and 1 more tokens": (
        lambda x, state: (x, changed(state, position=torch.tensor([3, 2**31]))), ValueError
    ),
    r"^state\.conv: got entries that share memory": (
        lambda x, state: (x, changed(state, conv=state.conv[:1].expand(2, -1, -1))), ValueError
    ),
    r"^state\.z: got entries that share memory": (
        lambda x, state: (x, changed(state, z=state.sums.z[:, :1].expand(-1, 4, -1))), ValueError
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
@torch.no_grad()
def test_what_does_not_fit_is_refused_in_the_layer_s_words_and_nothing_is_written(words: str) -> None:
    (layer, x, state), (change, error) = make(), WRONG[words]
    layer(x, state=state)
    x, wrong = change(x, state)
    before = {name: y.clone() for name, y in wrong.tensors().items()}
    with pytest.raises(error, match=words):
        layer(x, state=wrong.donate())
    for name, y in wrong.tensors().items():
        assert torch.equal(y, before[name])


@torch.no_grad()
def test_a_state_made_in_inference_mode_is_not_overwritten_outside() -> None:
    layer, x, state = make()
    with torch.inference_mode():
        inside = state.clone()
    with pytest.raises(ValueError, match="inference_mode"):
        layer(x, state=inside.donate())
    assert_same(layer(x, state=inside, return_state=True), layer(x, state=state, return_state=True), 0)
    assert taken(layer, x, inside)


def test_autograd_sees_that_the_state_was_overwritten() -> None:
    layer, x, state = make()
    weight = torch.ones(1, requires_grad=True)
    for name, tensor in state.tensors().items():
        if tensor.is_floating_point():
            fresh = state.clone()
            y = (weight.to(tensor.dtype) * fresh.tensors()[name]).sum()
            with torch.no_grad():
                layer(x, state=fresh.donate())
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward()


@torch.no_grad()
def test_a_layer_is_freed_without_the_garbage_collector() -> None:
    layer, x, state = make()
    layer(x, state=state)
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(layer)
        del layer
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("options", [{}, {"erase_gate": "tied"}, {"forget_gate": {"per": "feature"}}])
@torch.no_grad()
def test_a_donated_step_enters_few_functions_of_ours(options: dict[str, Any]) -> None:
    layer, x, state = make(**options)
    folder, entered = linrope.__path__[0], []

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            entered.append(frame.f_code.co_name)

    for _ in range(2):
        _, state = layer(x, state=state.donate(), return_state=True)
    sys.setprofile(look)
    try:
        layer(x, state=state.donate(), return_state=True)
    finally:
        sys.setprofile(None)
    assert len(entered) <= 20, entered
