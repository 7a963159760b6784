"""Files of options: JSON or YAML."""

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import typer

from linrope.common.optional import need


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Makes the file's values the defaults of this call; options on the command line override them.

    Raises:
        ValueError: the file is not JSON or YAML, or has unknown options, an option twice, or values other than texts,
            numbers, true, false and null.
    """
    if path is None:
        return None
    try:
        text = path.read_text("utf-8")
        values = _read_json(text) if path.suffix == ".json" else _read_yaml(text)
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise ValueError(f"{path}: not readable as {kind} ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: got {type(values).__name__}, expected options and their values")
    parameters = {str(parameter.name): parameter for parameter in context.command.params}
    known = [name for name in parameters if name != "config"]
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in known:
            from linrope.common.argument_checks import expected_one_of

            raise ValueError(f"{path}: got the option {name!r}, {expected_one_of(name, known)}")
        if name in defaults:
            raise ValueError(f"{path}: got the option {name!r} twice, expected it once")
        if not isinstance(value, str | int | float | bool | None):
            kind = type(value).__name__
            raise ValueError(
                f"{path}: got a {kind} for {name}, expected a text, a number, true, false or null"
            )
        if isinstance(value, bool) and not getattr(parameters[name], "is_flag", False):
            raise ValueError(f"{path}: got {str(value).lower()} for {name}, expected a text or a number")
        defaults[name] = value
    context.default_map = defaults
    return path


def _read_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"got {next(name for name in names if names.count(name) > 1)!r} twice")
    return values


def _read_yaml(text: str) -> Any:
    """Reads YAML without aliases: a few hundred bytes of these stand for more than fits into memory."""
    yaml = need("yaml", "linrope[cli]")

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                event = self.peek_event()
                line = event.start_mark.line + 1
                raise ValueError(f"line {line}: got the alias *{event.anchor}, expected its value")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            _unique([(str(key.value), value) for key, value in node.value])
            values: dict[Hashable, Any] = super().construct_mapping(node, deep)
            return values

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
