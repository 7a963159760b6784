"""The table of backends, and the rule that chooses one for a call."""

from typing import TYPE_CHECKING

from linrope.backends import eager, equation, native, onnx
from linrope.backends.protocol import Backend
from linrope.common.argument_checks import check_name
from linrope.common.private_names import forward_mode
from linrope.common.tracing import exporting_to_onnx, has_tangents
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
        raise RuntimeError(f"backend={name!r}: got inputs with tangents (forward mode), expected 'reference'")
    for candidate in _auto(call) if name == "auto" else (name,):
        backend = load(candidate)
        reason = backend if isinstance(backend, str) else _why_not(backend, call, state)
        if reason is None:
            return backend
    assert reason is not None
    return reason


_AUTO = {
    device: [name for name, devices in BACKENDS.items() if device in devices] for device in ("cpu", "cuda")
}


def _auto(call: Call) -> list[str]:
    """The backends that "auto" tries, in this order."""
    if exporting_to_onnx():
        return ["reference"]
    return _AUTO["cpu" if call.k.device.type == "cpu" else "cuda"]


def _why_not(backend: Backend, call: Call, state: LinearAttentionState | None) -> str | None:
    if call.feature_map not in backend.MAPS:
        maps = ", ".join(backend.MAPS)
        return f"feature_map={call.feature_map!r}: this backend only applies {maps}; use backend='eager'"
    if (reason := backend.why_not_call(call, state)) is not None:
        return reason
    name = option_beyond(backend.OPTIONS, call)
    if name is None:
        return None
    other = "eager" if name in eager.OPTIONS else "reference"
    name = "rotary" if hasattr(Resolved, name) else name
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
