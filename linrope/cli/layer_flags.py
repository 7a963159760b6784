"""Flags that set options of the attention layer. They are made of the fields of LayerConfig, which describe them."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, TypeVar

import typer

from linrope.cli.checks import option_of
from linrope.common.argument_checks import check_name
from linrope.layer.config import OPTIONS, SHARED, LayerConfig
from linrope.layer.keywords import meaning
from linrope.layer.options import as_json

Command = TypeVar("Command", bound=Callable[..., Any])

FLAGS: dict[str, Any] = {
    name: each.metadata["flag"] for name, each in OPTIONS.items() if "flag" in each.metadata
}


def layer_flags(*names: str) -> Callable[[Command], Command]:
    """Adds a flag for each of these options to a command, whose last parameter, ``**flags``, receives their values.

    The value is None if the user did not give the flag.
    """

    def add(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [x for x in signature.parameters.values() if x.kind is not inspect.Parameter.VAR_KEYWORD]
        flags = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(name)
            )
            for name in names
        ]
        described: Any = command
        described.__signature__ = signature.replace(parameters=[*own, *flags])
        described.__annotations__ |= {flag.name: flag.annotation for flag in flags}
        return command

    return add


def _annotation(name: str) -> Any:
    flag, text = FLAGS[name], meaning(name).rstrip(".")
    if isinstance(flag, tuple):
        text += f": {', '.join(_names(name))}"
    elif flag is int:
        text += "; 0: none"
    kind: Any = flag if isinstance(flag, type) else str
    return Annotated[kind | None, typer.Option(help=f"{text[0].upper()}{text[1:]}.", show_default=False)]


def _names(name: str) -> list[str]:
    return [*FLAGS[name], "none"]


def word_for_none(name: str) -> str | None:
    """The word by which a flag says None, "none" or "0"; None if it has no such word."""
    flag = FLAGS.get(name)
    return "none" if isinstance(flag, tuple) else "0" if flag is int else None


def check_flags(flags: Mapping[str, Any], attention: str = "linear") -> None:
    """Raises ValueError for names that a flag does not take, and for options that this attention does not have."""
    for name, value in flags.items():
        if value is None:
            continue
        if attention == "softmax" and value is not False and name not in (*SHARED, "rotary"):
            raise ValueError(
                f"{option_of(name)}: softmax attention has no {name.replace('_', ' ')}; leave the option out or use "
                "--attention=linear"
            )
        if attention == "softmax" and value == "selective":
            raise ValueError(
                "--rotary=selective: softmax attention has no selective rotation; expected interleaved, half or none, "
                "or --attention=linear"
            )
        if isinstance(FLAGS[name], tuple):
            check_name(option_of(name), value, _names(name))
        if FLAGS[name] is int and value:
            LayerConfig(1, 1, **{name: value})  # raises for a number that the option does not take


def chosen_options(flags: Mapping[str, Any], base: LayerConfig) -> dict[str, Any]:
    """The options of LayerConfig that the flags set. A number, such as that of taps, changes the base's option."""
    options: dict[str, Any] = {}
    for name, value in flags.items():
        if value is None:
            continue
        record = getattr(base, name)
        if FLAGS[name] is int and record is not None and value:
            value = as_json(name, record) | {fields(record)[0].name: value}
        elif FLAGS[name] is int:
            value = value or None
        elif isinstance(FLAGS[name], tuple) and value == "none":
            value = None
        options[name] = value
    return options
