"""What the operators ask of their arguments, and whether the native kernels can take them."""

from collections.abc import Iterable

import torch
from torch import Tensor

from linrope.backends import native
from linrope.common.argument_checks import check_name
from linrope.common.private_names import transformed
from linrope.common.tracing import exporting, has_tangents

BACKENDS = ("auto", "native", "eager")
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


def takes_kernel(backend: str, tensors: Iterable[Tensor | None], too_large: str | None) -> bool:
    """True if the native kernel runs the call, False if plain PyTorch does. "auto" takes the kernel where it can run.

    too_large: the reason why the kernel cannot take these sizes; None: it can.

    Raises:
        ValueError: unknown name.
        RuntimeError: the kernel cannot run the call. The message has the reason.
    """
    present = [x for x in tensors if x is not None]
    if backend == "auto":
        return _why_not(present) is None and too_large is None and not exporting()
    check_name("backend", backend, BACKENDS)
    if backend == "eager":
        return False
    if (reason := _why_not(present) or too_large) is not None:
        raise RuntimeError(f"backend={backend!r} cannot run: {reason}")
    return True


def _why_not(tensors: list[Tensor]) -> str | None:
    """The reason why no native kernel can compute with these tensors; None: the kernels can."""
    for x in tensors:
        if x.device.type != "cpu":
            return f"tensors on {x.device}: native runs on CPUs only"
        if x.dtype == torch.float64:
            return "float64: use backend='eager'"
    if transformed() or has_tangents(tensors):
        return "inside a transformation of torch.func or forward mode: use backend='eager'"
    return native.why_not()


def with_dense_rows(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """x in this dtype with a last stride of 1, as the kernels take tokens."""
    return None if x is None else native.with_dense_rows(converted(x, dtype))


def as_parameter(x: Tensor | None) -> Tensor | None:
    """x as the kernels take parameters."""
    return None if x is None else x.float().contiguous()


def gradient_of(x: Tensor | None, gradient: Tensor) -> Tensor | None:
    """The kernel's gradient in the dtype of x; None if x is absent."""
    return None if x is None else converted(gradient, x.dtype)


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), but short calls notice the time that PyTorch takes to find nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)
