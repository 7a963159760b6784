"""Prepared steps against the module's own call, whose numbers the rest of the tests compare with the equation."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from linrope.backends import native
from linrope.decode import generate, generation, prepare, why_not
from linrope.decode.model_step import ModelStep
from linrope.layer.state import LayerState
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.language_model import States


def tiny(**options: Any) -> LanguageModelConfig:
    return LanguageModelConfig(**({"embed_dim": 32, "num_layers": 2, "num_heads": 4} | options))


TINY = tiny()
CONV = {"taps": 3, "activation": None, "bias": False}
PER_FEATURE = {"per": "feature", "rank": 3}
UP_TO_2 = {"name": "tied", "largest": 2}
UNIT = {"name": "unit", "activation": "silu", "query_factor": 0.5}
OPTIONS = {
    "default": {},
    "no feed-forward network": {"feed_forward": False},
    "no convolution": {"short_conv": None},
    "plain convolution": {"short_conv": CONV},
    "independent write gate": {"write_gate": "independent"},
    "no write gate": {"write_gate": None},
    "fixed decay": {"forget_gate": False},
    "learned decay and gate": {"forget_gate": True, "decay": "learned"},
    "no decay": {"forget_gate": False, "decay": None},
    "half": {"rotary": "half"},
    "no rotation": {"rotary": None},
    "part of the features rotates": {"rotary": {"rotary_dim": 4, "layout": "half"}},
    "grouped heads": {"num_kv_heads": 2},
    "narrow values": {"head_dim": 6, "value_head_dim": 5},
    "signed map": {"feature_map": "silu", "normalize": False},
    "norm over all": {"out_norm": "all"},
    "normalizer": {"out_norm": False},
    "skip before": {"skip": "before"},
    "gate before": {"gate": "before"},
    "no gates": {"forget_gate": False, "gate": False},
    "bare": {"out_norm": False, "skip": None, "gate": False, "short_conv": None},
    "value heads": {"num_value_heads": 8},
    "gates per feature": {"forget_gate": PER_FEATURE},
    "gates per feature, normalizer": {"forget_gate": PER_FEATURE, "out_norm": False, "rotary": "half"},
    "bounded gates per feature": {"forget_gate": PER_FEATURE | {"bound": 5}, "write_gate": "independent"},
    "unit": {"feature_map": UNIT, "normalize": False},
    "tied erase": {"erase_gate": "tied"},
    "tied erase up to 2, no decay": {"erase_gate": UP_TO_2, "forget_gate": False, "decay": None},
    "erase and tied write gate": {"erase_gate": "independent", "write_gate": "tied", "feature_map": UNIT},
    "erase and write gate, grouped heads": {
        "erase_gate": UP_TO_2 | {"name": "independent"}, "write_gate": "independent", "num_kv_heads": 2
    },
    "erase alone, value heads": {
        "erase_gate": "independent", "write_gate": None, "num_value_heads": 8, "out_norm": "all"
    },
    "erase, gates per feature": {
        "erase_gate": UP_TO_2, "forget_gate": PER_FEATURE, "decay": "learned", "short_conv": None
    },
}  # fmt: skip
pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))


def make(**options: object) -> LanguageModel:
    """A model whose parameters all matter: none is zero or one, as many are at the start."""
    torch.manual_seed(0)
    model = LanguageModel(tiny(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@torch.no_grad()
def prompt(model: LanguageModel, b: int = 2) -> States:
    return model(torch.randint(256, (b, 7)))[1]


def begun(b: int = 2, **options: object) -> tuple[LanguageModel, States]:
    model = make(**options)
    return model, prompt(model, b)


def copies(states: States) -> States:
    return [state.clone() for state in states]


def changed(state: LayerState, **tensors: torch.Tensor) -> LayerState:
    return LayerState.from_tensors(state.tensors() | tensors, state.identity)


def assert_same_states(actual: States, expected: States) -> None:
    for x, y in zip(actual, expected, strict=True):
        assert x.identity == y.identity
        torch.testing.assert_close(x.tensors(), y.tensors(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "b"), [*zip(OPTIONS, cycle((1, 8)))])
@torch.no_grad()
def test_twenty_tokens_give_what_the_model_gives(name: str, b: int) -> None:
    model, states = begun(b, **OPTIONS[name])
    step = prepare(model, copies(states))
    for tokens in torch.randint(256, (20, b, 1)):
        expected, states = model(tokens, states)
        torch.testing.assert_close(step(tokens.byte()), expected, rtol=1e-4, atol=1e-4)
    assert_same_states(step.states, states)


@pytest.mark.parametrize("name", ["tied erase up to 2, no decay", "erase, gates per feature"])
@torch.no_grad()
def test_two_thousand_steps_drift_no_further_than_fifty(name: str) -> None:
    layer, x = make(**OPTIONS[name]).blocks[0].attention, torch.randn(8, 2007, 32)
    expected, last = layer(x, return_state=True)
    _, state = layer(x[:, :7], return_state=True)
    pieces = []
    for i in range(7, 2007):
        y, state = layer(x[:, i : i + 1], state=state.donate(), return_state=True)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), expected[:, 7:], rtol=1e-4, atol=1e-4)
    assert_same_states([state], [last])


@torch.no_grad()
def test_it_writes_into_the_states_and_the_model_continues_from_them() -> None:
    (model, states), tokens = begun(), torch.randint(256, (2, 6))
    expected, _ = model(tokens, copies(states))
    step = prepare(model, states)
    pieces = [step(tokens[:, :1]), step(tokens[:, 1:2])]
    assert all(x.sums.kv is y.sums.kv for x, y in zip(step.states, states, strict=True))
    more, after = model(tokens[:, 2:4], step.states)  # makes new states
    another = prepare(model, after)
    pieces += [more, another(tokens[:, 4:5])]
    pieces.append(model(tokens[:, 5:], [state.donate() for state in another.states])[0])
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("b", [2, 9])
@torch.no_grad()
def test_it_copies_no_weight(b: int) -> None:
    """A copy would take as much memory as a large model has, and would miss that a weight changes or is replaced."""
    (model, states), tokens = begun(b, decay="learned", forget_gate=True), torch.randint(256, (b, 1))
    step = prepare(model, copies(states))
    for name, parameter in model.named_parameters():
        before = model(tokens, states)[0]
        if "attention_norm" in name:
            parameter.data = 1.5 * parameter
        else:
            parameter.mul_(1.5).add_(0.01)
        expected, states = model(tokens, states)
        assert not torch.equal(before, expected), name
        torch.testing.assert_close(step(tokens), expected, rtol=1e-4, atol=1e-4)
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(1.1 * parameter))
    torch.testing.assert_close(step(tokens), model(tokens, states)[0], rtol=1e-4, atol=1e-4)


def test_the_logits_have_no_gradient_and_the_result_is_the_same_in_all_modes() -> None:
    (model, states), tokens = begun(), torch.randint(256, (2, 1))
    outside = prepare(model, copies(states))(tokens)
    assert not outside.requires_grad
    with torch.inference_mode():
        inside = prepare(model, copies(states))(tokens)
    assert torch.equal(outside, inside)


@torch.no_grad()
def test_any_number_of_threads_gives_the_same_bits() -> None:
    (model, states), tokens = begun(200, embed_dim=64), torch.randint(256, (200, 1))
    expected, _ = model(tokens, copies(states))
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        step = prepare(model, copies(states))
        found.append([step(tokens), *(state.sums.kv for state in step.states)])
    torch.testing.assert_close(found[0][0], expected, rtol=1e-4, atol=1e-5)
    assert all(map(torch.equal, 2 * found[0], found[1] + found[2]))


@pytest.mark.parametrize(
    ("tokens", "slots", "message"),
    [
        ([[0, 0], [0, 0]], None, r"tokens: got shape \(2, 2\), expected \(2, 1\)"),
        ([[0], [0], [0]], None, r"tokens: got shape \(3, 1\)"),
        ([[0.0], [0.0]], None, "tokens: got torch.float32, expected integers"),
        ([[0], [256]], None, r"tokens: got ids 0 \.\. 256, expected 0 \.\. 255"),
        ([[-1], [3]], None, r"tokens: got ids -1 \.\. 3"),
        ([[0], [0]], [1, 1], r"slots: got \[1, 1\], expected different rows 0 \.\. 1"),
        ([[0], [0]], [0, 2], r"slots: got \[0, 2\]"),
        ([[0], [0]], [-1, 0], r"slots: got \[-1, 0\]"),
        ([[0], [0]], [[0, 1]], r"slots: got shape \(1, 2\), expected \(b,\)"),
        ([[0], [0]], [0.0, 1.0], "slots: got torch.float32, expected a torch.Tensor of int64"),
        ([[0], [0]], [0], r"tokens: got shape \(2, 1\), expected \(1, 1\)"),
    ],
)
def test_wrong_tokens_and_slots_are_refused_and_nothing_is_written(tokens, slots, message: str) -> None:
    model, states = begun()
    step = prepare(model, copies(states))
    with pytest.raises(TypeError if "float" in message else ValueError, match=message):
        step(torch.tensor(tokens), slots if slots is None else torch.tensor(slots))
    assert_same_states(step.states, states)


@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_it_steps_rows_of_a_pool_and_leaves_the_others_alone(name: str) -> None:
    model, states = begun(**OPTIONS[name])
    pool = [state.reorder(torch.tensor([0, 1, 0, 1, 0])) for state in states]
    expected_pool = copies(pool)
    step = prepare(model, pool)
    for slots in ([3, 0], [4, 0, 1], [2], [], [4, 3, 2, 1, 0]):
        rows, tokens = torch.tensor(slots, dtype=torch.int64), torch.randint(256, (len(slots), 1))
        rows = rows.repeat_interleave(2)[::2]  # the same numbers, not contiguous
        idle = torch.tensor([row for row in range(5) if row not in slots], dtype=torch.int64)
        before = [state.reorder(idle) for state in copies(pool)]
        found = step(tokens, rows)
        states = [state.at(rows) for state in expected_pool]
        if slots:
            torch.testing.assert_close(found, model(tokens, states)[0], rtol=1e-4, atol=1e-4)
        for state, old in zip(pool, before, strict=True):
            torch.testing.assert_close(state.reorder(idle).tensors(), old.tensors(), rtol=0, atol=0)
    assert_same_states(pool, expected_pool)


def test_a_position_without_an_exact_angle_is_refused_and_nothing_is_written() -> None:
    model, states = begun()
    for state in states:
        state.position[1] = 2**31
    step = prepare(model, copies(states))
    with pytest.raises(ValueError, match=r"state: got positions \[.*2147483648\] and 1 more tokens"):
        step(torch.zeros(2, 1, dtype=torch.int64))
    assert_same_states(step.states, states)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention": "softmax"}, "attention in SoftmaxAttention"),
        ({"rotary": "selective"}, "a rotation with steps"),
        ({"rotary": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "max_position_embeddings": 64}}, "factor"),
        ({"qk_norm": True}, "qk_norm=True"),
        ({"rope_order": "before", "rotary": "half"}, "rope_order='before'"),
        ({"feature_map": "exp"}, "feature_map="),
        ({"feature_map": "hedgehog"}, "feature_map="),
        ({"short_conv": 9}, "9 taps, more than 8"),
        ({"head_dim": 258}, "heads of 516 numbers, more than 256"),
        ({"embed_dim": 8, "num_layers": 1, "hidden_dim": 2**16}, "vectors of more than 65535 numbers"),
    ],
    ids=str,
)  # fmt: skip
def test_options_that_it_does_not_cover_are_refused(options: dict[str, object], reason: str) -> None:
    refuse(*begun(**options), reason)


def refuse(model: nn.Module, states: States, reason: str) -> None:
    assert reason in str(why_not(model, states))
    with pytest.raises(ValueError, match="a prepared decoding step is impossible here: "):
        prepare(model, states)


class OtherLinear(nn.Linear):
    pass


def transpose(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(linear.weight.detach().T.contiguous().T)


CHANGES: dict[str, tuple[Callable[[LanguageModel], object], str]] = {
    "module": (
        lambda x: setattr(x.blocks[1].attention.q_proj, "__class__", OtherLinear),
        "kind, OtherLinear",
    ),
    "forward": (lambda model: vars(model.blocks[0]).update(forward=print), "another kind, Block"),
    "hook": (lambda model: model.norm.register_forward_hook(print), "a hook on RMSNorm"),
    "hook on a layer": (
        lambda model: model.blocks[0].attention.register_forward_hook(print),
        "a hook on LinearRoPEAttention",
    ),
    "dtype": (lambda model: model.norm.to(torch.bfloat16), "torch.bfloat16 on cpu"),
    "device": (lambda model: model.embed.to("meta"), "on meta"),
    "layout": (lambda model: transpose(model.blocks[0].feed_forward.w1), "not contiguous"),
    "backend": (lambda model: setattr(model.blocks[1].attention, "backend", "eager"), "backend='eager'"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_models_that_were_changed_are_refused(name: str) -> None:
    (model, states), (change, reason) = begun(), CHANGES[name]
    change(model)
    refuse(model, states, reason)


class Wrapper(nn.Module):
    """Passes on the attributes of the model inside it, as PEFT's models do."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.inner = model

    def __getattr__(self, name: str) -> object:
        return super().__getattr__(name) if name in ("inner", "_modules") else getattr(self.inner, name)


