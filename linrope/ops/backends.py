"""The table of the operators' backends, and the rule that chooses one for a call."""

from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

from linrope.common.argument_checks import check_name
from linrope.common.private_names import transformed
from linrope.common.tracing import exporting, has_tangents
from linrope.ops import native

# The fused backend that "auto" tries for tensors on each kind of device. "eager" is plain PyTorch and runs everywhere.
FUSED = {"cpu": "native"}
NAMES = ("auto", *FUSED.values(), "eager")


def choose(name: str, tensors: Sequence[Tensor | None], *, taps: int = 1, values: int = 1) -> str:
    """The name of the backend for these tensors. "auto" takes a fused backend where one can run, else eager.

    taps: of a convolution. values: the size of a head.

    Raises:
        ValueError: unknown name.
        RuntimeError: the backend cannot run the call. The message has the reason.
    """
    present = [x for x in tensors if x is not None]
    if name == "auto":
        fused = FUSED.get(present[0].device.type)
        if fused is None or exporting() or why_not(fused, present, taps, values) is not None:
            return "eager"
        return fused
    check_name("backend", name, NAMES)
    if name != "eager" and (reason := why_not(name, present, taps, values)) is not None:
        raise RuntimeError(f"backend={name!r} cannot run: {reason}")
    return name


def load(name: str) -> ModuleType:
    """The module of a fused backend."""
    return {"native": native}[name]


def why_not(name: str, tensors: Sequence[Tensor], taps: int = 1, values: int = 1) -> str | None:
    """The reason why a fused backend cannot run the call; None: it can."""
    if transformed() or has_tangents(tensors):
        return "inside a transformation of torch.func or forward mode: use backend='eager'"
    reason: str | None = load(name).why_not_tensors(tensors, taps=taps, values=values)
    return reason
