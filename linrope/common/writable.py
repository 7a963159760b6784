"""Checks that a state can be written in place, before the first write, so that none is half written."""

from collections.abc import Mapping

import torch
from torch import Tensor

from linrope.common.tracing import values_readable


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


def check_slots(slots: object, rows: int, device: torch.device) -> None:
    """Raises unless slots is an integer tensor (b,) on the device whose numbers are different rows of a state."""
    if not isinstance(slots, Tensor) or slots.dtype not in (torch.int64, torch.int32):
        kind = slots.dtype if isinstance(slots, Tensor) else type(slots).__name__
        raise TypeError(f"slots: got {kind}, expected a torch.Tensor of int64 or int32")
    if slots.ndim != 1:
        raise ValueError(f"slots: got shape {tuple(slots.shape)}, expected (b,)")
    if slots.device != device:
        raise ValueError(f"slots: got device {slots.device}, expected {device}")
    if values_readable(slots):
        numbers = slots.tolist()
        if numbers and (len(set(numbers)) < len(numbers) or not 0 <= min(numbers) <= max(numbers) < rows):
            raise ValueError(f"slots: got {numbers}, expected different rows 0 .. {rows - 1}")
