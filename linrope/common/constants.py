"""Numbers that a model computes with and neither learns nor saves."""

import torch
from torch import Tensor


class Constant:
    """Numbers with a copy on each device that asks for them.

    They come from an object's arguments and are no buffer: casting, averaging or emptying a model does not
    touch them, and a state dict does not have them. All who ask share the tensor: it is not to be written to.
    """

    def __init__(self, values: Tensor) -> None:
        with torch.inference_mode(False):  # graphs of autograd will save what is made here
            self._values = values.detach().to("cpu", copy=True).contiguous()
        self._copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        if device == self._values.device:
            return self._values
        if device not in self._copies:
            with torch.inference_mode(False):
                there = self._values.to(device)
            if torch.compiler.is_compiling() or type(there) is not Tensor:  # it lives in this graph alone
                return there
            self._copies[device] = there
        return self._copies[device]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_copies": {}}  # a copy of the object makes its own
