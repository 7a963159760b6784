"""Arguments that take a name from a list."""

import pytest

from linrope.common.names import check_name, expected_one_of

LAYOUTS = ("interleaved", "half")


def test_a_known_name_passes() -> None:
    check_name("layout", "half", LAYOUTS)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("hlf", "layout='hlf': expected one of interleaved, half; did you mean 'half'?"),
        ("xyz", "layout='xyz': expected one of interleaved, half"),
        (None, "layout=None: expected one of interleaved, half"),
        (["half"], "layout=['half']: expected one of interleaved, half; did you mean 'half'?"),
        ({}, "layout={}: expected one of interleaved, half"),
    ],
)
def test_another_value_raises_and_names_the_nearest(value: object, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011  the whole message is compared
        check_name("layout", value, LAYOUTS)
    assert str(error.value) == message


def test_what_else_is_accepted_stands_after_the_names() -> None:
    assert expected_one_of("x", LAYOUTS, also="a dict or None") == (
        "expected one of interleaved, half, a dict or None"
    )
