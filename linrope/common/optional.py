"""Imports packages that only some runs require."""

from importlib import import_module
from typing import Any


def need(module: str, package: str) -> Any:
    """Imports the module.

    Raises:
        ModuleNotFoundError: the module is missing; the message says which package to install.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise ModuleNotFoundError(f"{error.name} is missing; install {package}", name=error.name) from error
