"""The figures of RoFormer section 3.4.3."""

import cmath

import pytest
import torch

from linrope import Rotary
from linrope.position_encodings import long_term_decay


@pytest.mark.parametrize(("distance", "mean"), [(0, 32.5), (8, 19.8), (50, 12.6), (100, 10.2), (250, 6.55)])
def test_published_figures(distance: int, mean: float) -> None:
    assert float(long_term_decay(torch.tensor(distance), 128)) == pytest.approx(mean, rel=5e-3)  # 3 digits


def test_it_is_the_mean_of_the_partial_sums() -> None:
    distances = torch.tensor([[0, 1], [-3, 40]])
    for distance, decay in zip(distances.flatten().tolist(), long_term_decay(distances, 6, 50.0).flatten()):
        terms = [cmath.exp(1j * distance * 50 ** (-2 * t / 6)) for t in range(3)]
        sums = [abs(sum(terms[:i])) for i in (1, 2, 3)]
        assert float(decay) == pytest.approx(sum(sums) / 3, rel=1e-12)


def test_it_bounds_the_rotated_products() -> None:
    """Abel summation, RoFormer eq. 37: |sum_t h_t e^(i a_t)| <= max |h_(t+1) - h_t| sum |S_i|."""
    torch.manual_seed(0)
    rotary = Rotary(16)
    distances = torch.arange(200)
    for _ in range(20):
        q, k = torch.randn(2, 16, dtype=torch.float64)
        keys = rotary(k.expand(1, 200, 1, 16), distances)[0, :, 0]
        h = torch.view_as_complex(q.view(-1, 2)).conj() * torch.view_as_complex(k.view(-1, 2))
        steps = torch.cat((h, h.new_zeros(1))).diff().abs().max()
        assert ((keys @ q).abs() <= 8 * long_term_decay(distances, 16) * steps + 1e-12).all()


def test_the_envelope_falls() -> None:
    decay = long_term_decay(torch.arange(256), 128)
    peaks = torch.stack([decay[n : 2 * n].max() for n in (1, 2, 4, 8, 16, 32, 64, 128)])
    assert (peaks.diff() < 0).all()
    assert not (decay.diff() < 0).all()  # an envelope, not a law for each distance
