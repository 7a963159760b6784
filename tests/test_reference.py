"""The oracle itself: backend "reference" against eq. 19 written out, and exact cases for every backend."""

import math

import pytest
import torch
from torch import Tensor

from linrope import Rotary, linear_rope_attention
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
    expected = equation_19(
        fmap.queries(q), fmap.keys(k), v, how["rotary"], positions, key_positions,
        how["key_mask"], how["causal"], how["normalize"],
    )  # fmt: skip
    out = linear_rope_attention(q, k, v, backend="reference", **how)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)


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
