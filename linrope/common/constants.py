"""A per-device cache of fixed tensors (neither parameters nor buffers)."""

import torch
from torch import Tensor


class Constant:
    """A fixed tensor, copied once to each device that asks for it.

    It is derived from an object's arguments and is not a buffer: casting, averaging or emptying a model does not
    touch it, and it is not in the state dict. All callers share the copy: do not write to it.
    """

    def __init__(self, values: Tensor) -> None:
        with torch.inference_mode(False):  # autograd saves these tensors, and cannot save inference tensors
            self._values = values.detach().to("cpu", copy=True).contiguous()
        self._copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        if device == self._values.device:
            return self._values
        if device not in self._copies:
            with torch.inference_mode(False):
                copy = self._values.to(device)
            if torch.compiler.is_compiling() or type(copy) is not Tensor:  # traced: it belongs to a graph
                return copy
            self._copies[device] = copy
        return self._copies[device]

    def is_copy(self, x: Tensor) -> bool:
        """True if x is one of the tensors that ``on`` returns to all callers."""
        return x is self._values or x is self._copies.get(x.device)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_copies": {}}  # a pickled or deep copy fills its own cache
