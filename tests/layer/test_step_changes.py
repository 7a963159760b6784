"""A layer's call on one token notices whatever changes since the last one."""

import copy
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace as replace_fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from linrope import LinearRoPEAttention, Rotary
from linrope.layer.config import LayerConfig
from linrope.layer.norm import OutputNorm, RMSNorm
from linrope.layer.selective import SelectiveSteps
from linrope.layer.state import LayerState
from tests.layer.steps import Layer, make, needs_native, other_code, steps, taken

pytestmark = needs_native
BLOCK = {"decay": "learned", "forget_gate": True}


def double(_module: nn.Module, _inputs: Any, y: Any) -> Any:
    return 2 * y


class Doubles(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Tripled(Tensor):
    """A weight that nn.Linear multiplies by 3, as quantized weights are multiplied by their scale."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = super().__torch_function__(function, types, args, kwargs)
        return 3 * y.as_subclass(Tensor) if function is nn.functional.linear else y


class Halved(Rotary):
    """Its angles may change from call to call."""

    identity = Rotary(8, rotary_dim=2).identity  # type: ignore[assignment]

    def turns_per_position(self, device: torch.device) -> Tensor:
        return super().turns_per_position(device) // 2


def triple(module: nn.Module) -> None:
    module.weight = nn.Parameter(module.weight.detach().as_subclass(Tripled))


PER_FEATURE = {"forget_gate": {"per": "feature", "bound": 5}}
ERASE = {"erase_gate": "independent"}
WAYS: dict[str, Callable[[nn.Module, str], object]] = {
    "written": lambda module, name: getattr(module, name).mul_(1.2).add_(0.1),
    "other data": lambda module, name: setattr(
        getattr(module, name), "data", 1.2 * getattr(module, name).data
    ),
    "another": lambda module, name: setattr(module, name, nn.Parameter(1.2 * getattr(module, name))),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [BLOCK, PER_FEATURE, ERASE, {"out_norm": "all"}], ids=str)
@torch.no_grad()
def test_a_weight_is_read_wherever_the_layer_has_it(options: dict[str, Any], way: str) -> None:
    layer, x, state = make(**options)
    for module in layer.modules():
        for name in [name for name, _ in module.named_parameters(recurse=False)]:
            before = layer(x, state=state)
            WAYS[way](module, name)
            assert taken(layer, x, state)
            assert (layer(x, state=state) - before).abs().max() > 1e-6, name


def register_again(layer: Layer) -> None:
    skip = layer.skip
    del layer.skip
    layer.skip = skip


# What changes in a layer, and whether its calls still take the operator
CHANGES: dict[str, tuple[Callable[[Layer], object], bool]] = {
    "a weight is of another class": (lambda x: triple(x.v_proj), False),
    "a bias appears": (lambda x: setattr(x.g_proj, "bias", nn.Parameter(torch.ones(64))), True),
    "the order of parameters": (register_again, True),
    "all weights were rounded": (lambda x: x.bfloat16().float(), True),
    "a rotation of another class": (lambda x: setattr(x, "rotary", Halved(8, rotary_dim=2)), False),
    "a projection is another": (lambda x: setattr(x, "k_proj", nn.Linear(32, 32)), True),
    "a projection has a class of its own": (lambda x: setattr(x, "v_proj", Doubles(32, 64)), False),
    "a projection's class is another": (lambda x: setattr(x.g_proj, "__class__", Doubles), False),
    "a projection's forward is another": (
        lambda x: setattr(x.k_proj, "forward", Doubles(32, 32).forward), False
    ),
    "a hook": (lambda x: x.v_proj.register_forward_hook(double), False),
    "a first hook": (lambda x: x.v_proj.register_forward_pre_hook(lambda _, y: (2 * y[0],)), False),
    "a hook on the map": (lambda x: x.feature_map.register_forward_hook(lambda *_: None), False),
    "the map's keys are others": (lambda x: setattr(x.feature_map, "keys", torch.relu), False),
    "a hook of the layer itself": (lambda x: x.register_forward_hook(lambda *_: None), True),
    "the backend": (lambda x: setattr(x, "backend", "eager"), False),
    "the layer's values are others": (
        lambda x: setattr(x, "_values", lambda y: 2 * type(x)._values(x, y)), False
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_a_change_is_noticed(name: str) -> None:
    (layer, x, state), (change, still) = make(**BLOCK), CHANGES[name]
    assert taken(layer, x, state)
    change(layer)
    assert taken(layer, x, state) is still  # compares the two


@torch.no_grad()
def test_half_precision_beside_float32_is_the_error_of_pytorch() -> None:
    layer, x, state = make()
    layer(x, state=state)
    layer.q_proj.bfloat16()
    with pytest.raises(RuntimeError, match="dtype"):
        layer(x, state=state)


# Parts of a layer that may be there or not
NEW_PARTS = {
    **dict.fromkeys(("q_norm", "k_norm"), lambda: RMSNorm(8)),
    "out_norm": lambda: OutputNorm(64, over="all"),
    "angle_steps": lambda: SelectiveSteps(32, Rotary(8), 4),
    "g_proj": lambda: nn.Linear(32, 64),
    "skip": lambda: nn.Parameter(torch.randn(4)),
}
WORDS = ("after", "before", "all", "tied", "independent", "eager", "silu")


def other_values(name: str, value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1]
    if isinstance(value, str):
        return [word for word in WORDS if word != value]
    if value is None:
        return [NEW_PARTS[name]()] if name in NEW_PARTS else []
    return [None] if name in NEW_PARTS else []


def attributes_read(layer: Layer, call: Callable[[], object]) -> list[tuple[Any, str]]:
    """The attributes of the layer, of its modules and of its config that a call reads, and their owners."""
    own = {id(x): (x, {*vars(x), *x._parameters, *x._modules}) for x in layer.modules()}
    own[id(layer.config)] = layer.config, {*vars(layer.config)}
    read: dict[tuple[int, str], tuple[Any, str]] = {}

    def look(owner: Any, name: str) -> Any:
        if id(owner) in own and name in own[id(owner)][1]:
            read[id(owner), name] = owner, name
        return object.__getattribute__(owner, name)

    with pytest.MonkeyPatch.context() as patch:
        for kind in {*map(type, layer.modules()), LayerConfig}:
            patch.setattr(kind, "__getattribute__", look)
        call()
    return [*read.values()]


BARE = dict.fromkeys(("out_norm", "gate", "forget_gate"), False) | dict.fromkeys(
    ("skip", "short_conv", "decay")
)


@pytest.mark.parametrize(
    "options",
    [BARE, PER_FEATURE, ERASE, BLOCK | {"out_norm": False}],
    ids=["bare", "gate per feature", "erase gate", "no norm"],
)
@torch.no_grad()
def test_whatever_the_call_reads_the_step_reads_too(options: dict[str, Any]) -> None:
    (layer, x, state), tokens = make(**options), torch.randn(2, 7, 32)
    for owner, name in attributes_read(layer, lambda: other_code(layer, x, state)):
        for value in other_values(name, getattr(owner, name)):
            with pytest.MonkeyPatch.context() as patch:
                try:
                    if owner is layer.config:
                        patch.setattr(layer, "config", replace_fields(owner, **{name: value}))
                    else:
                        patch.setattr(owner, name, value)
                    _, before = layer(tokens, return_state=True)
                    other_code(layer, x, before)
                except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
                    continue  # the layer cannot have this value
                taken(layer, x, before, 1e-4)  # compares the two


@pytest.mark.parametrize("from_the_start", [False, True])
@torch.no_grad()
def test_a_hook_that_is_removed_is_noticed_too(from_the_start: bool) -> None:
    layer, x, state = make()
    for add in (
        lambda layer: layer.q_proj.register_forward_hook(double),
        lambda _: nn.modules.module.register_module_forward_hook(lambda *_: None),
    ):
        if from_the_start:
            layer, x, state = make()
        else:
            assert taken(layer, x, state)
        handle = add(layer)
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
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="inputs with tangents"):
        layer(forward_ad.make_dual(x, x), state=state)
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
def test_another_rotation_rejects_the_state() -> None:
    layer, x, state = make()
    layer(x, state=state)
    layer.rotary = Rotary(8, layout="half")
    with pytest.raises(ValueError, match="state: made with"):
        layer(x, state=state)


@torch.no_grad()
def test_a_step_keeps_no_weight_that_the_layer_has_given_up() -> None:
    """Offloading would free no memory otherwise."""
    layer, x, state = make()
    layer(x, state=state)
    weights = [layer.q_proj.weight, layer.skip, layer.out_norm.weight]
    gone = [*map(weakref.ref, weights)]
    for module, name in ((layer.q_proj, "weight"), (layer, "skip"), (layer.out_norm, "weight")):
        WAYS["another"](module, name)
    del weights
    assert [x() for x in gone] == [None] * 3
    assert taken(layer, x, state)
