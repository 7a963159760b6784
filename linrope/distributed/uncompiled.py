"""Keeps communication between processes out of torch.compile's graphs."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """The function, left out of compiled graphs like one under ``torch.compiler.disable``.

    ``torch.compiler.disable`` imports the compiler, and with it Triton, as soon as it is applied. This decorator
    imports them only once something is compiled.
    """

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **options)  # type: ignore[no-any-return]
        return function(*args, **options)

    return call
