"""The rotation of feature pairs, and angles stored as integers that wrap. All backends share these functions."""

import math

import torch
from torch import Tensor

from linrope.common.argument_checks import check_name

LAYOUTS = ("interleaved", "half")


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Rotates each pair of features by the angle with the given cosine and sine. Passing -sin rotates it back.

        (x1, x2) -> (x1 cos - x2 sin,  x1 sin + x2 cos)

    Args:
        x: (..., f).
        cos: (..., pairs), which broadcasts against x. The first 2 * pairs features turn, the others stay as they are.
        sin: the same shape as cos.
        layout: "interleaved" pairs (0, 1), (2, 3), ..; "half" pairs (l, l + pairs).

    Returns:
        (..., f) in x's dtype. float16 and bfloat16 are rotated in float32.

    Raises:
        ValueError: the layout is unknown, or x has fewer than 2 * pairs features.

    Source: Su et al. 2021, arXiv 2104.09864, eq. 34.

    >>> from linrope.rotation.rotary import rotate
    >>> cos, sin = torch.tensor([0.0]), torch.tensor([1.0])  # a quarter turn
    >>> rotate(torch.tensor([1.0, 2.0, 3.0]), cos, sin, "interleaved")
    tensor([-2.,  1.,  3.])
    """
    check_name("layout", layout, LAYOUTS)
    width = 2 * cos.shape[-1]
    if x.shape[-1] < width:
        raise ValueError(
            f"x: got {x.shape[-1]} features, expected at least {width} for the {width // 2} pairs of cos"
        )
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if layout == "interleaved":
        x1, x2 = wide[..., 0:width:2], wide[..., 1:width:2]
        rotated = torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), -1).flatten(-2)
    else:
        x1, x2 = wide[..., : width // 2], wide[..., width // 2 : width]
        rotated = torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), -1)
    if width < x.shape[-1]:
        unrotated = wide[..., width:].expand(*rotated.shape[:-1], -1)
        rotated = torch.cat((rotated, unrotated.to(rotated.dtype)), -1)
    return rotated.to(x.dtype)


def units_to_features(units: Tensor, pairs: int, layout: str) -> Tensor:
    """One number per feature, (..., f), from one per unit: the pairs that turn, then the features that do not.

    >>> from linrope.rotation.angles import units_to_features
    >>> units_to_features(torch.tensor([1, 2, 3]), 2, "interleaved").tolist()
    [1, 1, 2, 2, 3]
    >>> units_to_features(torch.tensor([1, 2, 3]), 2, "half").tolist()
    [1, 2, 1, 2, 3]
    """
    turning, rest = units[..., :pairs], units[..., pairs:]
    both = turning.repeat_interleave(2, -1) if layout == "interleaved" else torch.cat((turning, turning), -1)
    return torch.cat((both, rest), -1)


def sums_of_units(x: Tensor, pairs: int, layout: str) -> Tensor:
    """x (..., f) summed over the features of each unit: the adjoint of ``units_to_features``."""
    both, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    one, other = (both[..., ::2], both[..., 1::2]) if layout == "interleaved" else both.chunk(2, -1)
    return torch.cat((one + other, rest), -1)


def to_turns(radians: Tensor) -> Tensor:
    """Converts angles to int64 in units of 2^-64 turns. Their sums wrap, so they are exact in any order.

        t = radians / 2 pi, minus its nearest integer;   turns = 2^64 t, and -2^63 for a half turn

    radians may have any shape and floating dtype. NaN and inf become an arbitrary integer: no integer stands for them.

    >>> from linrope.rotation.rotary import to_turns
    >>> to_turns(torch.tensor([0.5, -2.5]).double() * torch.pi) / 2.0**64
    tensor([ 0.2500, -0.2500])
    """
    turns = radians.double() * (1 / (2 * math.pi))
    turns = (turns - turns.round()) * 2.0**64
    # int64 ends below 2^63; half a turn either way is the same.
    return torch.where(turns >= 2.0**63, -turns, turns).to(torch.int64)


def cos_sin_of_turns(turns: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of angles in units of 2^-64 turns, computed in float64 and cast to dtype.

        cos, sin (2 pi turns / 2^64)

    >>> from linrope.rotation.rotary import cos_sin_of_turns
    >>> cos_sin_of_turns(torch.tensor([0, 2**61, -(2**63)]), torch.float32)[0]
    tensor([ 1.0000,  0.7071, -1.0000])
    """
    return cos_sin(turns.double() * (2 * math.pi / 2.0**64), dtype)


def cos_sin(angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of float64 angles in radians, cast to dtype.

    Few ONNX runtimes have a float64 cosine (onnxruntime has one since 1.29). A program exported to ONNX therefore
    splits an angle into x + y with x in float32, and computes its cosine as cos x - y sin x and its sine as
    sin x + y cos x. The error of that approximation is below 2^-45.
    """
    if dtype == torch.float64 or not torch.onnx.is_in_onnx_export():
        return angles.cos().to(dtype), angles.sin().to(dtype)
    angles = angles - 2 * math.pi * (angles / (2 * math.pi)).round()
    x = angles.float()
    y = (angles - x).float()
    cos, sin = x.cos(), x.sin()
    return (cos - y * sin).to(dtype), (sin + y * cos).to(dtype)
