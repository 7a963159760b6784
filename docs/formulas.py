"""Markdown extension: LaTeX in ```math fences and $`..`$ becomes MathML, which is drawn without a script."""

import html
import logging
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
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


class Formulas(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.inlinePatterns.register(_Inline(r"\$`([^`]+)`\$", md), "formula", 195)  # backticks have 190


def makeExtension(**options: Any) -> Formulas:
    return Formulas(**options)
