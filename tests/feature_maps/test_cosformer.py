"""cosFormer: a map that knows where its tokens are."""

import math

import pytest
import torch
from torch.testing import assert_close

from linrope import linear_rope_attention
from linrope.feature_maps import Cosformer
from tests.support.oracle import randoms


def test_features_are_the_formula() -> None:
    fmap, positions = Cosformer(2, max_length=10), torch.tensor([[0, 3], [9, 4]])
    q, k, _ = randoms(2, 2, 3, 2)
    angle = math.pi / 20 * positions.double()[..., None, None]
    for x, features in ((q, fmap.queries(q, positions)), (k, fmap.keys(k, positions))):
        positive = x.clamp_min(0)
        assert_close(features, torch.cat((positive * angle.cos(), positive * angle.sin()), -1))


def test_angles_are_formed_in_float64() -> None:
    length = 2**24 + 2
    fmap, x = Cosformer(1, max_length=length), torch.ones(1, 2, 1, 1)
    features = fmap.queries(x, torch.tensor([[length - 1, length - 2]]))[0, :, 0, 0]
    near_0 = [math.cos(math.pi / 2 * (length - i) / length) for i in (1, 2)]
    assert_close(features, features.new_tensor(near_0), rtol=1e-6, atol=0)


def test_attention_takes_the_positions_given() -> None:
    """Shifted positions change no product, and pieces go on where the state ends."""
    fmap, (q, k, v) = Cosformer(4, max_length=100), randoms(1, 20, 2, 4)
    out = linear_rope_attention(q, k, v, feature_map=fmap)
    shifted = linear_rope_attention(q, k, v, feature_map=fmap, positions=torch.arange(70, 90))
    assert_close(shifted, out)
    pieces, state = [], None
    for a, b in ((0, 7), (7, 8), (8, 20)):
        piece, state = linear_rope_attention(
            q[:, a:b], k[:, a:b], v[:, a:b], feature_map=fmap, state=state, return_state=True
        )
        pieces.append(piece)
    assert_close(torch.cat(pieces, 1), out)


def test_a_position_past_the_end_is_refused() -> None:
    fmap, x = Cosformer(4, max_length=6), torch.ones(1, 2, 1, 4)
    at = torch.tensor([[2, 5]], device="cpu")
    fmap.keys(x.cpu(), at)
    with pytest.raises(ValueError, match="positions: got 6, expected less than max_length=6"):
        fmap.keys(x.cpu(), at + 1)
