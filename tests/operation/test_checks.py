"""Decay, packing, grids and orders: bad ones are refused by name, odd ones work."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import LinearRoPEAttention, Rotary, feature_maps, linear_rope_attention
from tests.oracle import BACKENDS, everything, random_state, randoms

N, G, D = 5, 2, 4


def attend(b: int = 1, **change: Any) -> Any:
    q, k, v = randoms(b, N, G, D, m=change.pop("m", N))
    return linear_rope_attention(q, k, v, **change)


def cu(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def with_state(**change: Any) -> Any:
    _, k, v = randoms(1, N, G, D)
    return attend(state=random_state(k, v, {}, position=100), **change)


FADING: dict[str, Any] = {"decay": torch.full((G,), 0.5)}
GRID: dict[str, Any] = {"rotary": Rotary.axial(D, 2)}

REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # log_decay and angle_steps
    **{
        f"log_decay of shape {shape}": (
            lambda shape=shape: attend(log_decay=torch.zeros(shape)),
            ValueError,
            f"log_decay: got shape {shape}, expected (b or 1, n, g or 1) = (1, 5, 2)",
        )
        for shape in ((1, N), (1, N, G, 1), (2, N, G), (1, N + 1, G), (1, 1, G), (1, N, 3))
    },
    **{
        f"angle_steps of shape {shape}": (
            lambda shape=shape: attend(angle_steps=torch.zeros(shape)),
            ValueError,
            f"angle_steps: got shape {shape}, expected (b or 1, n, g or 1, pairs) with b, n, g = (1, 5, 2)",
        )
        for shape in ((1, N, G), (1, N, G, 2, 1), (2, N, G, 2), (1, N - 1, G, 2), (1, N, 3, 2))
    },
    "log_decay > 0": (lambda: attend(log_decay=torch.full((1, N, G), 0.5)), ValueError, "got up to 0.5, exp"),
    "log_decay without time": (
        lambda: attend(log_decay=torch.zeros(1, N, G), causal=False),
        ValueError,
        "log_decay: got causal=False, expected causal=True",
    ),
    "too many pairs": (
        lambda: attend(angle_steps=torch.zeros(1, N, G, 3)),
        ValueError,
        "angle_steps: got 3 pairs, expected 2",
    ),
    "fewer pairs than the rotation has": (
        lambda: attend(angle_steps=torch.zeros(1, N, G, 1), rotary=Rotary(D)),
        ValueError,
        "angle_steps: got 1 pairs, expected 2",
    ),
    "no pairs": (
        lambda: attend(angle_steps=torch.zeros(1, N, G, 0)),
        ValueError,
        "angle_steps: got 0 pairs, expected 2",
    ),
    "steps of other keys": (
        lambda: attend(angle_steps=torch.zeros(1, N + 1, G, 2), m=N + 1, causal=False),
        ValueError,
        "angle_steps: got 5 queries and 6 keys",
    ),
    "steps beside xPos": (
        lambda: attend(angle_steps=torch.zeros(1, N, G, 2), rotary=Rotary(D, xpos=20.0)),
        ValueError,
        "angle_steps: got them beside xpos=20.0",
    ),
    # decay
    "a number as decay": (lambda: attend(decay=0.9), TypeError, "decay: got float, expected a floating-"),
    "integers as decay": (lambda: attend(decay=cu(1, 1)), TypeError, "decay: got torch.int32, expected a fl"),
    "decay for other heads": (lambda: attend(decay=torch.ones(3)), ValueError, "decay: got shape (3,), ex"),
    "decay of rank 2": (lambda: attend(decay=torch.ones(1, G)), ValueError, "decay: got shape (1, 2), exp"),
    "decay elsewhere": (lambda: attend(decay=torch.ones(G, device="meta")), ValueError, "got device meta"),
    "decay without time": (
        lambda: attend(causal=False, **FADING),
        ValueError,
        "decay: got causal=False, expected causal=True",
    ),
    **{
        f"decay of {number}": (
            lambda number=number: attend(decay=torch.tensor([0.5, number])),
            ValueError,
            "expected numbers in (0, 1]",
        )
        for number in (0.0, -0.5, 1.001, float("nan"), float("inf"))
    },
    "decay on a grid": (
        lambda: attend(positions=torch.zeros(N, 2).long(), **GRID, **FADING),
        ValueError,
        "decay: got a rotation with axes=2, expected one with axes=None",
    ),
    "decay with positions of keys": (
        lambda: attend(key_positions=torch.arange(N), **FADING),
        ValueError,
        "key_positions: got them beside keys that decay",
    ),
    "falling positions": (
        lambda: attend(positions=torch.tensor([0, 1, 3, 2, 4]), **FADING),
        ValueError,
        "positions: got decreasing ones",
    ),
    "positions behind the state": (
        lambda: with_state(positions=torch.arange(98, 103), **FADING),
        ValueError,
        "positions: got decreasing ones",
    ),
    "falling positions of a packed sequence": (
        lambda: attend(positions=torch.tensor([5, 9, 0, 3, 1]), cu_seqlens=cu(0, 2, N), **FADING),
        ValueError,
        "positions: got decreasing ones",
    ),
    "xpos without time": (
        lambda: attend(causal=False, rotary=Rotary(D, xpos=9.0)),
        ValueError,
        "rotary: got xpos=9.0, expected causal=True and rope_order='after'",
    ),
    "xpos before the map": (
        lambda: attend(rope_order="before", rotary=Rotary(D, xpos=9.0)),
        ValueError,
        "rotary: got xpos=9.0, expected causal=True and rope_order='after'",
    ),
    # packing
    "list as cu_seqlens": (lambda: attend(cu_seqlens=[0, N]), TypeError, "cu_seqlens: got list, exp"),
    "float cu_seqlens": (
        lambda: attend(cu_seqlens=torch.tensor([0.0, N])),
        TypeError,
        "cu_seqlens: got torch.float32, expected int32 or int64",
    ),
    "cu_seqlens of rank 2": (lambda: attend(cu_seqlens=cu(0, N)[None]), ValueError, "got shape (1, 2), exp"),
    "one entry": (lambda: attend(cu_seqlens=cu(0)), ValueError, "got shape (1,), expected (sequences + 1,)"),
    "cu_seqlens elsewhere": (
        lambda: attend(cu_seqlens=cu(0, N).to("meta")),
        ValueError,
        "cu_seqlens: got device meta, expected cpu",
    ),
    "packed batches": (lambda: attend(2, cu_seqlens=cu(0, N)), ValueError, "cu_seqlens: got batch 2, expect"),
    "packed cross-attention": (
        lambda: attend(m=3, causal=False, cu_seqlens=cu(0, N)),
        ValueError,
        "cu_seqlens: got 5 queries and 3 keys, expected equal numbers",
    ),
    **{
        f"cu_seqlens {numbers}": (
            lambda numbers=numbers: attend(cu_seqlens=cu(*numbers)),
            ValueError,
            f"cu_seqlens: got {list(numbers)}, expected numbers that rise from 0 to the length, 5",
        )
        for numbers in ((1, N), (0, 3, 2, N), (0, 4), (0, 6), (0, -1, N), (-1, N))
    },
    "a state for other sequences": (
        lambda: with_state(cu_seqlens=cu(0, 2, N)),
        ValueError,
        "state: got kv of shape (1, 2, 4, 4), expected (b, g, f, e) = (2, 2, 4, 4)",
    ),
    # grids
    "no coordinates": (lambda: attend(**GRID), ValueError, "positions: got None, expected coordinates"),
    "one coordinate": (
        lambda: attend(positions=torch.arange(N), **GRID),
        ValueError,
        "positions: got shape (5,), expected (5, 2) or (1, 5, 2)",
    ),
    "three coordinates": (
        lambda: attend(positions=torch.zeros(1, N, 3).long(), **GRID),
        ValueError,
        "positions: got shape (1, 5, 3), expected (5, 2) or (1, 5, 2)",
    ),
    "keys without coordinates": (
        lambda: attend(m=3, causal=False, positions=torch.zeros(N, 2).long(), **GRID),
        ValueError,
        "key_positions: got None, expected coordinates",
    ),
    "a map of positions on a grid": (
        lambda: attend(
            positions=torch.zeros(N, 2).long(), rotary=Rotary.axial(2 * D, 2),
            feature_map=feature_maps.make("cosformer", D, max_length=9),
        ),
        ValueError,
        "expected one with axes=None",
    ),
    # names
    "another order": (
        lambda: attend(rope_order="between"),
        ValueError,
        "rope_order='between': expected one of after, before",
    ),
    "a rotation of features before the map": (
        lambda: attend(
            rope_order="before", rotary=Rotary(2 * D), feature_map=feature_maps.make("dpfp", D, nu=1)
        ),
        ValueError,
        "rotary: got dim=8, expected the head dim, 4",
    ),
    "a learned map by name": (
        lambda: attend(feature_map="hedgehog"),
        ValueError,
        "feature_map='hedgehog': it has weights or a projection of its own; expected the object",
    ),
    # the layer
    "decay of the layer, by another name": (
        lambda: LinearRoPEAttention(8, 2, decay="retnot"),
        ValueError,
        "decay='retnot': expected one of spread, learned, retnet, 2 numbers, or None; did you mean 'retnet'?",
    ),
    "too few numbers": (
        lambda: LinearRoPEAttention(8, 2, decay=[0.5]),
        ValueError,
        "decay: got [0.5], expected 2 numbers in (0, 1]",
    ),
    "a decay above 1": (
        lambda: LinearRoPEAttention(8, 2, decay=[0.5, 1.5]),
        ValueError,
        "decay: got [0.5, 1.5], expected 2 numbers in (0, 1]",
    ),
    "a map without a name": (
        lambda: LinearRoPEAttention(8, 2, feature_map={"nu": 3}),
        ValueError,
        "feature_map={'nu': 3}: expected the key 'name'",
    ),
    "another order in the layer": (
        lambda: LinearRoPEAttention(8, 2, rope_order="between"),
        ValueError,
        "rope_order='between': expected one of after, before",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "exception", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused_with_a_message_that_says_why(
    call: Callable[[], Any], exception: type[Exception], message: str
) -> None:
    with pytest.raises(exception, match=re.escape(message)):
        call()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [True, False])
def test_empty_packed_sequences_keep_their_states(causal: bool, backend: str) -> None:
    q, k, v = randoms(1, N, G, D)
    for bounds in (cu(0, 0, N, N, N), cu(0, N), cu(0, 0, 1, 2, 3, 4, N)):
        how: dict[str, Any] = {"rotary": Rotary(D), "causal": causal, "cu_seqlens": bounds}
        how |= {"decay": FADING["decay"]} if causal else {}
        state = random_state(k, v, how)
        last = linear_rope_attention(q, k, v, state=state, return_state=True, backend=backend, **how)[1]
        empty = bounds.diff() == 0
        assert torch.equal(last.kv[empty], state.kv[empty])
        assert torch.equal(last.z[empty], state.z[empty])
        assert torch.equal(last.position, state.position + bounds.diff())


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences_of_no_tokens_at_all(backend: str) -> None:
    q, k, v = randoms(1, 0, G, D)
    results = everything(q, k, v, cu_seqlens=cu(0, 0, 0), backend=backend, **FADING)
    assert results["out"].shape == (1, 0, G, D)
    assert results["kv"].shape == (2, G, D, D)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_one_packed_sequence_stays_there(backend: str) -> None:
    q, k, v = randoms(1, N, G, D)
    how: dict[str, Any] = {"cu_seqlens": cu(0, 2, 4, N), "rotary": Rotary(D), "backend": backend}
    clean = everything(q, k, v, **how)
    k[:, 2:4] = float("nan")
    dirty = everything(q, k, v, **how)
    for name in ("out", "dq", "dk", "dv"):
        for own in (slice(0, 2), slice(4, N)):
            assert torch.equal(dirty[name][:, own], clean[name][:, own])
