"""Starts kernels, and remembers which compiled kernel belongs to which arguments.

Triton looks up the compiled kernel anew in each launch, which takes tens of microseconds: longer than a short kernel
runs. A launch like an earlier one skips the lookup, and with it Triton's check that the global variables that a kernel
reads have not changed (linrope's are constants), its ``pre_run_hooks``, and its settings for debugging.
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

MOST_LAUNCHES = 4096  # to remember: shapes may vary without end
# For each key: the compiled kernel, and the values of its constants in the order of its signature
_LAUNCHES: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
# Takes the place of ``start`` in passes that repeat.py records
RECORDER: ContextVar[Callable[..., object] | None] = ContextVar("RECORDER", default=None)


def start_kernel(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Starts ``programs`` programs of a kernel. constants: those of its signature by name, and Triton's options."""
    if programs:
        (RECORDER.get() or start)(kernel, programs, args, constants)


def start(
    kernel: Any, programs: int, args: tuple[Any, ...], constants: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """Starts a kernel. Returns a function that starts it again, and its arguments; None: there is none."""
    if why_forgetful() is not None:
        kernel[(programs,)](*args, **constants)
        return None
    key = kernel, likeness(args, _by_width(kernel)), tuple(constants.values())
    if (known := _LAUNCHES.get(key)) is not None:
        compiled, in_order = known
        again = compiled[(programs, 1, 1)]
        again(*args, *in_order)
        return again, (*args, *in_order)
    compiled = kernel[(programs,)](*args, **constants)
    if compiled is None:  # the interpreter compiles nothing
        return None
    if len(_LAUNCHES) >= MOST_LAUNCHES:
        _LAUNCHES.clear()
    in_order = tuple(constants[name] for name in kernel.arg_names[len(args) :])
    _LAUNCHES[key] = compiled, in_order
    return compiled[(programs, 1, 1)], (*args, *in_order)


@cache
def _by_width(kernel: Any) -> tuple[int, ...]:
    """Which arguments are ``do_not_specialize``; the interpreter's kernels do not tell."""
    return tuple(i for i, x in enumerate(getattr(kernel, "params", ())) if x.do_not_specialize)


def likeness(args: tuple[Any, ...], by_width: tuple[int, ...] = ()) -> tuple[Any, ...]:
    """The arguments of a launch as a key: two launches with equal keys can run the same compiled kernel.

    The key has what a compiled kernel depends on: of a tensor the dtype, the device, and whether its address is a
    multiple of 16; of an integer its width and, unless its place is in ``by_width``, whether it is 1 or a multiple of
    16; of other numbers the type.
    """
    found = [*map(_alike, args)]
    for i in by_width:
        if type(x := args[i]) is int:
            found[i] = -(2**31) <= x < 2**31, x < 2**63
    return tuple(found)


def _alike(x: Any) -> Any:
    kind = type(x)
    if x is None:
        return None
    if kind is int:
        return x == 1 or (x % 16 == 0, -(2**31) <= x < 2**31, x < 2**63)
    if kind is Tensor or isinstance(x, Tensor):
        return x.dtype, x.get_device(), x.data_ptr() % 16 == 0
    if isinstance(x, tuple):
        return _integers_alike(x) if x and type(x[0]) is int else tuple([_alike(y) for y in x])
    return kind


@lru_cache(MOST_LAUNCHES, typed=True)
def _integers_alike(x: tuple[Any, ...]) -> tuple[Any, ...]:
    """``_alike`` for a tuple that begins with an integer, such as strides, and has no tensors."""
    return tuple(map(_alike, x))


@cache
def why_forgetful() -> str | None:
    """The reason why no launch is remembered; None: all are.

    They are, if Triton's own rules give arguments with equal keys the same compiled kernel.
    """
    try:
        from triton.backends.compiler import BaseBackend
        from triton.runtime.jit import native_specialize_impl as specialized
    except ImportError as error:
        return f"Triton has another way to look at arguments: {error}"
    for specialize in (True, False):
        found: dict[Any, Any] = {}
        for x in _examples():
            try:
                compiled_for = specialized(BaseBackend, x, False, specialize, True)
            except TypeError as error:
                return f"Triton has another way to look at arguments: {error}"
            key = likeness((x,), () if specialize else (0,))
            if found.setdefault(key, compiled_for) != compiled_for:
                return f"Triton compiles a kernel of its own for an argument of type {type(x).__name__}"
    return None


def _examples() -> list[Any]:
    """Arguments of every kind that linrope's kernels take."""
    dtypes = (
        torch.bool,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
    tensors = [
        torch.zeros(40, dtype=dtype, device="cpu")[first:] for dtype in dtypes for first in (0, 1, 2, 8, 16)
    ]
    integers = (0, 1, 2, 15, 16, 48, 2**31 - 1, 2**31, 2**31 + 1, 2**40, 2**63, -1, -(2**31), -(2**31) - 1)
    strides = [(64, 16, 1), (64, 16, 2), (128, 32, 1), (64, 1, 16), (2**33, 16, 1), (0, 0)]
    rows = [(x, y) for x in (*tensors, None) for y in strides]
    return [
        None,
        *tensors,
        *integers,
        *strides,
        *rows,
        (tensors[0], None),
        (None, None),
        True,
        False,
        1e-6,
        0.5,
    ]
