"""Checks of arguments that take a name from a list, names as keys, True or False, a number, or integers.

Nothing here imports PyTorch: the options of the command line use these checks too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Names that functions of PyTorch take, and options that are read without it
SPANS = ("head", "all")  # what a norm goes over: each head alone, or all of them
ORDERS = ("before", "after")  # where a skip or a gate acts: before or after the norm
ROPE_ORDERS = ("after", "before")  # where the rotation acts: after or before the feature map


def expected_one_of(value: object, known: Sequence[str], also: str = "") -> str:
    """The end of an error message: lists the known names and suggests the one nearest to the value.

    also: what else is accepted, in words.

    >>> from linrope.common.argument_checks import expected_one_of
    >>> expected_one_of("hlf", ("interleaved", "half"), also="a Rotary or None")
    "expected one of interleaved, half, a Rotary or None; did you mean 'half'?"
    """
    lower = {name.lower(): name for name in known}
    near = get_close_matches(str(value).lower(), lower, n=1)
    hint = f"; did you mean {lower[near[0]]!r}?" if near else ""
    return f"expected one of {', '.join([*known, also] if also else known)}{hint}"


def check_name(argument: str, value: object, known: Sequence[str], also: str = "") -> None:
    """Raises ValueError unless the value is one of the known names.

    also: what else the caller accepts, in words for the message. The caller checks these values itself.

    >>> from linrope.common.argument_checks import check_name
    >>> check_name("layout", "hlf", ("interleaved", "half"))
    Traceback (most recent call last):
    ValueError: layout='hlf': expected one of interleaved, half; did you mean 'half'?
    """
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{argument}={value!r}: {expected_one_of(value, known, also)}")


def check_keys(argument: str, options: Mapping[str, object], known: Sequence[str]) -> None:
    """Raises ValueError if options has a key that is not among the known ones.

    >>> from linrope.common.argument_checks import check_keys
    >>> check_keys("rotary", {"bse": 1e4}, ("base", "layout"))
    Traceback (most recent call last):
    ValueError: rotary: got the key 'bse', expected one of base, layout; did you mean 'base'?
    """
    for key in options:
        if key not in known:
            raise ValueError(f"{argument}: got the key {key!r}, {expected_one_of(key, known)}")


def check_bools(**arguments: object) -> None:
    """Raises TypeError unless each argument is True or False.

    >>> from linrope.common.argument_checks import check_bools
    >>> check_bools(causal="no")
    Traceback (most recent call last):
    TypeError: causal='no': expected True or False
    """
    for argument, value in arguments.items():
        if not isinstance(value, bool):
            raise TypeError(f"{argument}={value!r}: expected True or False")


def is_integer(x: object) -> bool:
    """True for a whole number, also one of numpy."""
    return isinstance(x, Integral) and not isinstance(x, bool)


def is_number(x: object) -> bool:
    """True for a finite number, also one of numpy."""
    return is_integer(x) or (isinstance(x, Real) and not isinstance(x, bool) and math.isfinite(x))


def plain(x: Any) -> Any:
    """Python's own number in place of one of numpy, which JSON cannot hold. Anything else stays as it is.

    >>> import numpy
    >>> from linrope.common.argument_checks import plain
    >>> plain(numpy.int64(4)), plain(numpy.float32(0.5)), plain("half")
    (4, 0.5, 'half')
    """
    if isinstance(x, (int, float)) or not isinstance(x, Real):
        return x
    return int(x) if isinstance(x, Integral) else float(x)


def check_integers(**arguments: object) -> None:
    """Raises TypeError unless each argument is a whole number, or None.

    >>> from linrope.common.argument_checks import check_integers
    >>> check_integers(num_heads=4.0)
    Traceback (most recent call last):
    TypeError: num_heads=4.0: expected an integer
    """
    for argument, value in arguments.items():
        if value is not None and not is_integer(value):
            raise TypeError(f"{argument}={value!r}: expected an integer")


def check_sizes(least: int = 1, /, **arguments: int | None) -> None:
    """Raises TypeError or ValueError unless each argument is a whole number of at least 1, or ``least``, or None.

    >>> from linrope.common.argument_checks import check_sizes
    >>> check_sizes(num_heads=0)
    Traceback (most recent call last):
    ValueError: num_heads=0: expected at least 1
    """
    check_integers(**arguments)
    for argument, value in arguments.items():
        if value is not None and value < least:
            raise ValueError(f"{argument}={value}: expected at least {least}")


def check_numbers(**arguments: object) -> None:
    """Raises TypeError unless each argument is a number, or None.

    >>> from linrope.common.argument_checks import check_numbers
    >>> check_numbers(base="1e4")
    Traceback (most recent call last):
    TypeError: base='1e4': expected a number
    """
    for argument, value in arguments.items():
        # float first: the check against the abstract class takes a microsecond.
        if value is not None and (isinstance(value, bool) or not isinstance(value, (float, Real))):
            raise TypeError(f"{argument}={value!r}: expected a number")


def check_integer_tensors(**arguments: Tensor) -> None:
    """Raises TypeError unless each tensor holds integers, of any width.

    >>> from linrope.common.argument_checks import check_integer_tensors
    >>> check_integer_tensors(index=torch.ones(2))
    Traceback (most recent call last):
    TypeError: index: got torch.float32, expected integers
    """
    import torch

    for argument, x in arguments.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{argument}: got {type(x).__name__}, expected a tensor of integers")
        if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            raise TypeError(f"{argument}: got {x.dtype}, expected integers")


def check_dense(name: str, x: object, device: torch.device | None = None) -> None:
    """Raises unless x is a dense tensor of real numbers, on this device if one is given.

    >>> from linrope.common.argument_checks import check_dense
    >>> check_dense("gate", torch.ones(2, dtype=torch.int64))
    Traceback (most recent call last):
    TypeError: gate: got torch.int64, expected float64, float32, bfloat16 or float16
    """
    import torch

    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
        kind = x.layout if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"{name}: got {kind}, expected a dense torch.Tensor")
    if x.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"{name}: got {x.dtype}, expected float64, float32, bfloat16 or float16")
    if device is not None and x.device != device:
        raise ValueError(f"{name}: got device {x.device}, expected {device}")
