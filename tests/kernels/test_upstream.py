"""The reduced cases of Triton's faults print what their README says of the version that is installed."""

import re
from pathlib import Path

import pytest
import triton

from tests.kernels.compiled import run_compiled_text

FOLDER = Path(__file__).parent / "upstream"
README = (FOLDER / "README.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+\.py)\n(.*?)(?=^## |\Z)", README, re.M | re.S))


def blocks(section: str) -> dict[str, str]:
    """What the README says that a file prints, by the version of Triton."""
    printed = re.findall(r"^```text\nTriton ([^\n]*)\n(.*?)^```", section, re.M | re.S)
    return {name: f"Triton {name}\n{rest}" for names, rest in printed for name in names.split(", ")}


def test_every_case_is_described_with_the_same_versions() -> None:
    assert SECTIONS.keys() == {path.name for path in FOLDER.glob("*.py")}
    assert len({tuple(blocks(section)) for section in SECTIONS.values()}) == 1


@pytest.mark.long
@pytest.mark.parametrize("name", SECTIONS)
def test_a_case_prints_what_its_readme_says(name: str) -> None:
    expected = blocks(SECTIONS[name]).get(triton.__version__)
    if expected is None:
        pytest.skip(f"nothing was written down for Triton {triton.__version__}")
    assert run_compiled_text(str(FOLDER / name)) == expected
