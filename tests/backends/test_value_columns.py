"""Values cut by columns, so that every thread has a task, have the bits of whole ones."""

from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import LinearAttentionState, Rotary, linear_rope_attention
from linrope.backends import native, steady, value_columns
from linrope.recurrence.call import Call
from tests.support.oracle import randoms

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
N, F, E = 300, 8, 64
PACKED = {"cu_seqlens": torch.tensor([0, 120, 120, 300])}


def tokens(b: int, heads: int, g: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    q, k, _ = randoms(b, N, heads, F, dtype=dtype)
    v, generator = randoms(b, N, g, E, dtype=dtype)[2], torch.Generator().manual_seed(1)
    gates = {name: torch.rand(b, N, g, generator=generator) for name in ("erase", "write", "log_decay")}
    gates["log_decay"] = -gates["log_decay"] / 4
    theta = torch.rand(g, F // 2, generator=generator).double()
    how = {"feature_map": "unit", "normalize": False, "rotary": Rotary(F, theta=theta if g > 1 else theta[0])}
    return {"q": q, "k": k, "v": v} | gates | how


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a call was cut, for 16 threads."""
    found: list[int] = []

    def parts_of(call: Call) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "get_num_threads", lambda: 16)
            found.append(value_columns.parts_of(call))
        return found[-1]

    for module in (native, steady):
        monkeypatch.setattr(module, "parts_of", parts_of)
    return found


def whole(monkeypatch: pytest.MonkeyPatch, call: Any) -> Any:
    with monkeypatch.context() as patch:
        for module in (native, steady):
            patch.setattr(module, "parts_of", lambda call: 1)
        return call()


def equal(one: LinearAttentionState, other: LinearAttentionState) -> None:
    for name, x in one.tensors().items():
        assert torch.equal(x, other.tensors()[name]), name


CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "one head": (1, 1, 1, {}),
    "two rows": (2, 2, 2, {}),
    "more value heads": (1, 1, 3, {}),
    "packed": (1, 2, 2, PACKED),
    "masked": (1, 2, 2, {"key_mask": torch.arange(N)[None] % 7 > 0}),
    "bfloat16": (1, 2, 2, {"dtype": torch.bfloat16}),
}


@pytest.mark.parametrize("case", CASES)
def test_bits_do_not_depend_on_the_cut(case: str, cuts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    b, heads, g, more = CASES[case]
    options = dict(more)
    inputs = tokens(b, heads, g, options.pop("dtype", torch.float32)) | options
    steps = torch.rand(b, N, g, F // 2, generator=torch.Generator().manual_seed(2))
    inputs |= {"angle_steps": steps, "return_state": True}

    def call(state: LinearAttentionState | None = None) -> tuple[Tensor, LinearAttentionState]:
        return linear_rope_attention(**inputs, state=state)  # type: ignore[return-value]

    out, state = call()
    expected, expected_state = whole(monkeypatch, call)
    assert torch.equal(out, expected)
    equal(state, expected_state)
    later = call(state)
    expected, expected_state = whole(monkeypatch, lambda: call(state))
    assert torch.equal(later[0], expected)
    equal(later[1], expected_state)
    assert cuts == [2, 1, 2, 1]  # the parts of a call are asked, too


def test_rows_of_a_pool(cuts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tokens(2, 1, 1) | {"return_state": True}
    twice = {
        name: x.repeat(2, *[1] * (x.ndim - 1)) if isinstance(x, Tensor) else x for name, x in inputs.items()
    }
    pool: LinearAttentionState = linear_rope_attention(**twice)[1]
    equal(pool, whole(monkeypatch, lambda: linear_rope_attention(**twice))[1])
    other, slots = pool.clone(), torch.tensor([3, 0])
    out, _ = linear_rope_attention(**inputs, state=pool.at(slots))
    expected, _ = whole(monkeypatch, lambda: linear_rope_attention(**inputs, state=other.at(slots)))
    assert torch.equal(out, expected)
    equal(pool, other)
    assert cuts == [2, 2, 1, 2, 1]  # a call without a state is asked before it becomes that of a backend


@pytest.mark.parametrize(
    "change", [{"q": 4}, {"tokens": 255}, {"heads": 9}, {"units": True}, {"grad": True}], ids=str
)
def test_other_calls_stay_whole(change: dict[str, Any], cuts: list[int]) -> None:
    heads = change.get("heads", 1)
    inputs = tokens(1, heads, heads)
    if "q" in change:
        inputs["q"] = inputs["q"].repeat(1, 1, 4, 1)
    if "tokens" in change:
        inputs = {name: x[:, :255] if isinstance(x, Tensor) else x for name, x in inputs.items()}
    if "units" in change:
        inputs["log_decay"] = inputs["log_decay"][..., None].repeat(1, 1, 1, F // 2)
    inputs["v"].requires_grad_("grad" in change)
    linear_rope_attention(**inputs)
    assert cuts in ([], [1])
