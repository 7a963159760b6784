"""Arguments that take a name from a list, beside the examples of linrope/common/argument_checks.py."""

import re

import pytest

from linrope.common.argument_checks import check_name

LAYOUTS = ("interleaved", "half")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("xyz", "layout='xyz': expected one of interleaved, half"),
        (None, "layout=None: expected one of interleaved, half"),
        (["half"], "layout=['half']: expected one of interleaved, half; did you mean 'half'?"),
        ({}, "layout={}: expected one of interleaved, half"),
    ],
)
def test_another_value_raises_and_names_the_nearest(value: object, message: str) -> None:
    check_name("layout", "half", LAYOUTS)
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}\Z"):
        check_name("layout", value, LAYOUTS)
