"""One table of backends, and one rule to choose.

A backend is a module with ``attend(call, state) -> (out, sums)`` and ``supports(call, state) -> why not, or None``:
``linrope.backends.call``.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

import torch

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
        reason = _why_absent(candidate)
        if reason is None:
            module = _LOADED[candidate]
            reason = module.supports(call, state)
            if reason is None:
                return module
    raise RuntimeError(f"backend={name!r} cannot run: {reason}")


_LOADED: dict[str, ModuleType] = {}


@torch.compiler.assume_constant_result  # a compiler cannot trace an import
def _why_absent(name: str) -> str | None:
    """Loads a backend; Triton and the native library need not be there."""
    if name not in _LOADED:
        try:
            _LOADED[name] = import_module(f"linrope.backends.{name}")
        except ImportError as error:
            return str(error)
    return None
