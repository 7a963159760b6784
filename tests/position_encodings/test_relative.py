"""Shaw, Transformer-XL and DeBERTa against their formulas written out pair by pair."""

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linrope.position_encodings import RELATIVE, DeBERTa, RelativeEncoding, Shaw, TransformerXL

H, D, E = 2, 4, 3
POSITIONS = torch.tensor([[0, 1, 2, 9, 4], [3, 3, 20, 0, 7]])  # any order, repeats, beyond max_distance
KEY_POSITIONS = torch.tensor([[5, 0, 2, 30], [1, 2, 3, 4]])


def make(name: str) -> RelativeEncoding:
    torch.manual_seed(0)
    encoding = RELATIVE[name](H, D, E, **({} if name == "transformer-xl" else {"max_distance": 3})).double()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_()
    return encoding


def inputs() -> list[Tensor]:
    torch.manual_seed(1)
    shapes = (2, 5, H, D), (2, 4, H, D), (2, 4, H, E)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def clip(x: int, low: int, high: int) -> int:
    return max(low, min(x, high))


def shaw(encoding: Shaw, head: int, q: Tensor, k: Tensor, distance: int) -> Tensor:
    pk = encoding.pk[head, clip(distance, -3, 3) + 3]
    return q @ (k + pk) / math.sqrt(D)


def transformer_xl(encoding: TransformerXL, head: int, q: Tensor, k: Tensor, distance: int) -> Tensor:
    angles = [distance / 10000 ** (2 * t / (H * D)) for t in range(H * D // 2)]
    s = torch.tensor([f(angle) for angle in angles for f in (math.sin, math.cos)], dtype=torch.float64)
    second_key = encoding.weight[head] @ s
    u, w = encoding.u[head], encoding.w[head]
    return (q @ k + q @ second_key + u @ k + w @ second_key) / math.sqrt(D)


def deberta(encoding: DeBERTa, head: int, q: Tensor, k: Tensor, distance: int) -> Tensor:
    def row(x: int) -> int:  # delta of the paper's eq. 3, with k = 3
        return 0 if x <= -3 else 5 if x >= 3 else x + 3

    kr, qr = encoding.kr[head, row(distance)], encoding.qr[head, row(-distance)]
    return (q @ k + q @ kr + k @ qr) / math.sqrt(3 * D)


FORMULAS: dict[str, Callable[..., Tensor]]
FORMULAS = {"shaw": shaw, "transformer-xl": transformer_xl, "deberta": deberta}
PAIRS = [*product(range(2), range(H), range(5), range(4))]  # sequence, head, query, key
every_encoding = pytest.mark.parametrize("name", RELATIVE)


@every_encoding
def test_scores_are_the_formula_pair_by_pair(name: str) -> None:
    encoding, (q, k, _) = make(name), inputs()
    scores = encoding.scores(q, k, POSITIONS, KEY_POSITIONS)
    assert scores.shape == (2, H, 5, 4)
    for b, head, i, j in PAIRS:
        distance = int(POSITIONS[b, i] - KEY_POSITIONS[b, j])
        expected = FORMULAS[name](encoding, head, q[b, i, head], k[b, j, head], distance)
        assert_close(scores[b, head, i, j], expected, rtol=0, atol=1e-12)


@every_encoding
def test_values_are_the_formula_pair_by_pair(name: str) -> None:
    encoding, (_, _, v) = make(name), inputs()
    weights = torch.rand(2, H, 5, 4, dtype=torch.float64)
    expected = torch.zeros(2, 5, H, E, dtype=torch.float64)
    for b, head, i, j in PAIRS:
        value = v[b, j, head]
        if isinstance(encoding, Shaw):
            row = clip(int(POSITIONS[b, i] - KEY_POSITIONS[b, j]), -3, 3) + 3
            value = value + encoding.pv[head, row]
        expected[b, i, head] += weights[b, head, i, j] * value
    assert_close(encoding.values(weights, v, POSITIONS, KEY_POSITIONS), expected, rtol=0, atol=1e-12)


def test_shaw_forms_no_tensor_of_pairs_times_dims() -> None:
    encoding, n = Shaw(1, 512), 64
    x, positions, sizes = torch.randn(1, n, 1, 512), torch.arange(n)[None], []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.append(out.numel() if isinstance(out, Tensor) else 0)
            return out

    with Sizes(), torch.no_grad():
        weights = encoding.scores(x, x, positions, positions).softmax(-1)
        encoding.values(weights, x, positions, positions)
    assert max(sizes) == n * 512


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Shaw(0, 4), "num_heads=0"),
        (lambda: DeBERTa(2, 4, 0), "value_head_dim=0"),
        (lambda: Shaw(2, 4, max_distance=0), "max_distance=0: expected at least 1"),
        (lambda: DeBERTa(2, 4, max_distance=-1), "max_distance=-1: expected at least 1"),
        (lambda: TransformerXL(3, 3), "num_heads=3, head_dim=3: expected an even product"),
    ],
)
def test_impossible_sizes_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
