"""The options of ``linrope demo``; demonstration.py does the work."""

from pathlib import Path
from typing import Annotated

import typer

from linrope.cli.checks import check_folder, check_positive

PROMPT = "def main("


def demo(
    seconds: Annotated[float, typer.Option(help="How long to train each of two models.")] = 60.0,
    out: Annotated[Path, typer.Option(help="Folder for all results.", metavar="FOLDER")] = Path("runs/demo"),
) -> int:
    """Train a small model on real text, generate from it, and compare it with softmax attention, in 4 minutes.

    For comparison, a softmax model with as many parameters is trained for the same time.
    """
    check_positive(seconds=seconds)
    check_folder(out)
    from linrope.cli.demonstration import demonstrate

    return demonstrate(seconds, out, PROMPT)
