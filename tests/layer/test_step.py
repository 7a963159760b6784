"""A layer's call on one token takes one operator where it can, and notices whatever changes.

The other code of the layer, which a call with positions of its own takes, is compared with the equation elsewhere.
"""

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import linrope
from linrope import LinearRoPEAttention, Rotary
from linrope.backends import library, native
from linrope.layer.state import LayerState
from tests.decode.test_prepare import OPTIONS

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
Layer = LinearRoPEAttention
BLOCK = {"decay": "learned", "forget_gate": True}


def make(b: int = 2, kind: type[Layer] = Layer, **options: Any) -> tuple[Layer, Tensor, LayerState]:
    """A layer whose parameters all matter, one more token and the state before it."""
    torch.manual_seed(0)
    options = {name: x for name, x in options.items() if name != "feed_forward"}
    layer = kind.block(32, 4, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        x = torch.randn(b, 8, 32)
        _, state = layer(x[:, :7], return_state=True)
    return layer, x[:, 7:], state


@contextmanager
def steps() -> Iterator[list[str]]:
    """The operators that the library runs, without those that refuse their arguments."""
    names, run = [], library.run

    def look(name: str, *arguments: Any) -> Any:
        result = run(name, *arguments)
        names.append(name)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "run", look)
        yield names


def other_code(layer: Layer, x: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
    with steps() as names:
        result = layer(x, state=state.clone(), return_state=True, positions=state.position[:, None])
    assert "mixer_step" not in names
    return result


def assert_same(
    actual: tuple[Tensor, LayerState], expected: tuple[Tensor, LayerState], digits: float = 1e-5
) -> None:
    torch.testing.assert_close(actual[0], expected[0], rtol=digits, atol=digits)
    assert actual[1].identity == expected[1].identity
    assert actual[1].donated is actual[1].sums.donated is False
    torch.testing.assert_close(actual[1].tensors(), expected[1].tensors(), rtol=digits, atol=digits)


def taken(layer: Layer, x: Tensor, state: LayerState, digits: float = 1e-5) -> bool:
    """Whether the call takes the operator. Checks that the result is the other code's."""
    with steps() as names:
        result = layer(x, state=state.clone().donate(), return_state=True)
    assert_same(result, other_code(layer, x, state), digits)
    return "mixer_step" in names


@pytest.mark.parametrize("b", [1, 2, 8, 9, 0])
@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_it_computes_what_the_other_code_computes(name: str, b: int) -> None:
    layer, x, state = make(max(b, 1), **OPTIONS[name])
    state = state.reorder(torch.arange(b))
    assert taken(layer, x[:b], state)


@pytest.mark.parametrize("b", [2, 9])
@pytest.mark.parametrize("name", OPTIONS)
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


def double(_module: nn.Module, _inputs: Any, y: Any) -> Any:
    return 2 * y


class Doubles(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def replace_data(parameter: nn.Parameter) -> None:
    parameter.data = 2 * parameter.data.clone()


def replace(module: nn.Module, name: str) -> None:
    setattr(module, name, nn.Parameter(1.5 * getattr(module, name).detach()))


PER_FEATURE = {"forget_gate": {"per": "feature", "bound": 5}}
ERASE = {"erase_gate": "independent"}
# The options of a layer, what changes, and whether its calls still take the operator
CHANGES: dict[str, tuple[dict[str, Any], Callable[[Layer], object], bool]] = {
    "a weight is written": (BLOCK, lambda x: x.q_proj.weight.mul_(2), True),
    "the output's weight is written": (BLOCK, lambda x: x.o_proj.weight.mul_(2), True),
    "a weight's data is another": (BLOCK, lambda x: replace_data(x.v_proj.weight), True),
    "a weight is another": (BLOCK, lambda x: replace(x.k_proj, "weight"), True),
    "the convolution's data is another": (BLOCK, lambda x: replace_data(x.short_conv.weight), True),
    "the convolution's bias is another": (BLOCK, lambda x: replace(x.short_conv, "bias"), True),
    "the norm's data is another": ({"out_norm": "all"}, lambda x: replace_data(x.out_norm.weight), True),
    "the norm is written": ({"out_norm": "all"}, lambda x: x.out_norm.weight.mul_(2), True),
    "the skip's data is another": (BLOCK, lambda x: replace_data(x.skip), True),
    "the skip is another": (BLOCK, lambda x: replace(x, "skip"), True),
    "a bias appears": (BLOCK, lambda x: setattr(x.g_proj, "bias", nn.Parameter(torch.ones(64))), True),
    "the gate is written": (BLOCK, lambda x: x.forget_gate.bias.sub_(2), True),
    "the gate's data is another": (BLOCK, lambda x: replace_data(x.forget_gate.weight), True),
    "the gate per feature": (PER_FEATURE, lambda x: replace_data(x.forget_gate.up), True),
    "the gate's first product": (PER_FEATURE, lambda x: replace_data(x.forget_gate.down), True),
    "the erase gate": (ERASE, lambda x: replace_data(x.erase_gate.bias), True),
    "the decay is written": (BLOCK, lambda x: x.decay_logit.sub_(2), True),
    "the decay's data is written": (BLOCK, lambda x: x.decay_logit.data.sub_(2), True),
    "the decay's data is another": (BLOCK, lambda x: replace_data(x.decay_logit), True),
    "all weights were rounded": (BLOCK, lambda x: x.bfloat16().float(), True),
    "half precision": (BLOCK, lambda x: x.q_proj.bfloat16(), False),
    "training": (BLOCK, lambda x: x.train(not x.training), True),
    "a projection is another": (BLOCK, lambda x: setattr(x, "k_proj", nn.Linear(32, 32)), True),
    "a projection has a class of its own": (BLOCK, lambda x: setattr(x, "v_proj", Doubles(32, 64)), False),
    "a projection's class is another": (BLOCK, lambda x: setattr(x.g_proj, "__class__", Doubles), False),
    "a projection's forward is another": (
        BLOCK, lambda x: setattr(x.k_proj, "forward", Doubles(32, 32).forward), False
    ),
    "a hook": (BLOCK, lambda x: x.v_proj.register_forward_hook(double), False),
    "a first hook": (BLOCK, lambda x: x.v_proj.register_forward_pre_hook(lambda _, y: (2 * y[0],)), False),
    "a hook on the map": (BLOCK, lambda x: x.feature_map.register_forward_hook(lambda *_: None), False),
    "the map's keys are others": (BLOCK, lambda x: setattr(x.feature_map, "keys", torch.relu), False),
    "a hook of the layer itself": (BLOCK, lambda x: x.register_forward_hook(lambda *_: None), True),
    "the normalizer": ({"out_norm": False}, lambda x: setattr(x, "normalize", False), True),
    "the norm's place": (
        {"out_norm": True}, lambda x: setattr(x, "_out_norm_replaces_normalizer", False), True
    ),
    "the backend": (BLOCK, lambda x: setattr(x, "backend", "eager"), False),
    "eps": (BLOCK, lambda x: setattr(x.out_norm, "eps", 0.3), True),
    "the gate's order": (BLOCK, lambda x: setattr(x.out_norm, "gate_order", "before"), True),
    "the skip's order": (BLOCK, lambda x: setattr(x.out_norm, "skip_order", "before"), True),
    "the activation": (BLOCK, lambda x: setattr(x.short_conv, "activation", None), True),
    "the bound": (PER_FEATURE, lambda x: setattr(x.forget_gate, "bound", 2.0), True),
    "the erase gate's largest number": (ERASE, lambda x: setattr(x.erase_gate, "largest", 2), True),
    "the queries' factor": (ERASE, lambda x: setattr(x.feature_map, "query_factor", 0.5), True),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name: str) -> None:
    options, change, still = CHANGES[name]
    (layer, x, state), _ = make(**options), torch.set_grad_enabled(False)
    first = layer(x, state=state)
    assert taken(layer, x, state)
    with torch.no_grad():
        change(layer)
        # Half precision beside float32 is an error of PyTorch, which the other code raises
        if name == "half precision":
            with pytest.raises(RuntimeError, match="dtype"):
                layer(x, state=state)
            return
        assert taken(layer, x, state) is still
    same = ("training", "a hook on the map", "a hook of the layer itself", "the backend")
    if name not in same:
        assert (layer(x, state=state) - first).abs().max() > 1e-6
    torch.set_grad_enabled(True)


@torch.no_grad()
def test_a_hook_that_is_removed_is_noticed_too() -> None:
    layer, x, state = make()
    for add in (
        lambda: layer.q_proj.register_forward_hook(double),
        lambda: nn.modules.module.register_module_forward_hook(lambda *_: None),
    ):
        assert taken(layer, x, state)
        handle = add()
        assert not taken(layer, x, state)
        handle.remove()
    assert taken(layer, x, state)


class Triples(TorchFunctionMode):
    """Multiplies what nn.Linear returns."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = function(*args, **(kwargs or {}))
        return 3 * y if function is nn.functional.linear else y


@torch.no_grad()
def test_modes_are_noticed() -> None:
    layer, x, state = make()
    before = layer(x, state=state)
    with torch.autocast("cpu"), steps() as names:
        assert layer(x, state=state).dtype == torch.bfloat16
    assert "mixer_step" not in names
    for mode in (FlopCounterMode(display=False), Triples()):
        with mode:
            assert not taken(layer, x, state)
    flops = FlopCounterMode(display=False)
    with flops:
        layer(x, state=state)
    assert flops.get_total_flops() > 0
    with torch.inference_mode():
        assert taken(layer, x, state)
    assert torch.equal(layer(x, state=state), before)


def test_gradients_are_noticed() -> None:
    layer, x, state = make()
    y, _ = layer(x, state=state.clone().donate(), return_state=True)
    (gradient,) = torch.autograd.grad(y.square().sum(), layer.q_proj.weight)
    assert gradient.abs().max() > 0
    layer.requires_grad_(False)
    assert taken(layer, x, state)
    token = x.clone().requires_grad_()
    assert layer(token, state=state).requires_grad
    kv = state.sums.kv.clone().requires_grad_()
    other = LayerState.from_tensors(state.tensors() | {"kv": kv}, state.identity)
    assert layer(x, state=other).requires_grad
    with pytest.raises(RuntimeError, match="inputs with tangents"):
        torch.func.jvp(lambda x: layer(x, state=state), (x,), (torch.ones_like(x),))


@torch.no_grad()
def test_transformations_and_swapped_parameters_are_noticed() -> None:
    layer, x, state = make()
    before = layer(x, state=state)
    other = {"v_proj.weight": 2 * layer.v_proj.weight}
    swapped = torch.func.functional_call(layer, other, (x,), {"state": state})
    assert not torch.allclose(swapped, before)
    assert torch.equal(layer(x, state=state), before)
    mapped = torch.func.vmap(lambda x: layer(x, state=state))(torch.stack((x, 2 * x)))
    torch.testing.assert_close(mapped[0], before, rtol=1e-5, atol=1e-5)
    compiled = torch.compile(layer, backend="eager")
    torch.testing.assert_close(compiled(x, state=state), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@torch.no_grad()
def test_a_copy_has_a_step_of_its_own(copied: Callable[[Layer], Layer]) -> None:
    layer, x, state = make()
    before = layer(x, state=state)
    other = copied(layer)
    other.q_proj = nn.Linear(32, 32)
    other.normalize = False
    assert taken(other, x, state)
    assert not torch.allclose(other(x, state=state), before)
    if copied is not copy.copy:  # which shares the submodules
        assert torch.equal(layer(x, state=state), before)


@torch.no_grad()
def test_a_replica_of_the_layer_does_not_take_its_step() -> None:
    layer, x, state = make()
    assert taken(layer, x, state)
    replica = Layer.__new__(Layer)
    vars(replica).update(vars(layer), _modules={**layer._modules, "v_proj": Doubles(32, 64)})
    assert not taken(replica, x, state)
    assert taken(layer, x, state)


class OtherLayer(LinearRoPEAttention):
    def _values(self, y: Tensor) -> Tensor:
        return 2 * super()._values(y)


@torch.no_grad()
def test_a_layer_of_another_class_takes_its_own_code() -> None:
    assert not taken(*make(kind=OtherLayer))


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
        lambda: layer(x, x, state=state) if layer.causal is None else layer(two, state=state),
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
    r"^state: got positions \[3, 2147483648\] and 1 more tokens": (
        lambda x, state: (x, changed(state, position=torch.tensor([3, 2**31]))), ValueError
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
def test_another_rotation_rejects_the_state() -> None:
    layer, x, state = make()
    layer(x, state=state)
    layer.rotary = Rotary(8, layout="half")
    with pytest.raises(ValueError, match="state: made with"):
        layer(x, state=state)


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


@torch.no_grad()
def test_a_step_keeps_no_weight_that_the_layer_has_given_up() -> None:
    """Offloading would free no memory otherwise."""
    layer, x, state = make()
    layer(x, state=state)
    weights = [layer.q_proj.weight, layer.skip, layer.out_norm.weight]
    gone = [*map(weakref.ref, weights)]
    for module, name in ((layer.q_proj, "weight"), (layer, "skip"), (layer.out_norm, "weight")):
        replace(module, name)
    del weights
    assert [x() for x in gone] == [None] * 3
    assert taken(layer, x, state)


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
