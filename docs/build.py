"""Builds the documentation into site/ and fails on every warning; make docs and make check both run this.

Zensical's strict mode fails on a link to a page, heading or Python name that does not exist. It ignores
warnings that are logged (griffe's, about docstrings), and finds neither a missing image nor a page that the
menu leaves out. This script fails on those too, on a code block that was not recognized or is wider than the page, and
on a page that would load a script, style, font or image from another host.
"""

import logging
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import zensical

ROOT = Path(__file__).parents[1]
SITE = ROOT / "site"
WIDTH = 110  # characters of code that a page shows without scrolling, by docs/assets/site.css


class Warnings(logging.Handler):
    """Keeps the messages of all warnings and errors that are logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))


class Page(HTMLParser):
    """Collects what a page links to and what it loads, its code, and whether the marks of a fence are left as text."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.has_marks = self.in_code = False
        self.code = ""
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.feed(file.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.in_code |= tag == "pre"
        for name, value in attrs:
            if name in ("href", "src") and value:
                (self.links if tag == "a" else self.loads).add(value)

    def handle_endtag(self, tag: str) -> None:
        if tag == "pre":
            self.in_code = False
            self.code += "\n"

    def handle_data(self, data: str) -> None:
        self.has_marks |= "```" in data
        self.code += data if self.in_code else ""


def target(file: Path, address: str) -> Path | None:
    """The file of the site that an address on this page means; None for an address on another host."""
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return None
    start = SITE if parts.path.startswith("/") else file.parent
    path = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else file
    return path / "index.html" if path.is_dir() else path


def faults_of_pages() -> list[str]:
    files = [file for file in sorted(SITE.rglob("*.html")) if file.name != "404.html"]
    faults = []
    for file in files:
        page, name = Page(file), file.relative_to(SITE)
        if page.has_marks:
            faults.append(f"{name}: ``` in the text: a code block that was not recognized")
        faults += [
            f"{name}: {len(line)} characters of code in a line, expected at most {WIDTH}: {line}"
            for line in page.code.splitlines()
            if len(line) > WIDTH
        ]
        for address in sorted(page.links | page.loads):
            found = target(file, address)
            if found is not None and not found.is_file():
                faults.append(f"{name}: {address} does not exist")
            if found is None and address in page.loads and not address.startswith("data:"):
                faults.append(f"{name}: would load {address}")
    home = SITE / "index.html"
    menu = {target(home, address) for address in Page(home).links}
    return faults + [f"{file.relative_to(SITE)}: not in the menu" for file in files if file not in menu]


def main() -> int:
    warnings = Warnings()
    logging.getLogger().addHandler(warnings)
    logging.captureWarnings(True)
    try:
        # Clean: a page from the cache would not repeat its warnings.
        zensical.build(str(ROOT / "zensical.toml"), {"clean": True, "strict": True})
        faults = faults_of_pages()
    except RuntimeError as error:
        faults = [str(error)]
    faults = warnings.messages + faults
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
