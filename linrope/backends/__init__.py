"""One table of backends, and one rule to choose.

A backend is a module with ``attend(call, state) -> (out, sums)`` and ``supports(call, state) -> why not, or
None``: ``linrope.backends.call``.
"""

from types import ModuleType

from linrope.backends import eager, native, reference
from linrope.backends.call import Call, has_tangents
from linrope.common.names import check_name
from linrope.sequence.state import LinearAttentionState

MODULES = {"reference": reference, "eager": eager, "native": native}
NAMES = ("auto", *MODULES, "triton")


def choose(name: str, call: Call, state: LinearAttentionState | None) -> ModuleType:
    """The backend of that name; "auto" takes native on a CPU and triton on a GPU where they can, else eager.

    Raises:
        ValueError: unknown name.
        RuntimeError: it cannot run the call, with the reason.
    """
    check_name("backend", name, NAMES)
    if name != "reference" and has_tangents(call, state):
        raise RuntimeError(f"backend={name!r}: got inputs with tangents (forward mode), expected 'reference'")
    order: tuple[str, ...] = (name,)
    if name == "auto":
        order = ("native", "eager") if call.k.device.type == "cpu" else ("triton", "eager")
    for candidate in order:
        module = load(candidate)
        reason = module if isinstance(module, str) else module.supports(call, state)
        if reason is None:
            return module  # type: ignore[return-value]
    raise RuntimeError(f"backend={name!r} cannot run: {reason}")


def load(name: str) -> ModuleType | str:
    """The backend's module, or why it is not to be had."""
    if name != "triton":
        return MODULES[name]
    try:
        from linrope.backends import triton  # only where it may be used: Triton may be absent
    except ImportError as error:
        return str(error)
    return triton
