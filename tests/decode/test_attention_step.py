"""Prepared steps of the operation: the numbers of ordinary calls, in the same memory, and what they refuse."""

from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import LinearRoPEAttention, Rotary, linear_rope_attention, linear_rope_state
from linrope.backends import native
from linrope.decode import prepare_attention

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason="needs the native kernels")
B, G, H, F, E = 2, 2, 4, 8, 6
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no map, no normalizer": {"feature_map": None, "normalize": False},
    "decay": {"decay": torch.tensor([0.9, 0.99])},
    "gates and write": {"log_decay": True, "write": True, "eps_mode": "add"},
    "erase": {"feature_map": None, "normalize": False, "log_decay": True, "write": True, "erase": True},
    "gates of units": {"decay": torch.tensor([0.9, 0.99]), "log_decay": "per unit"},
    "gates of units, erase": {
        "feature_map": None,
        "normalize": False,
        "log_decay": "per unit",
        "erase": True,
    },
    "decay, gates and steps": {"decay": torch.tensor([0.9, 0.99]), "log_decay": True, "angle_steps": True},
}
SHAPES = {
    "q": (H, F), "k": (G, F), "v": (G, E), "log_decay": (G,), "angle_steps": (G, F // 2), "write": (G,), "erase": (G,),
    "gates per unit": (G, F // 2),
}  # fmt: skip


def tokens(n: int, way: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    numbers = {name: torch.randn(B, n, *shape, generator=generator) for name, shape in SHAPES.items()}
    for gates in ("log_decay", "gates per unit"):
        numbers[gates].abs_().neg_()
    if WAYS[way].get("log_decay") == "per unit":
        numbers["log_decay"] = numbers["gates per unit"]
    return {name: x.to(dtype) for name, x in numbers.items() if name in ("q", "k", "v") or name in WAYS[way]}


def fixed(way: str) -> dict[str, Any]:
    return {"rotary": Rotary(F)} | {
        name: x for name, x in WAYS[way].items() if x is not True and name != "log_decay"
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_steps_have_the_bits_of_calls_in_the_state_s_memory(way: str, dtype: torch.dtype) -> None:
    given = tokens(9, way, dtype)
    prompt, rest = ({name: x[:, a:b] for name, x in given.items()} for a, b in ((0, 4), (4, 9)))
    _, state = linear_rope_attention(**prompt, **fixed(way), return_state=True)
    expected, step = state.clone(), prepare_attention(state, **fixed(way))
    for t in range(5):
        token = {name: x[:, t : t + 1] for name, x in rest.items()}
        out, expected = linear_rope_attention(**token, **fixed(way), state=expected, return_state=True)
        torch.testing.assert_close(step(**token), out, rtol=0, atol=0)
    assert step.state is state
    for name, x in expected.tensors().items():
        torch.testing.assert_close(state.tensors()[name], x, rtol=0, atol=0)


@torch.no_grad()
def test_what_does_not_fit_is_refused_and_nothing_is_written() -> None:
    way = "decay, gates and steps"
    given = tokens(5, way)
    _, state = linear_rope_attention(**given, **fixed(way), return_state=True)
    before, step = state.clone(), prepare_attention(state, **fixed(way))
    token = {name: x[:, :1] for name, x in given.items()}
    for change, error in (
        ({"v": token["v"][:1]}, "k, v: got"),
        ({"log_decay": -token["log_decay"]}, "log_decay: got up to"),
        ({"angle_steps": token["angle_steps"][..., :1]}, "angle_steps: got"),
    ):
        with pytest.raises(ValueError, match=error):
            step(**(token | change))
    for name, x in before.tensors().items():
        torch.testing.assert_close(state.tensors()[name], x, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [({"rotary": None}, ValueError, "state: made with"), ({"feature_map": "exp"}, ValueError, "state: made with"),
     ({"decay": torch.tensor([0.5, 2.0])}, ValueError, "decay: got"), ({"eps": 0.0}, ValueError, "eps=0.0"),
     ({"decay": torch.ones(3)}, ValueError, "decay: got shape")],
)  # fmt: skip
def test_options_are_checked_once(options: dict[str, Any], error: type[Exception], said: str) -> None:
    _, state = linear_rope_attention(**tokens(5, "plain"), rotary=Rotary(F), return_state=True)
    with pytest.raises(error, match=said):
        prepare_attention(state, **({"rotary": Rotary(F)} | options))


def test_a_state_of_another_kind_is_refused_by_its_kind() -> None:
    _, state = LinearRoPEAttention(8, 2)(torch.randn(1, 3, 8), return_state=True)
    with pytest.raises(TypeError, match=r"^state: got LayerState, expected LinearAttentionState$"):
        prepare_attention(state)


def test_what_takes_ordinary_calls_is_named() -> None:
    given = tokens(5, "plain")
    _, state = linear_rope_attention(**given, feature_map="exp", return_state=True)
    with pytest.raises(ValueError, match="a prepared step is impossible here"):
        prepare_attention(state, feature_map="exp")
    _, state = linear_rope_attention(**given, return_state=True)
    with pytest.raises(ValueError, match="state: got rows of a pool"):
        prepare_attention(state.at(torch.tensor([1])))
    with pytest.raises(RuntimeError, match="float64"):
        prepare_attention(state.to(dtype=torch.float64))


def test_a_state_takes_erase_in_every_step_or_in_none() -> None:
    keys_and_values, token = torch.randn(2, 1, 3, G, F), torch.randn(1, 1, G, F)
    how: dict[str, Any] = {"feature_map": None, "normalize": False}
    with pytest.raises(ValueError, match="z: got a tensor with erase, expected none"):
        prepare_attention(linear_rope_state(*keys_and_values, feature_map=None), **how)(
            token, token, token, erase=torch.ones(1, 1, G)
        )
    erased = linear_rope_state(*keys_and_values, feature_map=None, erase=torch.ones(1, 3, G))
    with pytest.raises(ValueError, match="erase: got None for a state without z"):
        prepare_attention(erased, **how)(token, token, token)
