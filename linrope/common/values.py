"""Whether a check may read the values of a tensor, and whether a graph for other runtimes is being recorded."""

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor

_FAKE = torch._C._TorchDispatchModeKey.FAKE


def values_readable(x: Tensor | torch.device) -> bool:
    """False on a GPU and while tracing.

    Reading a value from a GPU would make the host wait for it. Traced tensors (torch.compile, FakeTensorMode,
    vmap) and tensors on the meta device have no values. x may be a device: the answer is then for its tensors.

    >>> from linrope.common.values import values_readable
    >>> values_readable(torch.ones(2)), values_readable(torch.ones(2, device="meta"))
    (True, False)
    """
    device = x.device if isinstance(x, Tensor) else x
    if device.type != "cpu" or torch.compiler.is_compiling():
        return False
    if isinstance(x, Tensor) and (isinstance(x, FakeTensor) or is_functorch_wrapped_tensor(x)):
        return False
    return torch._C._get_dispatch_mode(_FAKE) is None


def exporting() -> bool:
    """True while torch.export, torch.onnx or torch.jit records a graph for runtimes without linrope's operators.

    >>> from linrope.common.values import exporting
    >>> exporting()
    False
    """
    if torch.compiler.is_compiling():
        return torch.compiler._is_exporting_flag  # is_exporting() is also True in 2.11's torch.compile
    return torch.onnx.is_in_onnx_export() or torch._C._get_tracing_state() is not None
