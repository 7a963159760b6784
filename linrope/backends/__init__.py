"""One table of backends, and one rule to choose.

A backend is a module with ``attend(q, k, v, kv, z, **how) -> (out, kv, z)`` and
``supports(device, dtype) -> why not, or None``.
"""

from difflib import get_close_matches
from types import ModuleType

import torch

from linrope.backends import eager, reference

MODULES = {
    "reference": reference,
    "eager": eager,
}
NAMES = ("auto", *MODULES)


def choose(name: str, device: torch.device, dtype: torch.dtype) -> ModuleType:
    """The backend of that name; "auto" takes eager.

    Raises:
        ValueError: unknown name.
        RuntimeError: it cannot run the call, with the reason.
    """
    if name == "triton":
        raise RuntimeError("backend='triton' cannot run: this version of linrope has no GPU kernels")
    if name not in NAMES:
        near = get_close_matches(str(name), NAMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"backend={name!r}: expected one of {', '.join(NAMES)}{hint}")
    module: ModuleType = MODULES["eager" if name == "auto" else name]
    reason = module.supports(device, dtype)
    if reason is not None:
        raise RuntimeError(f"backend={name!r} cannot run: {reason}")
    return module
