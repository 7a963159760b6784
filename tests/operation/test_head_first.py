"""Tensors with heads before tokens are named where shapes give them away, and nowhere else."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import LinearAttentionState, Rotary, linear_rope_attention, linear_rope_state, state_from_sums
from linrope.operation.head_first import HINT, MANY_HEADS

B, N, H, G, D = 2, 12, 4, 2, 8


def tensors(b: int, length: int, heads: int, dim: int = D) -> Tensor:
    return torch.ones(b, length, heads, dim)


def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return linear_rope_attention(q, k, v, feature_map=None, normalize=False, **options)


RIGHT, SWAPPED = tensors(B, N, H), tensors(B, H, N)
OTHERS: dict[str, dict[str, Any]] = {
    "gates": {"log_decay": torch.zeros(B, N, H)},
    "gate of all heads": {"log_decay": torch.zeros(B, N, 1)},
    "steps": {"angle_steps": torch.zeros(B, N, H, 4)},
    "write": {"write": torch.zeros(B, N, H)},
    "mask": {"key_mask": torch.ones(B, N, dtype=torch.bool)},
    "positions": {"positions": torch.arange(N)},
    "decay": {"decay": torch.ones(H)},
    "theta": {"rotary": Rotary(D, theta=torch.ones(H, D // 2))},
    "state": {"state": state_from_sums(torch.zeros(B, H, D, D), feature_map=None)},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_head_first_tensors_beside_an_argument_in_its_right_order_are_named(options: dict[str, Any]) -> None:
    call(RIGHT, RIGHT, RIGHT, **options)
    with pytest.raises(ValueError, match=rf": (got|made) .*; {re.escape(HINT)}$"):
        call(SWAPPED, SWAPPED, SWAPPED, **options)


FEW, GROUPED = RIGHT[:, :, :2], tensors(B, G, N)
MIXED: dict[str, tuple[Tensor, Tensor, Tensor, dict[str, Any]]] = {
    "q": (SWAPPED, RIGHT, RIGHT, {}),
    "k and v": (RIGHT, SWAPPED, SWAPPED, {}),
    "v": (RIGHT, RIGHT, SWAPPED, {}),
    "all, with grouped heads": (SWAPPED, GROUPED, GROUPED, {}),
    "gates": (RIGHT, RIGHT, RIGHT, {"log_decay": torch.zeros(B, H, N)}),
    "v of more heads": (FEW, FEW, tensors(B, 2 * H, N), {}),
    "gates of more heads": (FEW, FEW, tensors(B, N, 2 * H), {"log_decay": torch.zeros(B, 2 * H, N)}),
    "all, packed": (*[tensors(1, H, N)] * 3, {"cu_seqlens": torch.tensor([0, 5, N])}),
}


@pytest.mark.parametrize(("q", "k", "v", "options"), MIXED.values(), ids=MIXED)
def test_tensors_in_different_orders_are_named(q, k, v, options) -> None:
    with pytest.raises(ValueError, match=re.escape(HINT)):
        call(q, k, v, **options)


@pytest.mark.parametrize(
    ("k", "options"),
    [(RIGHT, {"eps": -1.0}), (RIGHT, {"decay": torch.ones(H + 1)}),
     (RIGHT, {"log_decay": torch.zeros(B, N + 1, H)}), (tensors(B, N - 1, H), {}), (tensors(B, H, H), {}),
     (tensors(B, 0, H), {"positions": torch.arange(H)}), (tensors(B, N, 3), {}), (tensors(B, N, H)[0], {}),
     (tensors(B, 0, H), {"key_mask": torch.ones(B, H, dtype=torch.bool)})],
)  # fmt: skip
def test_other_errors_say_nothing_of_it(k: Tensor, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected") as error:
        call(RIGHT, k, k, **options)
    assert HINT not in str(error.value)


def test_as_many_tokens_as_value_heads_are_no_sign_of_it() -> None:
    k, v = tensors(1, H, G), tensors(1, H, H)
    with pytest.raises(ValueError, match="eps") as error:
        call(k, k, v, log_decay=torch.zeros(1, H, H), eps=-1.0)
    assert HINT not in str(error.value)


def test_more_heads_than_models_have_are_a_warning_unless_there_are_more_tokens_or_a_state() -> None:
    def state(length: int, heads: int, **options: Any) -> LinearAttentionState:
        return linear_rope_state(*[tensors(1, length, heads, 2)] * 2, **options)

    said = f"k: got 4 tokens and {MANY_HEADS + 1} heads; heads and tokens look swapped"
    with pytest.warns(UserWarning, match=said):
        state(4, MANY_HEADS + 1)
    state(4, MANY_HEADS)  # warnings are errors
    state(1, MANY_HEADS + 1, state=state(MANY_HEADS + 1, MANY_HEADS + 1))
