"""The ``linrope`` command: demo, bench, train, eval, generate, convert, env."""

import sys


def main() -> None:
    """Runs the command line; says how to install its dependencies where they are missing."""
    try:
        from linrope.cli.app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"linrope: {error.name} is missing; install linrope[cli]")
    sys.exit(run(sys.argv[1:]))