def test_wrappers_and_other_modules_are_refused() -> None:
    model, states = begun()
    refuse(Wrapper(model), states, "a module of another kind, Wrapper")
    refuse(model.norm, states, "a module of another kind, RMSNorm")


def test_states_that_do_not_fit_are_refused() -> None:
    model, states = begun()
    refuse(make(rotary="half"), states, "a state of ")
    erases, without_z = begun(**OPTIONS["tied erase"])
    refuse(make(feature_map="unit", normalize=False), without_z, "; without z")
    refuse(erases, prompt(make(feature_map="unit", normalize=False)), "a state of ")
    refuse(model, states[:1], "1 states for 2 blocks")
    refuse(model, [states[0], changed(states[1], position=states[1].position + 1)], "different positions")
    refuse(model, [state.at(torch.tensor([1])) for state in states], "rows of a pool")
    refuse(model, [LayerState(state.sums) for state in states], "other shapes or dtypes")
    refuse(model, [state.to(dtype=torch.float64) for state in states], "other shapes or dtypes")
    refuse(
        model, [changed(state, z=state.sums.z[:, :1].expand(-1, 4, -1)) for state in states], "not contiguous"
    )
    with torch.inference_mode():
        made_inside = prompt(model)
    refuse(model, made_inside, "inference_mode")


def test_it_is_refused_under_autocast_and_transformations_and_beside_hooks_on_all_modules() -> None:
    model, states = begun()
    with torch.autocast("cpu"):
        refuse(model, states, "autocast")
    with FlopCounterMode(display=False):
        refuse(model, states, "watches the call")
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        refuse(model, states, "a hook on ")
    finally:
        handle.remove()
    assert why_not(model, states) is None


@pytest.mark.parametrize("name", ["default", "erase, gates per feature"])
def test_generate_samples_the_same_tokens_with_and_without_it(name, monkeypatch) -> None:
    model, tokens = make(**OPTIONS[name]), torch.randint(256, (3, 5))
    step, calls = ModelStep.__call__, []
    monkeypatch.setattr(ModelStep, "__call__", lambda *x: (calls.append(x), step(*x))[1])
    fast = [torch.stack(list(generate(model, tokens, 30, temperature=t, seed=1))) for t in (0, 1)]
    assert len(calls) == 58
    monkeypatch.setattr(generation, "why_not", lambda *_: "for this test")
    ordinary = [torch.stack(list(generate(model, tokens, 30, temperature=t, seed=1))) for t in (0, 1)]
    assert all(map(torch.equal, fast, ordinary))
    assert len(calls) == 58
