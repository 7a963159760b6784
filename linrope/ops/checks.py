"""The checks that the operators share. They run before any kernel reads memory."""

import torch
from torch import Tensor

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_dense(name: str, x: object, device: torch.device | None = None) -> None:
    """Raises unless x is a dense tensor of real numbers, on this device if one is given."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        kind = x.layout if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name}: got {kind}, expected a dense torch.Tensor")
    if x.dtype not in _DTYPES:
        raise TypeError(f"{name}: got {x.dtype}, expected float64, float32, bfloat16 or float16")
    if device is not None and x.device != device:
        raise ValueError(f"{name}: got device {x.device}, expected {device}")


def check_shape(name: str, x: Tensor, *shapes: tuple[int, ...]) -> None:
    """Raises ValueError unless x has one of the shapes."""
    if not any(len(shape) == x.ndim and all(a == b for a, b in zip(x.shape, shape)) for shape in shapes):
        expected = " or ".join(str(shape) for shape in dict.fromkeys(shapes))
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {expected}")
