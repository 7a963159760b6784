"""Loops of decoding steps in a state's own memory: the bits, errors and states of single calls."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.utils import _apply_to_tensors

from linrope import LinearAttentionState, LinearRoPEAttention, Rotary, linear_rope_attention
from linrope.backends import native
from linrope.operation import plan
from tests.support.oracle import BACKENDS, DATA, NATIVE

B, G, H, F, E = 2, 2, 4, 8, 6
ROTARY = Rotary(F)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"decay": torch.tensor([0.9, 0.99])},
    "gates": {"log_decay": True},
    "write": {"log_decay": True, "write": True, "normalize": False},
    "steps": {"angle_steps": True},
    "both": {"log_decay": True, "angle_steps": True, "rotary": None, "feature_map": "relu2"},
    "sum": {"decay": torch.tensor([0.9, 0.99]), "log_decay": True, "eps_mode": "add"},
    "heads": {"rotary": Rotary(F, theta=torch.rand(G, F // 2)), "normalize": False},
    "mapped": {"feature_map": "exp"},
    "bidirectional": {"causal": False},
}


SHAPES = {"q": (H, F), "k": (G, F), "v": (G, E), "log_decay": (G,), "angle_steps": (G, F // 2), "write": (G,)}
needs_native = pytest.mark.skipif(native.why_not() is not None, reason="needs the native kernels")


def data(n: int) -> list[dict[str, Tensor]]:
    generator, tokens = torch.Generator().manual_seed(n), []
    for _ in range(n):
        tokens.append({name: torch.randn(B, 1, *x, generator=generator) for name, x in SHAPES.items()})
        tokens[-1]["log_decay"].abs_().neg_()
    return tokens


def step(
    token: dict[str, Tensor], state: LinearAttentionState | None, way: str = "plain", **more: Any
) -> tuple[Tensor, LinearAttentionState]:
    options = {"rotary": ROTARY} | WAYS[way] | more
    own = {name: token[name] for name in DATA if options.pop(name, False)}
    own |= {name: token[name] for name in "qkv"}
    return linear_rope_attention(**own, state=state, return_state=True, **options)


def in_a_loop(way: str = "plain", **more: Any) -> tuple[dict[str, Tensor], LinearAttentionState]:
    """The third token of a decoding loop, and the loop's state after two."""
    first, second, third = data(3)
    with torch.no_grad():
        _, state = step(first, None, way, **more)
        return third, step(second, state.donate(), way, **more)[1]


