"""docs/build.py, which make docs and make check run, fails on every warning and on every dead link."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("zensical", "mkdocstrings", "math_core"):
    pytest.importorskip(package, reason="the documentation generator is not installed (extra docs)")

ROOT = Path(__file__).parents[1]
NAV = re.compile(r"^nav = \[.*?^\]", re.MULTILINE | re.DOTALL)
MODULE = '''
def double(x: float) -> float:
    """Doubles a number.

    Args:
        x: any number.
    """
    return 2 * x
'''
PAGE = """# A page

$`\\frac{a}{b}`$, [a heading](#formula), [double][linrope.double], ![a plot](assets/plot.png)

## Formula

```math
a = \\sum_j b_j
```

```python no-run
a = b
```

::: linrope.double
"""
# What is wrong; the file to change, the text to replace there, the new text, and what the output must name.
FAULTS = {
    "a link to no page": ("docs/index.md", "#formula", "nowhere.md", "page does not exist"),
    "a link to no heading": ("docs/index.md", "#formula", "#nowhere", "anchor does not exist"),
    "a cross-reference to no name": ("docs/index.md", "[linrope.double]", "[linrope.two]", "autoref"),
    "a missing image": ("docs/index.md", "plot.png", "graph.png", "assets/graph.png does not exist"),
    "another host": ("docs/index.md", "## Formula", "![](https://a.b/c.png)\n## Formula", "would load https:"),
    "an object that is not there": ("docs/index.md", "::: linrope.double", "::: linrope.two", ".two"),
    "a formula's unknown command": ("docs/index.md", "\\sum", "\\summ", "summ"),
    "an inline formula cut short": ("docs/index.md", "{b}", "{b", "formula"),
    "a fence with an unknown word": ("docs/index.md", "```math", "```math again", "a code block that was not"),
    "code that is cut": ("docs/index.md", "a = b\n", f"a = b  # {'x' * 102}\n", "111 characters of code in a line"),
    "a page without a menu entry": ("zensical.toml", "other.md", "index.md", "not in the menu"),
    "a menu entry without a page": ("zensical.toml", "other.md", "others.md", "others"),
    "an argument that is not there": ("linrope/__init__.py", "        x:", "        y:", "'y' does not appear"),
}  # fmt: skip
# What build.py looks for itself, after the pages are built: one build finds all of them
OWN = (
    "a missing image", "another host", "a fence with an unknown word", "code that is cut",
    "a page without a menu entry",
)  # fmt: skip
QUICK = (OWN, ("a formula's unknown command",), ("an argument that is not there",))
OTHERS = [(fault,) for fault in FAULTS if not any(fault in faults for faults in QUICK)]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A site of two pages, with this project's own settings."""
    (tmp_path / "docs/assets").mkdir(parents=True)
    (tmp_path / "linrope").mkdir()
    settings = NAV.sub('nav = ["index.md", "other.md"]', (ROOT / "zensical.toml").read_text("utf-8"))
    (tmp_path / "zensical.toml").write_text(settings, "utf-8")
    for name in ("build.py", "formulas.py", "docstring_examples.py", "assets/site.css"):
        shutil.copy(ROOT / "docs" / name, tmp_path / "docs" / name)
    (tmp_path / "docs/assets/plot.png").touch()
    (tmp_path / "docs/index.md").write_text(PAGE, "utf-8")
    (tmp_path / "docs/other.md").write_text("# Another page\n", "utf-8")
    (tmp_path / "linrope/__init__.py").write_text(MODULE, "utf-8")
    return tmp_path


def build(tree: Path) -> tuple[int, str]:
    """The exit code and the output, without colors."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    how = {"cwd": tree, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "docs/build.py"], **how)
    return done.returncode, re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)


def test_a_site_without_faults_is_built_with_its_formulas_in_mathml(tree: Path) -> None:
    code, output = build(tree)
    assert code == 0, output
    page = (tree / "site/index.html").read_text("utf-8")
    assert "<mfrac>" in page
    assert '<div class="formula"><math display="block">' in page


@pytest.mark.parametrize(
    "faults", [*QUICK, *(pytest.param(x, marks=pytest.mark.long) for x in OTHERS)], ids=str
)
def test_a_fault_fails_the_build(tree: Path, faults: tuple[str, ...]) -> None:
    for name, old, new, _ in (FAULTS[fault] for fault in faults):
        text = (tree / name).read_text("utf-8")
        assert old in text
        (tree / name).write_text(text.replace(old, new), "utf-8")
    of_code = faults == ("an argument that is not there",)
    for _ in range(2 if of_code else 1):  # the second build finds the first one's cache
        code, output = build(tree)
        assert code != 0
        for fault in faults:
            assert FAULTS[fault][3] in output
