"""Markdown extension: LaTeX in ```math fences and $`..`$ becomes MathML, which is drawn without a script.

It also takes the words "no-run" and "needs-native" out of fences. They tell tests/test_docs.py when not to run the
code; pymdownx.superfences accepts no second word and would show the fence as text.
"""

import html
import logging
import re
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor
from math_core import LatexError, LatexToMathML

_converter = LatexToMathML(fancy_error=False)


def _mathml(latex: str, display: bool) -> str:
    try:
        return _converter.convert_with_local_state(latex, displaystyle=display)
    except LatexError as error:
        # docs/build.py fails on this warning.
        logging.getLogger(__name__).warning("%s\nin the formula\n%s", error, latex)
        return html.escape(latex)


def block(source: str, language: str, css_class: str, *_: Any, **__: Any) -> str:
    """A fence's formula, as pymdownx.superfences asks for it."""
    return f'<div class="{css_class}">{_mathml(source, display=True)}</div>'


class _Inline(InlineProcessor):
    def handleMatch(self, m: Any, data: str) -> tuple[str, int, int]:
        return self.md.htmlStash.store(_mathml(m[1], display=False)), m.start(0), m.end(0)


class _OneWord(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        return [re.sub(r"```python (no-run|needs-native)$", "```python", line) for line in lines]


class Formulas(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(_OneWord(md), "one-word", 26)  # fences have 25
        md.inlinePatterns.register(_Inline(r"\$`([^`]+)`\$", md), "formula", 195)  # backticks have 190


def makeExtension(**options: Any) -> Formulas:
    return Formulas(**options)
