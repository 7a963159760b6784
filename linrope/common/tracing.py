"""What a call may do with its tensors: read their values, skip the dispatcher, ignore tangents, use own operators."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from linrope.common.private_names import (
    FakeTensor,
    compiled_for_export,
    fake_mode,
    forward_mode,
    is_functorch_wrapped_tensor,
    watched,
)

_is_jit_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]


def values_readable(x: Tensor | torch.device) -> bool:
    """False on a GPU and while tracing.

    Reading a value from a GPU would make the host wait for it. Traced tensors (torch.compile, FakeTensorMode,
    vmap) and tensors on the meta device have no values. x may be a device: the answer is then for its tensors.

    >>> from linrope.common.tracing import values_readable
    >>> values_readable(torch.ones(2)), values_readable(torch.ones(2, device="meta"))
    (True, False)
    """
    device = x.device if isinstance(x, Tensor) else x
    if device.type != "cpu" or torch.compiler.is_compiling():
        return False
    if isinstance(x, Tensor) and (isinstance(x, FakeTensor) or is_functorch_wrapped_tensor(x)):
        return False
    return not fake_mode()


def exporting() -> bool:
    """True while torch.export, torch.onnx or torch.jit records a graph for runtimes without linrope's operators.

    >>> from linrope.common.tracing import exporting
    >>> exporting()
    False
    """
    return compiled_for_export() if torch.compiler.is_compiling() else _is_jit_tracing()


def exporting_to_onnx() -> bool:
    """True in torch.onnx.export. torch.onnx.is_in_onnx_export() alone would take a microsecond of every call.

    >>> from linrope.common.tracing import exporting_to_onnx
    >>> exporting_to_onnx()
    False
    """
    return (torch.compiler.is_compiling() or _is_jit_tracing()) and torch.onnx.is_in_onnx_export()


def check_not_in_onnx(backend: str, instead: str) -> None:
    """Raises RuntimeError in torch.onnx.export, which would trace the whole model before it finds no such operator.

    torch.compile takes torch.onnx.is_in_onnx_export() for False. So operators also call this on their fake tensors.

    >>> from linrope.common.tracing import check_not_in_onnx
    >>> check_not_in_onnx("eager", "'reference'")
    """
    if torch.onnx.is_in_onnx_export():
        raise RuntimeError(f"backend={backend!r}: ONNX has no such operator, expected {instead}")


_PLAIN = frozenset((Tensor, Parameter, type(None)))


def plain(tensors: Iterable[Tensor | None]) -> bool:
    """True in plain eager mode: no compiler, trace, transformation, dispatch mode or tensor subclass.

    None among the tensors stands for one that is absent.

    >>> from linrope.common.tracing import plain
    >>> plain([torch.ones(2)])
    True
    """
    return not watched() and not _is_jit_tracing() and _PLAIN.issuperset(map(type, tensors))


def traced(x: Tensor) -> bool:
    """True if a call on x must go through a registered operator, because a trace records operators, not kernels.

    This holds in torch.compile, in torch.func's transformations, in dispatch modes (FakeTensorMode), and for fake
    tensors.

    >>> from linrope.common.tracing import traced
    >>> traced(torch.ones(2))
    False
    """
    return watched() or isinstance(x, FakeTensor)


def has_tangents(tensors: Iterable[Tensor]) -> bool:
    """True if forward-mode differentiation tracks a tensor; an operator would drop its tangent silently.

    >>> from linrope.common.tracing import has_tangents
    >>> has_tangents([torch.ones(2)])
    False
    """
    return forward_mode() and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
