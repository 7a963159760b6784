"""docs/examples/position_encodings.py against its formulas, written out pair by pair."""

import cmath
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linrope import Rotary
from tests.support.examples import load

pytestmark = pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="examples run on the CPU")

encodings = load("position_encodings")
H, D = 2, 4
POSITIONS = torch.tensor([0, 1, 2, 9, 4, 4, 30])  # any order, repeats, beyond max_distance


def clip(x: int, low: int, high: int) -> int:
    return max(low, min(x, high))


def shaw(layer, head: int, q: Tensor, k: Tensor, distance: int) -> Tensor:
    return q @ (k + layer.pk[head, clip(distance, -3, 3) + 3]) / math.sqrt(D)


def transformer_xl(layer, head: int, q: Tensor, k: Tensor, distance: int) -> Tensor:
    angles = [distance / 10000 ** (2 * t / (H * D)) for t in range(H * D // 2)]
    s = torch.tensor([f(angle) for angle in angles for f in (math.sin, math.cos)], dtype=torch.float64)
    second_key = layer.weight[head] @ s
    u, w = layer.u[head], layer.w[head]
    return (q @ k + q @ second_key + u @ k + w @ second_key) / math.sqrt(D)


def deberta(layer, head: int, q: Tensor, k: Tensor, distance: int) -> Tensor:
    def row(x: int) -> int:  # delta of the paper's eq. 3, with k = 3
        return 0 if x <= -3 else 5 if x >= 3 else x + 3

    kr, qr = layer.kr[head, row(distance)], layer.qr[head, row(-distance)]
    return (q @ k + q @ kr + k @ qr) / math.sqrt(3 * D)


LAYERS: dict[str, tuple[Callable[..., Tensor], dict[str, int]]] = {
    "Shaw": (shaw, {"max_distance": 3}),
    "TransformerXL": (transformer_xl, {}),
    "DeBERTa": (deberta, {"max_distance": 3}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_relative_encoding_is_its_formula_pair_by_pair(name: str) -> None:
    torch.manual_seed(0)
    formula, options = LAYERS[name]
    layer = getattr(encodings, name)(H * D, H, **options).double()
    for parameter in layer.parameters():
        parameter.data.normal_()
    x = torch.randn(2, 7, H * D, dtype=torch.float64)
    q, k, v = layer.qkv(x).unflatten(-1, (3, H, D)).unbind(2)
    expected = torch.zeros(2, 7, H, D, dtype=torch.float64)
    for b, head, i in torch.cartesian_prod(torch.arange(2), torch.arange(H), torch.arange(7)).tolist():
        distances = (POSITIONS[i] - POSITIONS[: i + 1]).tolist()
        scores = [formula(layer, head, q[b, i, head], k[b, j, head], r) for j, r in enumerate(distances)]
        for j, weight in enumerate(torch.stack(scores).softmax(0)):
            value = v[b, j, head]
            if name == "Shaw":
                value = value + layer.pv[head, clip(distances[j], -3, 3) + 3]
            expected[b, i, head] += weight * value
    assert_close(layer(x, POSITIONS), layer.o_proj(expected.flatten(-2)), rtol=0, atol=1e-12)


def test_absolute_encodings_add_the_vector_of_the_position() -> None:
    x, positions = torch.randn(2, 3, 6, dtype=torch.float64), torch.tensor([4, 0, 10_000_019])
    rows = [
        [f(p / 10000 ** (2 * t / 6)) for t in range(3) for f in (math.sin, math.cos)]
        for p in positions.tolist()
    ]
    expected = x + torch.tensor(rows, dtype=torch.float64)
    assert_close(encodings.Sinusoidal(6)(x, positions), expected, rtol=0, atol=1e-9)
    learned = encodings.Learned(6, 10).double()
    assert torch.equal(learned(x, torch.tensor([4, 0, 9])), x + learned.table.weight[[4, 0, 9]])


@pytest.mark.parametrize(("distance", "mean"), [(0, 32.5), (8, 19.8), (50, 12.6), (100, 10.2), (250, 6.55)])
def test_the_long_term_decay_has_the_published_figures(distance: int, mean: float) -> None:
    assert float(encodings.long_term_decay(torch.tensor(distance), 128)) == pytest.approx(mean, rel=5e-3)


def test_the_long_term_decay_is_the_mean_of_the_partial_sums_and_bounds_the_rotated_products() -> None:
    """Abel summation, RoFormer eq. 37: |sum_t h_t e^(i a_t)| <= max |h_(t+1) - h_t| sum |S_i|."""
    distances = torch.tensor([[0, 1], [-3, 40]])
    for distance, decay in zip(
        distances.flatten().tolist(), encodings.long_term_decay(distances, 6, 50.0).flatten()
    ):
        terms = [cmath.exp(1j * distance * 50 ** (-2 * t / 6)) for t in range(3)]
        assert float(decay) == pytest.approx(sum(abs(sum(terms[:i])) for i in (1, 2, 3)) / 3, rel=1e-12)
    torch.manual_seed(0)
    rotary, distances = Rotary(16), torch.arange(200)
    q, k = torch.randn(2, 16, dtype=torch.float64)
    keys = rotary(k.expand(1, 200, 1, 16), distances)[0, :, 0]
    h = torch.view_as_complex(q.view(-1, 2)).conj() * torch.view_as_complex(k.view(-1, 2))
    steps = torch.cat((h, h.new_zeros(1))).diff().abs().max()
    assert ((keys @ q).abs() <= 8 * encodings.long_term_decay(distances, 16) * steps + 1e-12).all()


def test_relative_encodings_alone_do_not_change_when_all_positions_move(capsys) -> None:
    encodings.main()
    changes = dict(line.split(": outputs change by ") for line in capsys.readouterr().out.splitlines()[:-1])
    moved = {name for name, change in changes.items() if float(change.split()[0]) > 1e-3}
    assert moved == {"sinusoidal", "learned"}
    assert len(changes) == 6
