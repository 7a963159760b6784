"""Upper bounds of pyproject.toml, and when one can go."""

import pytest

from tests.support import releases
from tests.support.releases import installed, other_releases, upper_bounds

REASONS = {
    "pytest": "test_pytest_is_bounded_while_xdist_needs_it",
    "torch": "the next major release may break anything",
    "zensical": "0.0.74 and later require zensical-ui, a package that not every index has; they were not tried",
}


def test_each_upper_bound_has_a_reason() -> None:
    assert upper_bounds() == {"pytest": "<9.2", "torch": "<3", "zensical": "<0.0.74"}
    assert upper_bounds().keys() == REASONS.keys()


def test_pytest_is_bounded_while_xdist_needs_it() -> None:
    """pytest-xdist 3.8.0 puts no tests in groups with pytest 9.2: its issue 1386."""
    now = installed("pytest-xdist")
    assert now in (None, "3.6.1", "3.7.0", "3.8.0"), f"pytest-xdist {now}: try without the bound pytest<9.2"


def test_releases_that_differ_from_the_constraints_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "installed", {"transformers": "99.1", "einops": "0.8.2"}.get)
    (line,) = other_releases()
    assert line.startswith("transformers 99.1 (constraints.txt: ==")
