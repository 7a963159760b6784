"""The results: a file with one JSON object per line, a line per run."""

import json
import os
from pathlib import Path
from typing import Any

Line = dict[str, Any]
NAME = "runs.jsonl"


def read(folder: Path) -> list[Line]:
    """All whole lines; the last one may be torn where a run was killed as it wrote.

    Raises:
        ValueError: another line is no JSON object.
    """
    path = folder / NAME
    if not path.exists():
        return []
    found = []
    whole, _, _ = path.read_text().rpartition("\n")
    for number, text in enumerate(whole.splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if not isinstance(line, dict):
            raise ValueError(f"{path}, line {number}: got {text[:40]!r}, expected an object")
        found.append(line)
    return found


def append(folder: Path, line: Line) -> None:
    """Adds a line, after dropping a torn one."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / NAME, "ab+") as file:
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
        file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
