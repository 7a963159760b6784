"""The campaign with mutants, on a module of six lines."""

from pathlib import Path

import pytest

from tests.campaigns.mutants import ROOT, TESTS, Verdict, campaign, drawn, mutants, report

MODULE = '''
def first(numbers, least=0):
    """The first number that is larger than least."""
    for i in range(len(numbers)):
        if numbers[i] > least and numbers[i] != 7:
            return i
    raise ValueError(f"{numbers}: expected one above {least + 0}")
'''
TEST = """
import pytest
from linrope.toy import first

def test_first():
    assert first([-1, 0, 3, 5]) == 2
    with pytest.raises(ValueError):
        first([-1])
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in (("linrope/__init__.py", ""), ("linrope/toy.py", MODULE), ("tests/test_toy.py", TEST)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    return tmp_path


@pytest.mark.long
def test_survivors_are_the_faults_that_no_test_sees(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tests = {"linrope/toy.py": ("tests/test_toy.py",)}
    share = report(campaign(tree, tests, number=100, seed=0, jobs=2, limit=120))
    *lines, total = capsys.readouterr().out.splitlines()
    survivors = sorted(line.rsplit(" (", 1)[0].split(":", 1)[1] for line in lines if line.startswith("surv"))
    assert survivors == ["2: 0 -> (1)", "5: 7 -> (6)", "5: 7 -> (8)"]
    assert total == f"{len(lines) - 3} of {len(lines)} mutants killed: {share:.1%}"
    assert (tree / "linrope" / "toy.py").read_text() == MODULE


def test_the_modules_and_their_tests_exist() -> None:
    assert [x for module, tests in TESTS.items() for x in (module, *tests) if not (ROOT / x).exists()] == []


def test_tests_that_fail_without_a_mutant_are_no_judges(tree: Path) -> None:
    (tree / "tests" / "test_toy.py").write_text("def test_nothing():\n    assert False\n")
    tests = {"linrope/toy.py": ("tests/test_toy.py",)}
    with pytest.raises(RuntimeError, match=r"tests fail without any mutant: tests/test_toy\.py"):
        list(campaign(tree, tests, number=1, seed=0, jobs=1, limit=120))


def test_tests_that_hang_kill_a_mutant(tree: Path) -> None:
    mutant = drawn(tree, ["linrope/toy.py"], 1, seed=0)[0]
    assert report([Verdict(mutant, how, 1.0) for how in ("killed", "timed out", "survived")]) == 2 / 3


def test_a_seed_draws_the_same_mutants_and_each_is_one_change(tree: Path) -> None:
    found = drawn(tree, ["linrope/toy.py"], 5, seed=1)
    assert found == drawn(tree, ["linrope/toy.py"], 5, seed=1) != drawn(tree, ["linrope/toy.py"], 5, seed=2)
    for mutant in mutants("toy.py", MODULE):
        lines = list(zip(MODULE.splitlines(), mutant.source.splitlines(), strict=True))
        assert [i for i, (a, b) in enumerate(lines, 1) if a != b] == [mutant.line]
