"""The table of backends, and the rule that chooses one for a call."""

import inspect
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linrope.backends import bridge, eager, equation, native, onnx
from linrope.backends.protocol import XPOS, Backend
from linrope.common.argument_checks import check_name
from linrope.common.private_names import called_while_traced, forward_mode
from linrope.common.tracing import exporting, exporting_to_onnx, has_tangents
from linrope.recurrence.call import Call, Resolved, differentiable, option_beyond
from linrope.recurrence.state import LinearAttentionState

if TYPE_CHECKING:
    from linrope.backends import triton

    # A type checker compares each module with the protocol that it has to fulfil.
    from linrope.backends.protocol import ChunkedBackend

    _CHUNKED: tuple[ChunkedBackend, ...] = (eager, native, triton)

# Each backend, and the devices for which "auto" tries it, in this order.
BACKENDS: dict[str, tuple[str, ...]] = {
    "native": ("cpu",),
    "triton": ("cuda",),
    "eager": ("cpu", "cuda"),
    "reference": (),
    "onnx": (),
}
NAMES = ("auto", *BACKENDS)
MODULES: dict[str, Backend] = {"native": native, "eager": eager, "reference": equation, "onnx": onnx}


def choose(name: str, call: Call, state: LinearAttentionState | None) -> Backend:
    """The backend of this name. "auto" takes native on a CPU and triton on a GPU if they can, else eager.

    In torch.onnx.export it takes reference, whose operations every runtime has.

    Raises:
        ValueError: unknown name.
        RuntimeError: the backend cannot run the call. The message has the reason.
    """
    backend = first_of(name, call, state)
    if isinstance(backend, str):
        raise RuntimeError(f"backend={name!r} cannot run: {backend}")
    return backend


def first_of(name: str, call: Call, state: LinearAttentionState | None) -> Backend | str:
    """The backend that ``choose`` takes, or the reason why none can run the call."""
    check_name("backend", name, NAMES)
    if name != "reference" and forward_mode() and has_tangents(differentiable(call, state)):
        raise RuntimeError(
            f"backend={name!r}: got inputs with tangents (forward mode), {bridge.EXPECTED_REFERENCE}"
        )
    auto = name == "auto"
    names = (name,) if not auto else ("reference",) if exporting_to_onnx() else tried_on(call.k.device)
    for candidate in names:
        reason = why_not(candidate, lambda backend: _why_not_call(backend, call, state), auto)
        if reason is None:
            return load(candidate)
    assert reason is not None
    return reason


def why_not(name: str, of_call: Callable[[Any], str | None], auto: bool) -> str | None:
    """The reason why this backend cannot run a call; None: it can.

    of_call: the reason why it could run the call on no machine. auto: warns if this machine alone is the reason.
    """
    backend = load(name)
    if not isinstance(backend, str):
        if (reason := of_call(backend)) is not None:
            return reason
        # "onnx" runs on no machine, and its why_not_call knows of the graphs that it is for
        backend = available(name) if BACKENDS[name] else backend
    if not isinstance(backend, str):
        return None
    if auto and not exporting():
        warn_of_missing(name, backend)
    return backend


_AUTO = {
    device: [name for name, devices in BACKENDS.items() if device in devices] for device in ("cpu", "cuda")
}


def tried_on(device: torch.device) -> list[str]:
    """The backends that "auto" tries for tensors on this device, in this order."""
    return _AUTO.get(device.type, ["eager"])


def kernels_here() -> dict[str, str | None]:
    """The backends with kernels for this machine's devices, by name, and why they cannot run here; None: they can."""
    names = [_AUTO[device][0] for device in ("cpu", "cuda") if device == "cpu" or torch.cuda.is_available()]
    found = {name: available(name) for name in names}
    return {name: x if isinstance(x, str) else None for name, x in found.items()}


_warned: set[str] = set()


@called_while_traced
def warn_of_missing(name: str, reason: str) -> None:
    """Warns once per process that these kernels cannot run."""
    if name not in _warned:
        _warned.add(name)
        text = f"linrope's kernels (backend {name!r}) cannot run, so plain PyTorch computes, which is slower: {reason}"
        warnings.warn(text, RuntimeWarning, stacklevel=_level_of_the_caller())


def _level_of_the_caller() -> int:
    """The stacklevel, for the function that asks, of the first call from outside linrope and PyTorch."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("linrope.", "torch.")):
        level, frame = level + 1, frame.f_back
    return level


def in_words(name: str, weight: Tensor | None) -> str:
    """A layer's backend for its repr: beside "auto" what it tries for tensors like this weight.

    >>> from linrope import backends
    >>> backends.in_words("auto", torch.ones(2, dtype=torch.float64))
    'auto (eager)'
    """
    if weight is None:  # quantized layers have none, and run on a CPU in float32
        weight = torch.empty(0, device="cpu", dtype=torch.float32)
    if name != "auto" or weight.device.type not in _AUTO:
        return name
    kernels, *_, other = tried_on(weight.device)
    reason = why_not(kernels, lambda module: module.why_not_on(weight.device, [weight.dtype]), auto=False)
    return f"auto ({other})" if reason is not None else f"auto ({kernels}, else {other})"


def _why_not_call(backend: Backend, call: Call, state: LinearAttentionState | None) -> str | None:
    if call.feature_map not in backend.MAPS:
        maps = ", ".join(backend.MAPS)
        return f"feature_map={call.feature_map!r}: this backend only applies {maps}; use backend='eager'"
    if (reason := backend.why_not_call(call, state)) is not None:
        return reason
    name = option_beyond(backend.OPTIONS, call)
    if name is None:
        return None
    other = "eager" if name in eager.OPTIONS else "reference"
    name = "rotary with xpos" if name in XPOS else "rotary" if hasattr(Resolved, name) else name
    return f"{name}: this backend does not compute it; use backend={other!r}"


def load(name: str) -> Backend | str:
    """The backend, or the reason why it cannot be imported: triton requires a package that may be absent."""
    if name == "triton":
        try:
            from linrope.backends import triton  # imports Triton, which may be absent
        except ImportError as error:
            return str(error)
        return triton
    return MODULES[name]


def available(name: str) -> Backend | str:
    """The backend, or the reason why it can run no call at all on this machine."""
    backend = load(name)
    reason = backend if isinstance(backend, str) else backend.why_not()
    return backend if reason is None else reason
