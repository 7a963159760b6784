"""One table of backends, and one rule to choose.

A backend is a module with ``attend(call, state) -> (out, sums)`` and ``supports(call, state) -> why not, or None``:
``linrope.backends.call``.
"""

from importlib import import_module
from typing import Any

from linrope.backends.call import Call
from linrope.names import check_name
from linrope.state import LinearAttentionState

NAMES = ("auto", "reference", "eager", "native", "triton")


def choose(name: str, call: Call, state: LinearAttentionState | None) -> Any:
    """The backend of that name; "auto" takes native on a CPU and triton on a GPU where they can, else eager.

    Raises:
        ValueError: unknown name.
        RuntimeError: it cannot run the call, with the reason.
    """
    check_name("backend", name, NAMES)
    order: tuple[str, ...] = (name,)
    if name == "auto":
        order = ("native", "eager") if call.k.device.type == "cpu" else ("triton", "eager")
    reason: str | None = None
    for candidate in order:
        try:
            module = import_module(f"linrope.backends.{candidate}")  # Triton and the native library may be absent
            reason = module.supports(call, state)
        except ImportError as error:
            reason = str(error)
        if reason is None:
            return module
    raise RuntimeError(f"backend={name!r} cannot run: {reason}")
