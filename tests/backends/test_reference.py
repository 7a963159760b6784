"""The oracle itself: backend "reference" against eq. 19 written out, and exact cases for every backend."""

import math

import pytest
import torch
from torch import Tensor

from linrope import Rotary, linear_rope_attention
from tests.feature_maps.table import plain
from tests.oracle import BACKENDS, POSITIVE, SIGNED, equation_19, num_features, randoms, use_map

ROTATIONS = {
    "none": lambda f, g: None,
    "interleaved": lambda f, g: Rotary(f, base=100.0),
    "half": lambda f, g: Rotary(f, base=100.0, layout="half"),
    "partial": lambda f, g: Rotary(f, base=100.0, layout="half", rotary_dim=f - 2),
    "per head": lambda f, g: Rotary(f, theta=torch.arange(1.0, g * f // 2 + 1).view(g, -1) / 7),
}


def check(q: Tensor, k: Tensor, v: Tensor, how: dict, positions: Tensor, key_positions: Tensor) -> None:
    fmap = how["feature_map"]
    bounds = how.get("cu_seqlens")
    expected = equation_19(
        plain(fmap.queries(q)), plain(fmap.keys(k)), v, how["rotary"], positions, key_positions,
        how["key_mask"], how["causal"], how["normalize"], decay=how.get("decay"),
        sequence=None if bounds is None else [i for i, n in enumerate(bounds.diff()) for _ in range(n)],
    )  # fmt: skip
    out = linear_rope_attention(q, k, v, backend="reference", **how)
    # The loop's angles, products of float64, are off by 2e-13 rad at 1,700 rad; the operation's are not.
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("attention", ["causal", "bidirectional", "cross"])
def test_reference_is_equation_19(attention: str, rotation: str, normalize: bool, masked: bool) -> None:
    b, n, h, g, d = 2, 5, 4, 2, 6
    m = 3 if attention == "cross" else n
    q, k, v = randoms(b, n, h, d, g=g, m=m, e=3)
    mask = torch.tensor([True, False, True, True, False])[:m].expand(b, m).clone() if masked else None
    how = use_map("elu+1", d) | {
        "rotary": ROTATIONS[rotation](d, g),
        "key_mask": mask,
        "causal": attention == "causal",
        "normalize": normalize,
    }
    positions, key_positions = (torch.arange(length).expand(b, length) for length in (n, m))
    if attention == "cross":
        positions = torch.tensor([[9, 2, 2, 30, 4], [0, 1, 2, 3, 1000]])
        key_positions = torch.tensor([[5, 0, 77], [1, 1, 2]])
        how |= {"positions": positions, "key_positions": key_positions}
    check(q, k, v, how, positions, key_positions)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", [*POSITIVE, *SIGNED])
def test_reference_is_equation_19_with_every_map(name: str, causal: bool) -> None:
    q, k, v = randoms(1, 6, 2, 4)
    how = use_map(name, 4) | {"key_mask": None, "causal": causal}
    how["rotary"] = Rotary(num_features(how, 4))
    positions = torch.arange(6)[None]
    check(q, k, v, how, positions, positions)


FADING = {
    "decay": {"decay": torch.tensor([0.5, 0.9])},
    "xpos": {"rotary": Rotary(8, xpos=3.0)},
    "some of the pairs, xpos, decay": {
        "rotary": Rotary(8, layout="half", rotary_dim=6, xpos=3.0),
        "decay": torch.tensor([0.9, 1.0]),
    },
}


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("fading", FADING)
def test_reference_is_equation_19_with_keys_that_fade(
    fading: str, packed: bool, gaps: bool, normalize: bool
) -> None:
    b, n = (1 if packed else 2), 6
    q, k, v = randoms(b, n, 4, 8, g=2, e=3)
    how = use_map("elu+1", 8) | {"rotary": Rotary(8), "causal": True, "normalize": normalize} | FADING[fading]
    how["key_mask"] = torch.tensor([True, True, False, True, True, True]).expand(b, n).clone()
    positions = torch.arange(n).expand(b, n)
    if packed:
        how["cu_seqlens"] = torch.tensor([0, 2, 2, n])
        positions = torch.tensor([[0, 1, 0, 1, 2, 3]])
    if gaps:
        positions = how["positions"] = positions * positions + 5
    check(q, k, v, how, positions, positions)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_reference_is_equation_19_on_a_grid(layout: str, causal: bool) -> None:
    q, k, v = randoms(2, 6, 2, 8)
    rotary = Rotary.axial(8, 3, layout=layout, pairs=(1, 2, 1))
    grid = torch.tensor([[t, y, x] for t in range(1) for y in range(2) for x in range(3)]).expand(2, 6, 3)
    how = use_map("elu+1", 8) | {"rotary": rotary, "causal": causal, "normalize": True, "key_mask": None}
    check(q, k, v, how | {"positions": grid}, grid, grid)


@pytest.mark.parametrize("causal", [True, False])
def test_reference_is_equation_19_packed(causal: bool) -> None:
    q, k, v = randoms(1, 6, 2, 4)
    how = use_map("elu+1", 4) | {"rotary": Rotary(4), "causal": causal, "normalize": True, "key_mask": None}
    how["cu_seqlens"] = torch.tensor([0, 1, 1, 4, 6])
    where = torch.tensor([[0, 0, 1, 2, 0, 1]])
    check(q, k, v, how, where, where)


def test_order_before_rotates_what_the_map_gets() -> None:
    q, k, v = randoms(2, 6, 4, 4, g=2)
    rotary, where = Rotary(4), torch.arange(6)
    before = linear_rope_attention(q, k, v, rotary=rotary, rope_order="before", backend="reference")
    plain = linear_rope_attention(rotary(q, where), rotary(k, where), v, backend="reference")
    assert torch.equal(before, plain)


def test_an_attention_factor_goes_to_q_and_k_before_the_map() -> None:
    q, k, v = randoms(1, 6, 2, 4)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    rotary = Rotary(4, scaling=yarn)
    factor = rotary.attention_factor
    assert factor > 1
    out = linear_rope_attention(q, k, v, rotary=rotary, backend="reference")
    same = Rotary(4, theta=rotary.theta)
    expected = linear_rope_attention(q * factor, k * factor, v, rotary=same, backend="reference")
    assert torch.equal(out, expected)


def quarter_turns(x: Tensor, turns: Tensor, layout: str) -> Tensor:
    """x (n, f) of integers, turned turns (n,) times by 90 degrees."""
    cos, sin = (torch.tensor(table)[turns % 4][:, None] for table in ([1, 0, -1, 0], [0, 1, 0, -1]))
    x1, x2 = (x[:, 0::2], x[:, 1::2]) if layout == "interleaved" else x.chunk(2, -1)
    pairs = x1 * cos - x2 * sin, x1 * sin + x2 * cos
    return torch.stack(pairs, -1).flatten(1) if layout == "interleaved" else torch.cat(pairs, -1)


@pytest.mark.parametrize("start", [0, 4001])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_integers_turned_by_quarters_are_exact(backend: str, causal: bool, layout: str, start: int) -> None:
    n, f = 150, 4
    generator = torch.Generator().manual_seed(0)
    # No zeros: cos(pi/2) is 6e-17, and vanishes only when it is added to something.
    q, k, v = (
        torch.randint(1, 4, (n, f), generator=generator)
        * (2 * torch.randint(0, 2, (n, f), generator=generator) - 1)
        for _ in range(3)
    )
    positions = start + torch.arange(n)
    scores = quarter_turns(q, positions, layout) @ quarter_turns(k, positions, layout).T
    expected = (scores.tril() if causal else scores) @ v
    out = linear_rope_attention(
        *(x.float()[None, :, None] for x in (q, k, v)), feature_map=None, normalize=False, causal=causal,
        rotary=Rotary(f, layout=layout, theta=torch.full((f // 2,), math.pi / 2, dtype=torch.float64)),
        positions=positions, backend=backend,
    )  # fmt: skip
    assert torch.equal(out[0, :, 0], expected.float())
