"""Loops of decoding steps in a state's own memory: the bits, errors and states of single calls."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import LinearAttentionState, LinearRoPEAttention, Rotary, linear_rope_attention
from linrope.backends import native
from linrope.operation.decoding import DecodingLoop
from tests.oracle import BACKENDS, DATA, NATIVE

B, G, H, F, E = 2, 2, 4, 8, 6
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


def data(n: int, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(n)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return [
        {
            "q": randn(B, 1, H, F).to(dtype),
            "k": randn(B, 1, G, F).to(dtype),
            "v": randn(B, 1, G, E).to(dtype),
            "log_decay": -randn(B, 1, G).abs(),
            "angle_steps": randn(B, 1, G, F // 2),
            "write": randn(B, 1, G),
        }
        for _ in range(n)
    ]


def step(
    token: dict[str, Tensor], state: LinearAttentionState | None, way: str = "plain", **more: Any
) -> tuple[Tensor, LinearAttentionState]:
    options = {"rotary": ROTARY} | WAYS[way] | more
    per_token = {name: token[name] for name in DATA if options.pop(name, False)}
    return linear_rope_attention(
        token["q"], token["k"], token["v"], state=state, return_state=True, **per_token, **options
    )


ROTARY = Rotary(F)


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


@pytest.mark.skipif(native.why_not() is not None, reason="needs the native kernels")
@torch.no_grad()
def test_from_its_second_step_on_a_loop_goes_straight_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for way in ("plain", "decay", "gates", "write", "steps", "both", "sum", "heads"):
        first, second, third, *_ = data(3)
        _, state = step(first, None, way)
        _, state = step(second, state.donate(), way)
        with monkeypatch.context() as patched:
            patched.setattr("linrope.operation.functional.attend", None)
            step(third, state.donate(), way)


@pytest.mark.skipif(native.why_not() is not None, reason="needs the native kernels")
@pytest.mark.parametrize(
    "options",
    [{"decay": "learned"}, {"decay": "spread", "forget_gate": True}],
    ids=["learned decay", "decay beside gates"],
)
@torch.no_grad()
def test_a_layer_with_its_own_decay_stays_in_the_loop(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer makes a learned decay anew for each call: the loop compares its numbers."""
    torch.manual_seed(0)
    layer, x = LinearRoPEAttention(16, 2, **options), torch.randn(2, 9, 16)
    expected = layer(x)
    y, state = layer(x[:, :5], return_state=True)
    for t in range(5, 9):
        y, state = layer(x[:, t : t + 1], state=state.donate(), return_state=True)
        torch.testing.assert_close(y, expected[:, t : t + 1])
        monkeypatch.setattr("linrope.operation.functional.attend", None)  # from the second step on


@pytest.mark.parametrize("backend", [*BACKENDS, NATIVE])
@pytest.mark.parametrize("donated", [False, True])
@torch.no_grad()
def test_a_state_made_without_steps_goes_on_with_them(donated: bool, backend: str) -> None:
    # Such a state has no memory for their sum: a step in place once lost it.
    tokens = data(4)
    _, state = step(tokens[0], None, backend=backend)
    for token in tokens[1:]:
        out, state = step(token, state.donate() if donated else state, "steps", backend=backend)
    whole: dict[str, Tensor] = {name: torch.cat([x[name] for x in tokens], 1) for name in tokens[0]}
    whole["angle_steps"][:, 0] = 0
    expected = linear_rope_attention(
        whole["q"], whole["k"], whole["v"], angle_steps=whole["angle_steps"], rotary=ROTARY
    )
    torch.testing.assert_close(out, expected[:, -1:])


@torch.no_grad()
def test_a_pool_made_without_steps_refuses_them() -> None:
    tokens = data(2)
    _, pool = step(tokens[0], None)
    with pytest.raises(ValueError, match="state: got rows of a pool made without angle_steps"):
        step(tokens[1], pool.at(torch.arange(B)), "steps")


