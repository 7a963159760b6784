"""Keeps autocast from lowering the precision of a computation."""

from contextlib import AbstractContextManager, nullcontext

import torch

_UNCHANGED = nullcontext()  # made once: in a short call, making one takes noticeable time


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Turns autocast off on this device. The meta device has no autocast to turn off.

    >>> from linrope.common.precision import full_precision
    >>> x = torch.ones(2, 2)
    >>> with torch.autocast("cpu", torch.bfloat16), full_precision(x.device):
    ...     (x @ x).dtype
    torch.float32
    """
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return _UNCHANGED
    return torch.autocast(device.type, enabled=False)
