"""The options of ``linrope demo``; demonstration.py does the work."""

import math
from pathlib import Path
from typing import Annotated

import typer

from linrope.cli.checks import check_folder

PROMPT = "def main("


def demo(
    seconds: Annotated[float, typer.Option(help="How long to train each of two models.")] = 60.0,
    out: Annotated[Path, typer.Option(help="Folder for all results.", metavar="FOLDER")] = Path("runs/demo"),
) -> int:
    """Train a small model on real text, generate from it, and compare it with softmax attention, in 4 minutes.

    For comparison, a softmax model with as many parameters is trained for the same time.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"--seconds={seconds}: expected a positive finite number")
    check_folder(out)
    from linrope.cli.demonstration import demonstrate

    return demonstrate(seconds, out, PROMPT)
