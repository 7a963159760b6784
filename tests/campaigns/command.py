"""The command line of a campaign."""

import argparse
from typing import Any

import torch


def numbers(description: str | None, **defaults: int | None) -> dict[str, Any]:
    """The command's options, all of them integers, with what they are if they are not given."""
    parser = argparse.ArgumentParser(description=description)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    torch.set_num_threads(1)
    return vars(parser.parse_args())
