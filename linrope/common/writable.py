"""Checks that tensors can be written in place, before the first write, so that no state is half written."""

from collections.abc import Mapping

import torch
from torch import Tensor


def check_writable(tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError for a state's tensor that torch would not write to, or whose entries share memory.

    Does nothing inside torch.compile, which traces the writes. Memory that the operating system or numpy
    protects cannot be recognized.

    >>> from linrope.common.writable import check_writable
    >>> check_writable({"z": torch.zeros(1, 2).expand(3, 2)})
    Traceback (most recent call last):
    ValueError: state.z: got entries that share memory (strides (0, 1)), expected a clone()
    """
    if torch.compiler.is_compiling():
        return
    outside, recording = not torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    for name, x in tensors.items():
        if outside and x.is_inference():
            raise ValueError(
                f"state.{name}: got a tensor made in torch.inference_mode(), expected a call in that mode "
                "or a clone() made outside of it"
            )
        if recording and x.requires_grad:
            raise ValueError(
                f"state.{name}: got a tensor that requires gradients, expected torch.no_grad() or detach()"
            )
        if not x.is_contiguous() and _overlaps(x):
            strides = x.stride()
            raise ValueError(
                f"state.{name}: got entries that share memory (strides {strides}), expected a clone()"
            )


def _overlaps(x: Tensor) -> bool:
    """True if two entries may share memory: an axis has a stride within the span of the axes with smaller strides."""
    span = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape) if size > 1):
        if stride <= span:
            return True
        span += stride * (size - 1)
    return False
