"""Checks of arguments that take a name from a list."""

from collections.abc import Sequence
from difflib import get_close_matches


def expected_one_of(value: object, known: Sequence[str], also: str = "") -> str:
    """Ends an error message: lists the known names and suggests the one nearest to the value.

    also: other accepted values, in words.

    >>> from linrope.common.names import expected_one_of
    >>> expected_one_of("hlf", ("interleaved", "half"), also="a Rotary or None")
    "expected one of interleaved, half, a Rotary or None; did you mean 'half'?"
    """
    near = get_close_matches(str(value), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"expected one of {', '.join([*known, also] if also else known)}{hint}"


def check_name(argument: str, value: object, known: Sequence[str], also: str = "") -> None:
    """Raises ValueError unless the value is one of the known names; also: other accepted values, in words.

    >>> from linrope.common.names import check_name
    >>> check_name("layout", "hlf", ("interleaved", "half"))
    Traceback (most recent call last):
    ValueError: layout='hlf': expected one of interleaved, half; did you mean 'half'?
    """
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{argument}={value!r}: {expected_one_of(value, known, also)}")
