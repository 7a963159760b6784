"""Griffe extension for zensical.toml: makes Markdown show docstrings as they are, and signatures as ``shows`` has them.

Examples would be taken for quotations, and <phi, psi> in a sentence for HTML.
"""

import re
from typing import Any

import griffe


def as_markdown(text: str) -> str:
    """Puts each run of lines that starts with >>> into a python fence; escapes < before a letter in text."""
    lines: list[str] = []
    inside = False
    for line in [*text.splitlines(), ""]:
        if not inside and line.startswith(">>> "):
            lines.append("```python")
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        indented = line.startswith("    ")  # an equation, which Markdown leaves alone
        lines.append(line if inside or indented else re.sub(r"<(?=[A-Za-z])", "&lt;", line))
    return "\n".join(lines)


class DocstringExamples(griffe.Extension):
    def on_module(self, *, mod: Any, **_: Any) -> None:
        """Replaces what the source says of functions that a table makes, by what Python says."""
        if mod.path != "linrope.integrations.fla.functions":
            return
        parser = {"docstring_parser": mod.docstring.parser, "docstring_options": mod.docstring.parser_options}
        for name, function in griffe.inspect(mod.path, **parser).functions.items():
            source = mod.members.get(name)
            if isinstance(source, griffe.Attribute):
                function.lineno = source.lineno  # the order on the page
                mod.set_member(name, function)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
        if not isinstance(obj, griffe.Function):
            return
        for shows in (text for x in obj.decorators if "shows(" in (text := str(x.value))):
            for name in {"others", "unknown"} & {x.name for x in obj.parameters}:
                del obj.parameters[name]
            for name in re.findall(r"\w+", shows.partition("required=")[2]):
                obj.parameters[name].default = None
