"""Sinusoidal and LearnedAbsolute: the vector that a position adds."""

import math

import pytest
import torch
from torch.testing import assert_close

from linrope import LinearRoPEAttention
from linrope.position_encodings import ABSOLUTE, LearnedAbsolute, Sinusoidal, SoftmaxAttention


@pytest.mark.parametrize("base", [10000.0, 7.0])
def test_sinusoidal_is_its_formula(base: float) -> None:
    angles = [[i / base ** (2 * t / 6) for t in range(3)] for i in range(5)]
    rows = [[f(angle) for angle in row for f in (math.sin, math.cos)] for row in angles]
    expected = torch.tensor(rows, dtype=torch.float64)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    assert_close(Sinusoidal(6, base)(x, torch.arange(5)), x + expected, rtol=0, atol=1e-14)


def test_sinusoidal_angles_are_formed_in_float64() -> None:
    position = 10_000_019
    p = Sinusoidal(2)(torch.zeros(1, 1, 2), torch.tensor([position])).flatten()
    assert_close(p, torch.tensor([math.sin(position), math.cos(position)]), rtol=0, atol=1e-7)


def test_learned_adds_the_row_of_the_position() -> None:
    encoding, x = LearnedAbsolute(4, 10), torch.randn(2, 3, 4)
    positions = torch.tensor([[0, 9, 4], [1, 1, 2]])
    expected = x + encoding.table.weight[positions]
    assert torch.equal(encoding(x, positions), expected)
    assert torch.equal(encoding(x, positions[0])[0], expected[0])


@pytest.mark.parametrize("positions", [[7, 8, 9, 10], [-1, 0, 1, 2]])
def test_learned_refuses_positions_past_its_ends(positions: list[int]) -> None:
    low, high = positions[0], positions[-1]
    with pytest.raises(ValueError, match=rf"positions: got {low} \.\. {high}, expected 0 \.\. 9"):
        LearnedAbsolute(4, 10)(torch.zeros(1, 4, 4), torch.tensor(positions))


LAYERS = [LinearRoPEAttention(8, 2, rotary=None), SoftmaxAttention(8, 2, positions="none")]


@pytest.mark.parametrize("layer", LAYERS, ids=["linear", "softmax"])
@pytest.mark.parametrize("name", ABSOLUTE)
def test_each_goes_with_both_kinds_of_attention(name: str, layer: torch.nn.Module) -> None:
    torch.manual_seed(0)
    encoding = ABSOLUTE[name](8, **({"max_length": 20} if name == "learned" else {}))
    x = torch.randn(1, 6, 8)
    y = layer(encoding(x, torch.arange(6)))
    assert not torch.allclose(layer(encoding(x, torch.arange(6) + 3)), y)  # absolute: a shift matters
    first, state = layer(encoding(x[:, :4], torch.arange(4)), return_state=True)
    second = layer(encoding(x[:, 4:], state.position[:, None] + torch.arange(2)), state=state)
    assert_close(torch.cat((first, second), 1), y)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="dim=5: expected a positive even number"):
        Sinusoidal(5)
    with pytest.raises(ValueError, match="max_length=0: expected at least 1"):
        LearnedAbsolute(4, 0)
