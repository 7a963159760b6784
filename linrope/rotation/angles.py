"""Rotation of pairs of features, and angles as integers that wrap: the same functions for all backends."""

import math

import torch
from torch import Tensor

from linrope.common.names import check_name

LAYOUTS = ("interleaved", "half")


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Turns each pair of features by the angle whose cosine and sine are given; -sin turns it back.

        (x1, x2) -> (x1 cos - x2 sin,  x1 sin + x2 cos)

    Args:
        x: (..., f).
        cos: (..., pairs), of a shape that broadcasts. The first 2 pairs features turn, the rest stays.
        sin: of the same shape as cos.
        layout: "interleaved" pairs (0, 1), (2, 3), ..; "half" pairs (t, t + pairs).

    Returns:
        (..., f) in x's dtype; float16 and bfloat16 turn in float32.

    Raises:
        ValueError: unknown layout; fewer than 2 pairs features.

    Source: Su et al. 2021, arXiv 2104.09864, eq. 34.

    >>> from linrope.rotation.rotary import rotate
    >>> cos, sin = torch.tensor([0.0]), torch.tensor([1.0])  # a quarter turn
    >>> rotate(torch.tensor([1.0, 2.0, 3.0]), cos, sin, "interleaved")
    tensor([-2.,  1.,  3.])
    """
    check_name("layout", layout, LAYOUTS)
    width = 2 * cos.shape[-1]
    if x.shape[-1] < width:
        raise ValueError(f"x: got {x.shape[-1]} features, expected at least {width}, as cos has {width // 2}")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if layout == "interleaved":
        x1, x2 = wide[..., 0:width:2], wide[..., 1:width:2]
        turned = torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), -1).flatten(-2)
    else:
        x1, x2 = wide[..., : width // 2], wide[..., width // 2 : width]
        turned = torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), -1)
    if width < x.shape[-1]:
        rest = wide[..., width:].expand(*turned.shape[:-1], -1)
        turned = torch.cat((turned, rest.to(turned.dtype)), -1)
    return turned.to(x.dtype)


def to_turns(radians: Tensor) -> Tensor:
    """Angles in units of 2^-64 turns, int64, whose sums wrap and so stay exact, however they are grouped.

        t = radians / 2 pi, minus its nearest integer;   turns = 2^64 t, and -2^63 for a half turn

    radians may have any shape and floating dtype. What is not finite gives some integer without an error:
    whoever may hold NaN keeps it visible by another way than the angle.

    >>> from linrope.rotation.rotary import to_turns
    >>> to_turns(torch.tensor([0.5, -2.5]).double() * torch.pi) / 2.0**64
    tensor([ 0.2500, -0.2500])
    """
    turns = radians.double() * (1 / (2 * math.pi))
    turns = (turns - turns.round()) * 2.0**64
    return torch.where(turns >= 2.0**63, -turns, turns).to(torch.int64)  # 2^63 is no int64: 1/2 = -1/2


def cos_sin_of_turns(turns: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of angles in units of 2^-64 turns, formed in float64 and cast to dtype.

        cos, sin (2 pi turns / 2^64)

    >>> from linrope.rotation.rotary import cos_sin_of_turns
    >>> cos_sin_of_turns(torch.tensor([0, 2**61, -(2**63)]), torch.float32)[0]
    tensor([ 1.0000,  0.7071, -1.0000])
    """
    return cos_sin(turns.double() * (2 * math.pi / 2.0**64), dtype)


def cos_sin(angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of angles in rad, float64: formed in float64 and cast to dtype.

    Few runtimes of ONNX have cosines of float64 (onnxruntime from 1.30 on). There an angle is x + y, x in
    float32, and cos x - y sin x, sin x + y cos x are its cosine and sine to 2^-45.
    """
    if dtype == torch.float64 or not torch.onnx.is_in_onnx_export():
        return angles.cos().to(dtype), angles.sin().to(dtype)
    angles = angles - 2 * math.pi * (angles / (2 * math.pi)).round()
    near = angles.float()
    rest = (angles - near).float()
    cos, sin = near.cos(), near.sin()
    return (cos - rest * sin).to(dtype), (sin + rest * cos).to(dtype)
