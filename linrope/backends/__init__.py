"""One table of backends, and one rule to choose.

A backend is a module with ``attend(q, k, v, kv, z, **how) -> (out, kv, z)`` and
``supports(q, v, kv, rotary) -> why not, or None``.
"""

from types import ModuleType
from typing import Any

from torch import Tensor

from linrope.backends import eager, reference
from linrope.names import check_name
from linrope.rotary import Rotary

MODULES = {
    "reference": reference,
    "eager": eager,
}
NAMES = ("auto", *MODULES, "triton")


def choose(name: str, q: Tensor, v: Tensor, kv: Tensor, rotary: Rotary | None) -> ModuleType:
    """The backend of that name; "auto" takes triton for a call on a GPU that it supports, else eager.

    Raises:
        ValueError: unknown name.
        RuntimeError: it cannot run the call, with the reason.
    """
    check_name("backend", name, NAMES)
    order = (name,) if name != "auto" else ("triton", "eager") if q.is_cuda else ("eager",)
    for candidate in order:
        module = _load(candidate)
        reason = module if isinstance(module, str) else module.supports(q, v, kv, rotary)
        if reason is None:
            return module  # type: ignore[no-any-return]
    raise RuntimeError(f"backend={name!r} cannot run: {reason}")


def _load(name: str) -> Any:
    """The backend's module, or why it is not to be had."""
    if name != "triton":
        return MODULES[name]
    try:
        from linrope.backends import triton  # only where it may be used: Triton may be absent
    except ImportError as error:
        return str(error)
    return triton
