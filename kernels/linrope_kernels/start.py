"""Starts kernels, and remembers which compiled kernel belongs to which arguments.

Triton looks it up anew in each launch, which takes tens of microseconds: longer than a short kernel runs.
"""

from typing import Any

from torch import Tensor

MOST_LAUNCHES = 4096  # to remember: lengths of sequences may vary without end
# For each key: the compiled kernel, and the values of its constants in the order of its signature
_LAUNCHES: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


def likeness(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a launch as a key: two launches with equal keys can run the same compiled kernel.

    A tensor is replaced with what the compiled kernel depends on: its dtype, its device, and its address modulo 16.
    Other arguments stay as they are. A tuple that begins with an integer must not contain tensors.
    """
    return tuple(map(_alike, args))


def _alike(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.dtype, x.get_device(), x.data_ptr() % 16
    if isinstance(x, tuple) and not isinstance(x[0], int):  # strides stay as they are
        return likeness(x)
    return x


def start_kernel(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Starts ``programs`` programs of a kernel. constants: those of its signature by name, and Triton's options."""
    if not programs:
        return
    key = kernel, likeness(args), tuple(constants.values())
    if (known := _LAUNCHES.get(key)) is not None:
        compiled, in_order = known
        compiled[(programs, 1, 1)](*args, *in_order)
        return
    compiled = kernel[(programs,)](*args, **constants)
    if compiled is not None:  # the interpreter compiles nothing
        if len(_LAUNCHES) == MOST_LAUNCHES:
            _LAUNCHES.clear()
        _LAUNCHES[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])
