"""Every ```python block of README.md and docs/*.md runs, page by page, in the page's order.

A block with the info string "python no-run" is only compiled. Without the native library so is one with "python
needs-native": the other blocks of its page run, and then the test is skipped with the reason.
"""

import re
from importlib.metadata import version
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from packaging.version import Version

from linrope.backends import native

ROOT = Path(__file__).parents[1]
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if page.is_file()]
BLOCK = re.compile(r"^( *)```python([^\n]*)\n(.*?)^\1``` *$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[int, str, str]]:
    """(lines above, info string after "python", code) of each block."""
    found = BLOCK.finditer(text)
    return [(text.count("\n", 0, match.start(3)), match[2].strip(), dedent(match[3])) for match in found]


MARKS = {
    "export.md": pytest.mark.xdist_group(
        "onnx"
    ),  # with the other tests that import the exporter and onnxruntime
    "drafts.md": pytest.mark.skipif(
        Version(version("transformers")) < Version("5.24"), reason="its models take the cache by another name"
    ),
}


@pytest.mark.parametrize(
    "page",
    [pytest.param(x, marks=MARKS.get(x.name, ())) for x in PAGES],
    ids=lambda page: page.name,
)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where the blocks write
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "__main__"}
    left_out = []
    for above, info, code in blocks(page.read_text("utf-8")):
        where = f"{page.name}, line {above}"
        assert info in ("", "no-run", "needs-native"), f"{where}: unknown info string {info!r}"
        # Empty lines in front: an error then names the line of the page.
        compiled = compile("\n" * above + code, str(page), "exec")
        if info == "needs-native" and native.why_not() is not None:
            left_out.append(where)
        elif info != "no-run":
            exec(compiled, names)
    if "linrope_transformers" in names:  # README leaves transformers' models on linrope
        names["linrope_transformers"].disable()
    if left_out:
        pytest.skip(f"all but {', '.join(left_out)} ran: {native.why_not()}")


def test_the_index_says_what_the_readme_says() -> None:
    """Two texts are the same but for links and line breaks: what linrope is, and what an installation requires."""

    def paragraphs(page: str) -> list[str]:
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", (ROOT / page).read_text("utf-8"))
        return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]

    readme, index = paragraphs("README.md"), paragraphs("docs/index.md")
    assert index[:2] == readme[:2]
    assert index[index.index("## Install") + 1] == readme[readme.index("## Install") + 1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_installs_from_an_index_that_has_no_linrope(page: Path) -> None:
    assert not re.search(r"pip install ['\"]?linrope", page.read_text("utf-8"))


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_the_tests_that_a_page_names_are_there(page: Path) -> None:
    file = ""
    for name in re.findall(r"`(tests/[\w/.]+|test_\w+)`", page.read_text("utf-8")):
        if name.startswith("tests/"):
            assert (ROOT / name).exists(), name
            file = (ROOT / name).read_text("utf-8") if name.endswith(".py") else ""
        else:
            assert f"def {name}(" in file, name


def test_blocks_are_found() -> None:
    text = "```python\na = 1\n```\n\n```\nnot this\n```\n\n- list\n\n    ```python no-run\n    b = 2\n    ```"
    assert blocks(f"{text}\n") == [(1, "", "a = 1\n"), (11, "no-run", "b = 2\n")]
