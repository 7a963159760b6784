"""Errors in the words of the command line: --qk-norm in place of qk_norm=True."""

import re
from collections.abc import Sequence
from typing import Any

from linrope.cli.checks import RENAMED
from linrope.cli.layer_flags import FLAGS, word_for_none
from linrope.layer.config import OPTIONS

# No part of a path or of a text in quotes is a name.
_START = r"(?<![\w./'\"-])"
_END = r"(?![\w/'\"-])"


def in_option_words(message: str, parameters: Sequence[Any]) -> str:
    """The message with a command's options in place of the names and values of Python's parameters.

    num_heads=5 becomes --heads=5, gate=False --no-gate, and a write_gate --write-gate. None becomes what the first
    option that the message names takes for it. Options of LayerConfig that the command lacks are no way out for its
    user, so ``, or normalize=False`` is left out.

    parameters: those of the command, as typer makes them.
    """
    options = {p.name: p for p in parameters if p.param_type_name == "option"}
    options |= {name: options[other] for name, other in RENAMED.items() if other in options}
    if not options:
        return message
    if lacking := [name for name in OPTIONS if name not in options]:
        message = re.sub(rf",? or (?:{'|'.join(lacking)})=[\w.'-]+", "", message)
    names = "|".join(options)
    message = re.sub(
        rf"{_START}({names})=(True|False|None){_END}", lambda found: _flag(options, *found.groups()), message
    )
    message = re.sub(
        rf"{_START}(?:{names})(?==)|^(?:{names})(?=: got)", lambda found: _longest(options[found[0]]), message
    )
    # Without = only names with an underscore: the others are words of English.
    if words := [name for name in FLAGS if "_" in name and name in options]:
        pattern = rf"{_START}(?:an? )?({'|'.join(words)})(?!=){_END}"
        message = re.sub(pattern, lambda found: _longest(options[found[1]]), message)
    # The command line takes a name alone, without options of its own.
    message = re.sub(r"(?<==)\{'name': '([^']*)'[^{}]*\}", r"\1", message)
    first = re.match(r"--[\w-]+", message)
    none = None if first is None else word_for_none(first[0].lstrip("-").replace("-", "_"))
    return message if none is None else re.sub(rf"{_START}None{_END}", none, message)


def _longest(parameter: Any) -> str:
    option: str = max(parameter.opts, key=len)
    return option


def _flag(options: dict[str, Any], name: str, value: str) -> str:
    """The option with that value; unchanged if the command line has no word for the value."""
    option, opposite = _longest(options[name]), options[name].secondary_opts
    if options[name].is_flag and (value == "True" or opposite):
        return option if value == "True" else str(max(opposite, key=len))
    word = word_for_none(name)
    return f"{option}={value if value != 'None' or word is None else word}"
