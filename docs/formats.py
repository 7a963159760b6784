"""How the pages write numbers and tables, and which results they show."""

import re
from collections.abc import Iterable
from pathlib import Path


def newest_first(folder: Path, name: str) -> list[Path]:
    """The results of a kind. Their names end with a date and, for a later one of that day, with a number."""
    found = {
        path: re.fullmatch(rf"{name}-(20\d\d-\d\d-\d\d)(?:-(\d+))?", path.stem)
        for path in folder.glob("*.json")
    }
    dated = {path: (match[1], int(match[2] or 1)) for path, match in found.items() if match}
    return sorted(dated, key=dated.__getitem__, reverse=True)


def two_digits(x: float) -> str:
    """With two significant digits."""
    return f"{float(f'{x:.2g}'):,g}"


def multiple(ratio: float) -> str:
    return f"{two_digits(ratio)}x"


def milliseconds(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f} us" if seconds < 1e-3 else f"{1e3 * seconds:,.1f} ms"


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    columns = head.split("|")
    lines = [f"| {head} |", "|" + "---|" * len(columns), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(re.sub(r"\|  +(?=\|)", "| ", line) for line in lines)
