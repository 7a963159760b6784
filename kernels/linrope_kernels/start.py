"""Starts kernels. A short kernel runs for less time than Triton takes to find the compiled kernel of a launch."""

from typing import Any

from torch import Tensor

MOST_LAUNCHES = 4096
_LAUNCHES: dict[Any, tuple[Any, tuple[Any, ...]]] = {}  # the compiled kernel, and the constants in its order


def likeness(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a launch, with what Triton compiles a kernel for in place of each tensor.

    That is its dtype, and whether its address is a multiple of 16. A tuple that begins with an integer holds no tensor.
    """
    return tuple(
        [
            (x.dtype, x.get_device(), x.data_ptr() % 16)
            if isinstance(x, Tensor)
            else likeness(x)
            if isinstance(x, tuple) and not isinstance(x[0], int)  # not strides
            else x
            for x in args
        ]
    )


def start_kernel(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Starts ``programs`` programs of a kernel. constants: those of its signature by name, and Triton's options."""
    if not programs:
        return
    key = kernel, likeness(args), tuple(constants.values())
    if key in _LAUNCHES:
        compiled, in_order = _LAUNCHES[key]
        compiled[(programs, 1, 1)](*args, *in_order)
        return
    compiled = kernel[(programs,)](*args, **constants)
    if compiled is not None:  # the interpreter compiles nothing
        if len(_LAUNCHES) == MOST_LAUNCHES:  # lengths vary
            _LAUNCHES.clear()
        _LAUNCHES[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])
