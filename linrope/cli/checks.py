"""Checks that several commands share, in the words of the command line."""

import math
from pathlib import Path

# Fields of the configs whose options have other names.
RENAMED = {"num_layers": "layers", "num_heads": "heads", "num_kv_heads": "kv_heads"}


def check_folder(folder: Path, option: str = "--out") -> None:
    """Raises ValueError if the folder that an option names, or a folder above it, is a file."""
    parts = (folder, *folder.parents)
    if file := next((part for part in parts if part.exists() and not part.is_dir()), None):
        raise ValueError(f"{option}={folder}: {file} is a file, expected a folder")


def check_at_least(**least: tuple[int, int]) -> None:
    """Raises ValueError for an option below its least value. Each is option_name=(value, least)."""
    for name, (value, smallest) in least.items():
        if value < smallest:
            raise ValueError(f"{option_of(name)}={value}: expected at least {smallest}")


def check_positive(**numbers: float) -> None:
    """Raises ValueError for a number that is not positive and finite."""
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{option_of(name)}={value}: expected a positive finite number")


def check_feature_map(name: str, erase_gate: str | None) -> None:
    """Raises ValueError for a map that a model with the normalizer cannot have. One with an erase gate has none."""
    if erase_gate not in (None, "none"):
        return
    from linrope import feature_maps  # not above: the command's --help would wait for PyTorch

    def is_positive(name: str) -> bool:
        return feature_maps.make(name, 16).positive

    if not is_positive(name):
        positive = ", ".join(filter(is_positive, feature_maps.NAMES))
        raise ValueError(f"--feature-map={name}: its features have both signs, expected one of {positive}")


def option_of(name: str) -> str:
    """The option that sets a parameter of this name.

    >>> from linrope.cli.checks import option_of
    >>> option_of("learning_rate")
    '--learning-rate'
    """
    return f"--{name.replace('_', '-')}"