def assert_equal(a: LinearAttentionState, b: LinearAttentionState) -> None:
    for (name, x), y in zip(a.tensors().items(), b.tensors().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("backend", [*BACKENDS, NATIVE])
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_a_loop_has_the_bits_of_calls_that_copy_the_state(way: str, backend: str) -> None:
    first, *rest = data(6)
    _, state = step(first, None, way, backend=backend)
    state.position.add_(torch.tensor([0, 1000]))
    moving = state.clone()
    for token in rest:
        expected, state = step(token, state, way, backend=backend)
        out, moving = step(token, moving.donate(), way, backend=backend)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        assert_equal(moving, state)


@needs_native
@pytest.mark.parametrize("way", ["plain", "decay", "gates", "write", "steps", "both", "sum", "heads"])
@torch.no_grad()
def test_from_its_second_step_on_a_loop_goes_straight_to_the_kernel(way, monkeypatch) -> None:
    third, state = in_a_loop(way)
    monkeypatch.setattr("linrope.operation.attend._attend", None)
    step(third, state.donate(), way)
    step(third, state, way)  # a new state, too
    step(third, state.at(torch.tensor([1, 0])), way)


@needs_native
@pytest.mark.parametrize("options", [{"decay": "learned"}, {"decay": "spread", "forget_gate": True}], ids=str)
@torch.no_grad()
def test_a_layer_with_its_own_decay_stays_in_the_loop(options, monkeypatch) -> None:
    """The layer makes a learned decay anew for each call."""
    torch.manual_seed(0)
    layer, x = LinearRoPEAttention(16, 2, **options), torch.randn(2, 9, 16)
    expected = layer(x)
    y, state = layer(x[:, :5], return_state=True)
    for t in range(5, 9):
        y, state = layer(x[:, t : t + 1], state=state.donate(), return_state=True)
        torch.testing.assert_close(y, expected[:, t : t + 1])
        monkeypatch.setattr("linrope.operation.attend._attend", None)  # from the second step on


@pytest.mark.parametrize("backend", [*BACKENDS, NATIVE])
@pytest.mark.parametrize("donated", [False, True])
@torch.no_grad()
def test_a_state_made_without_steps_goes_on_with_them(donated: bool, backend: str) -> None:
    # Such a state has no memory for their sum: a step in place once lost it.
    tokens = data(4)
    _, state = step(tokens[0], None, backend=backend)
    for token in tokens[1:]:
        out, state = step(token, state.donate() if donated else state, "steps", backend=backend)
    tokens[0]["angle_steps"].zero_()
    whole = {name: torch.cat([x[name] for x in tokens], 1) for name in ("q", "k", "v", "angle_steps")}
    torch.testing.assert_close(out, linear_rope_attention(**whole, rotary=ROTARY)[:, -1:])


@torch.no_grad()
def test_a_pool_made_without_steps_refuses_them() -> None:
    token, pool = in_a_loop()
    with pytest.raises(ValueError, match="state: got rows of a pool made without angle_steps"):
        step(token, pool.at(torch.arange(B)), "steps")


CHANGES: dict[str, Any] = {
    "rotary": None, "feature_map": "relu", "normalize": False, "eps": 10.0, "decay": torch.tensor([0.5, 0.25]),
    "log_decay": True, "key_mask": torch.tensor([[True], [False]]), "positions": torch.tensor([50]), "backend": "eager",
}  # fmt: skip


@needs_native
@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_what_a_loop_changes_is_seen(name: str) -> None:
    (third, state), change = in_a_loop(), {name: CHANGES[name]}
    try:
        expected, after = step(third, state.clone(), **change)
    except ValueError as error:  # another rotation or map: the state is refused
        with pytest.raises(ValueError, match=re.escape(str(error))):
            step(third, state.donate(), **change)
        return
    out, state = step(third, state.donate(), **change)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(state.kv, after.kv)


@pytest.mark.parametrize("made_by", ["torch", "numpy", "inference mode"])
@pytest.mark.parametrize("written_by", ["fill_", "data", "numpy"])
@torch.no_grad()
def test_a_decay_written_to_between_steps_is_seen(written_by: str, made_by: str) -> None:
    decay = torch.tensor([0.9, 0.99])
    if made_by == "numpy":
        decay = torch.from_numpy(decay.numpy().copy())
    if made_by == "inference mode":
        with torch.inference_mode():
            decay = decay.clone()

    def write(x: float) -> None:  # torch counts the first kind of writes alone
        with torch.inference_mode(decay.is_inference()):
            {"fill_": decay.fill_, "data": decay.data.fill_, "numpy": decay.numpy().fill}[written_by](x)

    third, state = in_a_loop(decay=decay)
    for x in (0.5, 0.75):
        write(x)
        expected, _ = step(third, state.clone(), decay=decay)
        out, state = step(third, state.donate(), decay=decay)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
    write(1.001)
    with pytest.raises(ValueError, match="decay: got"):
        step(third, state.donate(), decay=decay)


@pytest.mark.parametrize(
    ("named", "name", "change"),
    [("q, k, v", "v", lambda x: x.double()), ("k, v", "v", lambda x: x[:1]), ("q, k", "q", lambda x: x[..., :4]),
     ("k", "q", lambda x: x[:, :, :3]), ("q", "q", lambda x: None), ("q", "q", lambda x: [1.0]),
     ("log_decay", "log_decay", lambda x: -x), ("log_decay", "log_decay", lambda x: x[:, :, :1, None]),
     ("angle_steps", "angle_steps", lambda x: x[..., :2])],
)  # fmt: skip
@torch.no_grad()
def test_a_bad_token_is_refused_as_elsewhere_and_changes_nothing(named: str, name: str, change: Any) -> None:
    gated = {"log_decay": True, "angle_steps": True}
    third, state = in_a_loop(**gated)
    before = state.clone()
    with pytest.raises((TypeError, ValueError), match=rf"^{named}: got"):
        step(third | {name: change(third[name])}, state.donate(), **gated)
    assert_equal(state, before)
    state.position.fill_(2**31)
    with pytest.raises(ValueError, match="state: got positions"):
        step(third, state.donate(), **gated)
    assert int(state.position[0]) == 2**31


@torch.no_grad()
def test_tokens_that_are_not_dense_go_the_ordinary_way() -> None:
    third, state = in_a_loop()
    expected, _ = step(third, state.clone())
    out, _ = step(third | {"q": third["q"].repeat_interleave(2, -1)[..., ::2]}, state.donate())
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_calls_with_gradients_are_no_steps_of_a_loop() -> None:
    third, state = in_a_loop()
    third["q"].requires_grad_()
    out, _ = step(third, state.donate())
    out.sum().backward()
    assert third["q"].grad is not None


@torch.no_grad()
def test_the_state_of_a_step_keeps_its_own_tensors_when_it_is_cast() -> None:
    third, state = in_a_loop()
    _, after = step(third, state)
    assert_equal(_apply_to_tensors(lambda x: x.bfloat16() if x.is_floating_point() else x, after), after)


@pytest.mark.parametrize(("name", "good", "bad"), [("normalize", True, 1), ("eps", 1.0, True)])
def test_a_plan_serves_no_setting_of_another_type(name: str, good: Any, bad: Any) -> None:
    token, _ = in_a_loop()
    step(token, None, **{name: good})
    with pytest.raises(TypeError, match=f"{name}="):
        step(token, None, **{name: bad})


@needs_native
@torch.no_grad()
def test_plans_that_were_forgotten_are_made_again() -> None:
    third, state = in_a_loop()
    expected, _ = step(third, state.clone())
    plan.forget_plans()
    torch.testing.assert_close(step(third, state)[0], expected)
