"""The releases of other libraries: which are installed, and which pyproject.toml and constraints.txt ask for."""

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def requirements(text: str) -> list[Requirement]:
    """Those that hold for this Python, of the lines of a constraints file."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    found = [Requirement(line) for line in lines if line]
    return [x for x in found if x.marker is None or x.marker.evaluate(default_environment())]


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def other_releases() -> list[str]:
    """What is installed in another release than constraints.txt says: "torch 2.14.1 (constraints.txt: ==2.13.0)"."""
    pinned = requirements((ROOT / "constraints.txt").read_text("utf-8"))
    found = [(x, installed(x.name)) for x in pinned]
    return [
        f"{x.name} {now} (constraints.txt: {x.specifier})"
        for x, now in found
        if now and not x.specifier.contains(now)
    ]


def upper_bounds() -> dict[str, str]:
    """The upper bounds of pyproject.toml by package: {"torch": "<3"}."""
    quoted = re.findall(r'"([A-Za-z][^"]*<[^"]*)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    return {
        x.name: str(bound)
        for x in map(Requirement, quoted)
        for bound in x.specifier
        if bound.operator in ("<", "<=")
    }
