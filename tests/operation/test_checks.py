"""Decay, packing, grids and orders: bad ones are refused by name, odd ones work."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from linrope import LinearRoPEAttention, Rotary, feature_maps, linear_rope_attention
from linrope.feature_maps import ELEMENTWISE
from tests.support.oracle import DATA, both_directions, every_backend, everything, random_state, randoms

N, G, D = 5, 2, 4


def attend(b: int = 1, **change: Any) -> Any:
    q, k, v = randoms(b, N, G, D, m=change.pop("m", N))
    return linear_rope_attention(q, k, v, **change)


def cu(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


def layer(**options: Any) -> LinearRoPEAttention:
    return LinearRoPEAttention(8, 2, **options)


AT_100 = random_state(*randoms(1, N, G, D)[1:], {}, position=100)
FADING: dict[str, Any] = {"decay": torch.full((G,), 0.5)}
GRID: dict[str, Any] = {"rotary": Rotary.axial(D, 2)}
XPOS = Rotary(D, xpos=9.0)
PAIRED = feature_maps.make("paired", D)
GATES_OF_SHAPES = ((1, N), (1, N, G, 1), (2, N, G), (1, N + 1, G), (1, 1, G), (1, N, 3))
# Wrong numbers of units, the right one, and the rotation that it depends on
UNITS: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (3, D, {}), (0, D, {}), (1, D, {}), (D, 2, {"rotary": Rotary(D)}), (1, 2, {"rotary": Rotary(D)}),
    (2, 3, {"rotary": Rotary(D, rotary_dim=2, layout="half")}), (D, 3, {"angle_steps": zeros(1, N, G, 1)}),
    (D, 6, {"rotary": Rotary(2 * D, rotary_dim=4), "feature_map": PAIRED}),
)  # fmt: skip
STEPS_OF_SHAPES = ((1, N, G), (1, N, G, 2, 1), (2, N, G, 2), (1, N - 1, G, 2), (1, N, 3, 2))
BOUNDS = ((1, N), (0, 3, 2, N), (0, 4), (0, 6), (0, -1, N), (-1, N))
NO_DECAY = (0.0, -0.5, 1.001, float("nan"), float("inf"))
IN_TIME = "got causal=False, expected causal=True"
FALLING = "positions: got decreasing numbers"
NO_ORDER = "rope_order='between': expected one of after, before"
IN_ORDER = "rotary: got xpos=9.0, expected causal=True and rope_order='after'"

# Arguments of a call, and what the ValueError must say.
VALUES: list[tuple[dict[str, Any], str]] = [
    # log_decay and angle_steps
    *(({"log_decay": zeros(*x)}, f"log_decay: got shape {x}, expected (b or 1, n, g or 1) = (1, 5, 2)")
      for x in GATES_OF_SHAPES),
    *(({"angle_steps": zeros(*x)},
       f"angle_steps: got shape {x}, expected (b or 1, n, g or 1, pairs) with b, n, g = (1, 5, 2)")
      for x in STEPS_OF_SHAPES),
    *(({"write": zeros(*x)}, f"write: got shape {x}, expected (b or 1, m, g or 1) = (1, 5, 2)")
      for x in GATES_OF_SHAPES),
    *(({"erase": zeros(*x)}, f"erase: got shape {x}, expected (b or 1, n, g or 1) = (1, 5, 2)")
      for x in GATES_OF_SHAPES),
    ({"erase": zeros(1, N, G)},
     "erase: got normalize=True, expected normalize=False, and keys of length 1: feature_map='unit'"),
    ({"erase": zeros(1, N, G), "normalize": False, "causal": False}, f"erase: {IN_TIME}"),
    ({"erase": zeros(1, N, G), "normalize": False, "feature_map": "unit", "rotary": XPOS},
     "rotary: got xpos=9.0 with erase"),
    *(({"erase": zeros(1, N, G), "normalize": False, "feature_map": x},
       f"feature_map='{x}': its features have scales, which mean nothing with erase; expected 'unit'")
      for x in ("exp", "softmax")),
    *(({"erase": zeros(1, N, G), "normalize": False, "feature_map": x},
       f"feature_map='{x}': with erase keys must have length 1, or the state grows without bound; expected 'unit', "
       "which may have an activation, or None if q and k are features already, with keys of length 1")
      for x in ELEMENTWISE if x != "exp"),
    *(({name: zeros(1, N, G, 2).to("meta")}, f"{name}: got device meta") for name in DATA),
    *(({name: zeros(1, N + 1, G, 2)}, f"{name}: got shape (1, 6, 2, 2), expected (b or 1, ") for name in DATA),
    ({"log_decay": zeros(1, N, G) + 0.5}, "got up to 0.5, exp"),
    ({"log_decay": zeros(1, N, G), "causal": False}, f"log_decay: {IN_TIME}"),
    # log_decay per unit
    *(({"log_decay": zeros(1, N, G, units), **how}, f"= (1, 5, 2), or (1, 5, 2, {expected}): per pair that turns, then")
      for units, expected, how in UNITS),
    ({"log_decay": zeros(1, N, 3, D)}, "log_decay: got shape (1, 5, 3, 4), expected (b or 1, n, g or 1)"),
    ({"log_decay": zeros(1, N, G, D).index_fill(3, torch.tensor([2]), 0.5)}, "log_decay: got up to 0.5, exp"),
    ({"log_decay": zeros(1, N, G, D), "causal": False}, f"log_decay: {IN_TIME}"),
    ({"log_decay": zeros(1, N, G, 2), "rotary": Rotary(D), "rope_order": "before"},
     "rope_order='before': got log_decay with a last axis of units"),
    ({"angle_steps": zeros(1, N, G, 3)}, "angle_steps: got 3 pairs, expected 1 to 2"),
    ({"angle_steps": zeros(1, N, G, 1), "rotary": Rotary(D)}, "got 1 pairs, expected 2, the pairs of rotary"),
    ({"angle_steps": zeros(1, N, G, 0)}, "angle_steps: got 0 pairs, expected 1 to 2"),
    ({"angle_steps": zeros(1, N + 1, G, 2), "m": N + 1, "causal": False}, "angle_steps: got 5 queries and 6 keys"),
    ({"angle_steps": zeros(1, N, G, 2), "rotary": XPOS}, "angle_steps: got a tensor and a rotation with xpos=9.0"),
    # decay
    ({"decay": torch.ones(3)}, "decay: got shape (3,), ex"),
    ({"decay": torch.ones(1, G)}, "decay: got shape (1, 2), exp"),
    ({"decay": torch.ones(G, device="meta")}, "got device meta"),
    ({"causal": False, **FADING}, f"decay: {IN_TIME}"),
    *(({"decay": torch.tensor([0.5, x])}, "expected numbers in (0, 1]") for x in NO_DECAY),
    ({"positions": zeros(N, 2).long(), **GRID, **FADING},
     "decay: got a rotation with axes=2, expected one with axes=None"),
    ({"key_positions": torch.arange(N), **FADING}, "key_positions: got a tensor, expected None with decay"),
    ({"positions": torch.tensor([0, 1, 3, 2, 4]), **FADING}, FALLING),
    ({"positions": torch.arange(98, 103), "state": AT_100, **FADING}, FALLING),
    ({"positions": torch.tensor([5, 9, 0, 3, 1]), "cu_seqlens": cu(0, 2, N), **FADING}, FALLING),
    ({"causal": False, "rotary": XPOS}, IN_ORDER),
    ({"rope_order": "before", "rotary": XPOS}, IN_ORDER),
    # packing
    ({"cu_seqlens": cu(0, N)[None]}, "got shape (1, 2), exp"),
    ({"cu_seqlens": cu(0)}, "got shape (1,), expected (sequences + 1,)"),
    ({"cu_seqlens": cu(0, N).to("meta")}, "cu_seqlens: got device meta, expected cpu"),
    ({"cu_seqlens": cu(0, N), "b": 2}, "cu_seqlens: got batch 2, expect"),
    ({"cu_seqlens": cu(0, N), "m": 3, "causal": False}, "cu_seqlens: got 5 queries and 3 keys, expected equal numbers"),
    *(({"cu_seqlens": cu(*x)}, f"cu_seqlens: got {list(x)}, expected numbers that rise from 0 to the length, 5")
      for x in BOUNDS),
    ({"cu_seqlens": cu(0, 2, N), "state": AT_100},
     "state: got kv of shape (1, 2, 4, 4), expected (b, g, f, e) = (2, 2, 4, 4)"),
    # grids
    (GRID, "positions: got None, expected coordinates"),
    ({"positions": torch.arange(N), **GRID}, "positions: got shape (5,), expected (5, 2) or (1, 5, 2)"),
    ({"positions": zeros(1, N, 3).long(), **GRID}, "positions: got shape (1, 5, 3), expected (5, 2) or (1, 5, 2)"),
    ({"positions": zeros(N, 2).long(), "m": 3, "causal": False, **GRID},
     "key_positions: got None, expected coordinates"),
    # names
    ({"rope_order": "between"}, NO_ORDER),
    ({"rope_order": "before", "rotary": Rotary(2 * D), "feature_map": PAIRED},
     "rotary: got dim=8, expected the head dim, 4"),
    ({"feature_map": "hedgehog"},
     "feature_map='hedgehog': it has weights or a projection of its own; expected the object"),
]  # fmt: skip
LAYERS: list[tuple[dict[str, Any], str]] = [
    ({"decay": "retnot"},
     "decay='retnot': expected one of spread, learned, retnet, numbers, or None; did you mean 'retnet'?"),
    ({"decay": [0.5]}, "decay: got [0.5], expected 2 numbers in (0, 1]"),
    ({"decay": [0.5, 1.5]}, "decay: got [0.5, 1.5], expected 2 numbers in (0, 1]"),
    ({"feature_map": {"nu": 3}}, "feature_map={'nu': 3}: expected the key 'name'"),
    ({"rope_order": "between"}, NO_ORDER),
]  # fmt: skip
TYPES: list[tuple[dict[str, Any], str]] = [
    *(({name: 0.9}, f"{name}: got float, expected a dense torch.Tensor") for name in (*DATA, "decay")),
    *(({name: zeros(1, N, G).to(dtype)}, f"{name}: got {dtype}, expected float64, ")
      for name in (*DATA, "decay") for dtype in (torch.int32, torch.float8_e4m3fn)),
    *(
        ({name: [1]}, f"{name}: got list, exp")
        for name in ("positions", "key_positions", "key_mask", "state", "rotary")
    ),
    ({"cu_seqlens": [0, N]}, "cu_seqlens: got list, exp"),
    ({"cu_seqlens": torch.tensor([0.0, N])}, "cu_seqlens: got torch.float32, expected int32 or int64"),
]  # fmt: skip
ALL = [
    *((attend, options, ValueError, message) for options, message in VALUES),
    *((layer, options, ValueError, message) for options, message in LAYERS),
    *((attend, options, TypeError, message) for options, message in TYPES),
    (Rotary, {"dim": D, "theta": [1.0, 2.0]}, TypeError, "theta: got list, expected a tensor"),
]


@pytest.mark.parametrize(("call", "options", "error", "message"), ALL)
def test_bad_input_is_refused_with_a_message_that_says_why(call, options, error, message) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call(**options)


@pytest.mark.parametrize("eps", [1, np.float32(0.5)])
def test_eps_may_be_any_real_number(eps: Any) -> None:
    assert torch.equal(attend(eps=eps), attend(eps=float(eps)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint16, torch.uint32, torch.uint64])
def test_positions_may_be_integers_of_any_width(dtype: torch.dtype) -> None:
    positions, how = torch.tensor([0, 2, 3, 3, 90]), {"rotary": Rotary(D), **FADING}
    assert torch.equal(attend(positions=positions.to(dtype), **how), attend(positions=positions, **how))


@every_backend
@both_directions
def test_empty_packed_sequences_keep_their_states(causal: bool, backend: str) -> None:
    q, k, v = randoms(1, N, G, D)
    for bounds in (cu(0, 0, N, N, N), cu(0, N), cu(0, 0, 1, 2, 3, 4, N)):
        how = {"causal": causal, "cu_seqlens": bounds, **(FADING if causal else {})}
        state, lengths = random_state(k, v, how), bounds.diff()
        last = linear_rope_attention(q, k, v, state=state, return_state=True, backend=backend, **how)[1]
        assert torch.equal(last.kv[lengths == 0], state.kv[lengths == 0])
        assert torch.equal(last.z[lengths == 0], state.z[lengths == 0])
        assert torch.equal(last.position, state.position + lengths)


@every_backend
def test_packed_sequences_of_no_tokens_at_all(backend: str) -> None:
    q, k, v = randoms(1, 0, G, D)
    results = everything(q, k, v, cu_seqlens=cu(0, 0, 0), backend=backend, **FADING)
    assert results["out"].shape == (1, 0, G, D)
    assert results["kv"].shape == (2, G, D, D)


class Stretched(Rotary):
    """The angles grow with the logarithm of the position."""

    identity = "stretched"  # type: ignore[assignment]

    def angles(self, positions: Tensor) -> Tensor:
        return super().angles(positions).log1p()


class Slower(Rotary):
    identity = "slower"  # type: ignore[assignment]

    def turns_per_position(self, device: torch.device) -> Tensor:
        return super().turns_per_position(device) // 2


@pytest.mark.parametrize(
    ("kind", "order", "other"), [(Stretched, "after", "before"), (Slower, "before", "after")]
)
def test_a_rotation_whose_angles_a_call_would_not_read_is_refused(
    kind: type[Rotary], order: str, other: str
) -> None:
    attend(rotary=Rotary(D), rope_order=order)
    with pytest.raises(
        TypeError, match=rf"^rotary: got {kind.__name__} with .*, which rope_order='{order}' does not"
    ):
        attend(rotary=kind(D), rope_order=order)
    with pytest.raises(TypeError, match=r"expected its own .* angle_steps$"):
        layer(rotary=kind(D), rope_order=order)
    assert not torch.equal(
        attend(rotary=kind(D), rope_order=other), attend(rotary=Rotary(D), rope_order=other)
    )
    changed = {
        "angles": lambda self, positions: kind.angles(self, positions),
        "turns_per_position": lambda self, device: kind.turns_per_position(self, device),
    }
    for nameless in (type("Nameless", (Rotary,), changed), type("Nameless", (kind,), changed)):
        with pytest.raises(
            TypeError, match=r"^rotary: got Nameless with its own .*, expected its own identity too"
        ):
            attend(rotary=nameless(D), rope_order=other)


@pytest.mark.parametrize("name", ["theta", "frequencies", "xpos_log_decay"])
def test_a_rotation_that_says_in_its_own_words_what_it_was_given_is_refused(name: str) -> None:
    rotary = type("Other", (Slower,), {name: property(lambda self: None)})(D)
    with pytest.raises(
        TypeError, match=rf"^rotary: got Other with its own {name}, .*; expected to give Rotary"
    ):
        attend(rotary=rotary)
