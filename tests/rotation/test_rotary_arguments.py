"""What Rotary refuses, and how it says so."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import ones

from linrope import Rotary
from linrope.rotation.rotary import grid_positions, rotate

SHAPES = ((3,), (2, 4), (1, 1, 2), ())  # which theta cannot have


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((lambda x=x: Rotary(x), rf"dim={x}: expected a positive even number") for x in (5, 0, -2)),
        *((lambda x=x: Rotary(4, rotary_dim=x), rf"rotary_dim={x}: expected an even number from 2 to dim=4")
          for x in (3, 6, 0, -2)),
        *((lambda x=x: Rotary(4, base=x), rf"base={x}: expected a positive") for x in (0.0, -1.0, math.nan, math.inf)),
        *((lambda x=x: Rotary(4, theta=ones(x)), r"theta: got shape \(.*\), expected \(2\) or \(num_kv_heads, 2\)")
          for x in SHAPES),
        (lambda: Rotary(4, layout="halve"), r"layout='halve': expected one of interleaved, half.*did you mean 'half'"),
        (lambda: Rotary(4, scaling="yarm"), r"scaling='yarm': expected None or a dict with"),
        (lambda: Rotary.whole_model(2, 4, layout="half"),
         r"layout='half': whole-model rotation requires 'interleaved'"),
        (lambda: rotate(ones(6), ones(3), ones(3), "hlf"), r"layout='hlf': expected one of .*did you mean 'half'"),
        (lambda: rotate(ones(4), ones(3), ones(3), "half"),
         r"x: got 4 features, expected at least 6 for the 3 pairs of cos"),
        (lambda: Rotary(4)(ones(1, 3, 2, 6), torch.arange(3)), r"x: got 6 features, expected dim=4"),
        (lambda: Rotary.whole_model(2, 4)(ones(1, 3, 3, 4), torch.arange(3)),
         r"x: got 3 heads, expected a multiple of theta's 2"),
        (lambda: Rotary(8, axes=2), r"axes=2: expected theta too, or use Rotary.axial"),
        (lambda: Rotary(8, axes=0), r"axes=0: expected at least 1"),
        (lambda: Rotary(8, theta=ones(4), axes=2), r"theta: got shape \(4,\), expected \(2, 4\) or"),
        (lambda: Rotary(8, theta=ones(2, 3, 4), axes=2), r"theta: got shape .*expected \(2, 4\) or"),
        (lambda: Rotary.axial(8, pairs=[4]), r"pairs=\[4\]: expected one positive number per axis, 4 in all"),
        (lambda: Rotary.axial(8, pairs=[4, 0]), r"pairs=\[4, 0\]: expected"),
        (lambda: Rotary.axial(8, pairs=[2, 1]), r"pairs=\[2, 1\]: expected"),
        (lambda: Rotary.axial(4, 3), r"axes=3: expected 1 to 2, at most one per pair"),
        (lambda: Rotary.axial(3), r"dim=3: expected a positive even number"),
        (lambda: Rotary.axial(8).angles(torch.arange(4)), r"positions: got shape \(4,\), expected"),
        (lambda: Rotary.axial(8).angles(ones(4, 3).long()), r"positions: got shape \(4, 3\)"),
        (lambda: Rotary.axial(8, pairs=[2, 2], rotary_dim=4), r"pairs=\[2, 2\]: expected .*, 2 in all"),
        (lambda: Rotary.axial(8, rotary_dim=10), r"rotary_dim=10: expected an even number from 2 to dim=8"),
        (lambda: Rotary.whole_model(2, 4, axes=0), r"axes=0: expected 1 to 4, at most one per pair"),
        (lambda: Rotary.whole_model(4, 3), r"head_dim=3: expected a positive even number"),
        (lambda: Rotary.whole_model(0, 4), r"num_heads=0: expected at least 1"),
        (grid_positions, r"sizes=\(\), class_tokens=0: expected positive sizes"),
        (lambda: grid_positions(3, 0), r"sizes=\(3, 0\), class_tokens=0: expected positive sizes"),
        (lambda: grid_positions(3, class_tokens=-1), r"class_tokens=-1: expected .* 0 or more tokens"),
        (lambda: Rotary(8, theta=torch.full((4,), math.nan)), r"theta: got \[nan, .*expected finite numbers"),
        (lambda: Rotary(8, attention_factor=2.0), r"attention_factor=2.0: expected None without theta"),
        (lambda: Rotary(8, theta=ones(4), attention_factor=0.0),
         r"attention_factor=0.0: expected a positive finite number"),
        (lambda: Rotary(8, xpos=0), r"xpos=0: expected a positive finite length"),
        (lambda: Rotary(8, xpos=math.inf), r"xpos=inf: expected a positive finite length"),
        (lambda: Rotary(8, theta=ones(2, 4), axes=2, xpos=512.0), r"xpos=512.0: expected None if axes is given"),
        (lambda: Rotary(8, theta=ones(4), scaling={"rope_type": "default"}),
         r"scaling={'rope_type': 'default'}: expected None if theta is given"),
        (lambda: Rotary(8, axes=2, scaling={"rope_type": "default"}), r"expected None if axes is given"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_positions_that_are_no_integers_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"positions: got {dtype}, expected integers"):
        Rotary(4).angles(ones(3, dtype=dtype))