@pytest.mark.skipif(native.why_not() is not None, reason="needs the native kernels")
@pytest.mark.parametrize(
    "change",
    [
        {"rotary": None},
        {"feature_map": "relu"},
        {"normalize": False},
        {"eps": 10.0},
        {"decay": torch.tensor([0.5, 0.25])},
        {"log_decay": True},
        {"key_mask": torch.tensor([[True], [False]])},
        {"positions": torch.tensor([50])},
        {"backend": "eager"},
    ],
    ids=lambda change: next(iter(change)),
)
@torch.no_grad()
def test_what_a_loop_changes_is_seen(change: dict[str, Any]) -> None:
    first, second, third, *_ = data(3)
    _, state = step(first, None)
    _, state = step(second, state.donate())
    copied = state.clone()
    try:
        expected, after = step(third, copied, **change)
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

    first, second, third, *_ = data(3)
    _, state = step(first, None, decay=decay)
    _, state = step(second, state.donate(), decay=decay)
    for x in (0.5, 0.75):
        write(x)
        expected, _ = step(third, state.clone(), decay=decay)
        out, state = step(third, state.donate(), decay=decay)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
    write(2)
    with pytest.raises(ValueError, match="decay: got"):
        step(third, state.donate(), decay=decay)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("q, k, v", lambda t: t | {"v": t["v"].double()}),
        ("k, v", lambda t: t | {"v": t["v"][:1]}),
        ("q, k", lambda t: t | {"q": t["q"][..., :4]}),
        ("k", lambda t: t | {"q": t["q"][:, :, :3]}),
        ("q", lambda t: t | {"q": None}),
        ("q", lambda t: t | {"q": [1.0]}),
        ("log_decay", lambda t: t | {"log_decay": -t["log_decay"]}),
        ("log_decay", lambda t: t | {"log_decay": t["log_decay"][:, :, :1, None]}),
        ("angle_steps", lambda t: t | {"angle_steps": t["angle_steps"][..., :2]}),
    ],
)
@torch.no_grad()
def test_a_bad_token_is_refused_as_elsewhere_and_changes_nothing(argument: str, change: Any) -> None:
    first, second, third, *_ = data(3)
    gated = {"log_decay": True, "angle_steps": True}
    _, state = step(first, None, **gated)
    _, state = step(second, state.donate(), **gated)
    before = state.clone()
    with pytest.raises((TypeError, ValueError), match=rf"^{argument}: got"):
        step(change(third), state.donate(), **gated)
    assert_equal(state, before)
    state.position.fill_(2**31)
    with pytest.raises(ValueError, match="state: got positions"):
        step(third, state.donate(), **gated)
    assert int(state.position[0]) == 2**31


@torch.no_grad()
def test_tokens_that_are_not_dense_go_the_ordinary_way() -> None:
    first, second, third, *_ = data(3)
    _, state = step(first, None)
    _, state = step(second, state.donate())
    strided = third | {"q": third["q"].repeat_interleave(2, -1)[..., ::2]}
    expected, _ = step(third, state.clone())
    out, _ = step(strided, state.donate())
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_calls_with_gradients_are_no_steps_of_a_loop() -> None:
    first, second, third, *_ = data(3)
    with torch.no_grad():
        _, state = step(first, None)
        _, state = step(second, state.donate())
    third["q"].requires_grad_()
    out, _ = step(third, state.donate())
    out.sum().backward()
    assert third["q"].grad is not None


@torch.no_grad()
def test_copies_of_a_state_start_afresh() -> None:
    first, second, *_ = data(2)
    _, state = step(first, None)
    _, state = step(second, state.donate())
    assert isinstance(state.loop, DecodingLoop) == (native.why_not() is None)
    for other in (state.clone(), copy.deepcopy(state), state.reorder(torch.tensor([1, 0]))):
        assert other.loop is None
