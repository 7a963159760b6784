"""What is found once for all calls with the same settings and shapes, and what is not."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from linrope import Rotary, linear_rope_attention
from linrope.operation import plan, positions
from tests.support.oracle import random_state, randoms


@pytest.fixture(autouse=True)
def _no_plans() -> None:
    plan.forget_plans()


def only_plan() -> plan.Plan:
    (found,) = plan.PLANS.values()
    return found


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"causal": False},
        {"key_mask": torch.tensor([[True, False, True, True, True]])},
        {"write": torch.full((1, 5, 2), 0.5)},
        {"return_state": True, "feature_map": None, "normalize": False},
    ],
    ids=lambda how: "-".join(how),
)
def test_later_calls_find_what_the_first_one_made(backend: str, how: dict[str, Any]) -> None:
    how |= {"rotary": Rotary(16)}
    for seed in range(3):
        qkv = randoms(1, 5, 2, 16, dtype=torch.float32, seed=seed)
        found = linear_rope_attention(*qkv, backend=backend, **how)
        right = linear_rope_attention(*[x.double() for x in qkv], backend="reference", **how)
        if "return_state" in how:
            assert found[1].position.tolist() == [5]
            found[1].position.zero_()  # the caller's own
            found, right = found[0], right[0]
        torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-5)
    of_backend = [x for key, x in plan.PLANS.items() if x.backend.__name__.endswith(backend)]
    assert ["positions" in x.resolved for x in of_backend] == [True]


@pytest.mark.parametrize(
    "how",
    [
        {"positions": torch.arange(3, 8)},
        {"cu_seqlens": torch.tensor([0, 2, 5])},
        {"decay": torch.tensor([0.5, 0.9])},
        {"log_decay": -torch.ones(1, 5, 2)},
        {"angle_steps": torch.ones(1, 5, 2, 8)},
        {"rotary": Rotary(16, xpos=512)},
        {"rope_order": "before"},
        {"feature_map": "softmax"},
        {
            "erase": torch.ones(1, 5, 2),
            "key_mask": torch.ones(1, 5, dtype=torch.bool),
            "feature_map": None,
            "normalize": False,
        },
        {"state": True},
    ],
    ids=lambda how: "-".join(how),
)
def test_what_depends_on_more_is_made_anew(how: dict[str, Any]) -> None:
    how = {"rotary": Rotary(16)} | how
    qkv = randoms(1, 5, 2, 16, dtype=torch.float32)
    if "state" in how:
        how["state"] = random_state(*qkv[1:], {"rotary": how["rotary"]})
        plan.forget_plans()
    linear_rope_attention(*qkv, backend="eager", **how)
    assert (only_plan().tokens, "positions" in only_plan().resolved) == (None, False)


def test_fake_tensors_leave_no_plan() -> None:
    with FakeTensorMode():
        linear_rope_attention(*torch.randn(3, 1, 5, 2, 16), backend="eager")
    assert plan.PLANS == {}


@pytest.mark.parametrize("capturing", [False, True])
def test_a_captured_graph_makes_its_own_positions(capturing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a capture writes to a GPU is there only when the graph runs."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    on_gpu: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))
    assert positions._takes_constants(on_gpu) is not capturing
