"""Faults put into the C++ kernels one at a time, each of them compiled, and whether the tests see them.

    python -m tests.campaigns.native_mutants --number 50 --seed 0

Each mutant is one change of one operator or constant in ``kernels/cpu``, drawn with a seed, in a copy of the tree. The
kernels of the instruction set that this machine uses, and the binding if the change is in it, are compiled anew; then
the tests run until the first fails. A survivor asks for a test, unless nobody can see what it changes.
"""

import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from linrope.backends import native
from tests.campaigns.command import numbers
from tests.campaigns.mutants import ROOT, Mutant, Verdict, copied, report

# Those that see most faults soonest come first.
TESTS = (
    "tests/backends/test_options.py",
    "tests/kernels/cpu",
    "tests/ops",
    "tests/backends/test_steps.py",
    "tests/backends/test_equation.py",
    "tests/backends/test_exact_cases.py",
    "tests/backends/test_sums_of_gradients.py",
    "tests/backends/test_half_precision.py",
    "tests/operation/test_from_sums.py",
    "tests/recurrence/test_state_in_place.py",
    "tests/backends/test_numerics.py",
)
# What can see a change, soon
NATIVE = "(native or cpu or operators or from_sums or in_place) and not compile and not checks"
LIMIT = 900  # seconds after which tests count as hanging
CHANGES = {
    r" < ": " <= ", r" <= ": " < ", r" > ": " >= ", r" >= ": " > ", r" == ": " != ", r" != ": " == ",
    r" \+ ": " - ", r" - ": " + ", r" \* ": " + ", r" / ": " * ", r" && ": " || ", r" \|\| ": " && ",
    r"\btrue\b": "false", r"\bfalse\b": "true", r"\b0\b": "1", r"\b1\b": "2", r" \+= ": " = ",
}  # fmt: skip
# What is not code, and what changes neither a result nor a check
SKIPPED = re.compile(r"^\s*(//|#|template|static_assert|namespace|case )|prefetch|bytes\(|operator")


def mutants(source: Path) -> list[Mutant]:
    """All changes that the sources offer."""
    found = []
    for path in [*sorted(source.glob("*.h")), source / "binding.cpp"]:
        if path.name == "amx.h" and native.instruction_set() != "amx":
            continue
        lines = path.read_text().splitlines()
        for i, line in enumerate(lines):
            code = line.split("//")[0]
            if SKIPPED.search(line):
                continue
            for pattern, other in CHANGES.items():
                for match in re.finditer(pattern, code):
                    after = line[: match.start()] + other + line[match.end() :]
                    whole = "\n".join([*lines[:i], after, *lines[i + 1 :], ""])
                    found.append(Mutant(path.name, i + 1, line, after, whole))
    return found


def included(source: Path, name: str) -> set[str]:
    """The files of the folder that a file includes, itself among them."""
    names = re.findall(r'#include "(.+?)"', (source / name).read_text())
    return {name}.union(*(included(source, other) for other in names))


class Library:
    """The library of a copy of the tree; only what a change has touched is compiled."""

    def __init__(self, tree: Path) -> None:
        self.tree, self.source = tree, tree / "kernels" / "cpu"
        spec = spec_from_file_location("copied_build", self.source / "build.py")
        assert spec is not None
        assert spec.loader is not None
        self.build: Any = module_from_spec(spec)
        spec.loader.exec_module(self.build)
        self.flags = [x if x != "-O3" else "-O1" for x in self.build.FLAGS]
        self.compiler, used = self.build.find_compiler(), native.instruction_set()
        self.objects = {isa: tree / f"kernel_{isa}.o" for isa in self.build.ISAS["x86_64"]}
        self.parts = {"binding": "binding.cpp", str(used): "kernel.cpp"}
        for isa in self.objects:
            self.compile(isa)
        self.compile("binding")

    def compile(self, part: str) -> None:
        if part == "binding":
            more = ["binding.cpp", f'-DLINROPE_BUILD="{self.build.digest()}"']
        else:
            more = ["kernel.cpp", f"-DISA={part}", *self.build.ISAS["x86_64"][part]]
        out = self.objects.setdefault(part, self.tree / "binding.o")
        command = [*self.compiler, *self.flags, "-fPIC", *more, "-c", "-o", out]
        subprocess.run(command, cwd=self.source, check=True, capture_output=True)

    def link(self) -> None:
        library = self.tree / "linrope" / "lib" / self.build.library_name("Linux x86_64")
        library.parent.mkdir(exist_ok=True)
        command = [*self.compiler, "-shared", "-o", library, *self.objects.values()]
        subprocess.run(command, check=True, capture_output=True)

    def judge(self, mutant: Mutant) -> str:
        """How the mutant ends: it does not compile, tests fail or hang, or it survives."""
        path = self.source / mutant.path
        original = path.read_text()
        path.write_text(mutant.source)
        touched = [part for part, main in self.parts.items() if mutant.path in included(self.source, main)]
        try:
            for part in touched:
                self.compile(part)
            self.link()
            return self.test()
        except subprocess.CalledProcessError:
            return "not compiled"
        finally:
            path.write_text(original)
            for part in touched:
                self.compile(part)

    def test(self) -> str:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *TESTS, "-k", NATIVE]
        paths = os.pathsep.join((str(self.tree), str(self.tree / "kernels")))
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, cwd=self.tree, env=environment, capture_output=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return "timed out"
        return "survived" if done.returncode == 0 else "killed"


def campaign(tree: Path, number: int, seed: int) -> Iterator[Verdict]:
    """The verdict on each mutant that compiles; RuntimeError where tests fail without any."""
    library = Library(tree)
    library.link()
    if library.test() != "survived":
        raise RuntimeError("tests fail without any mutant")
    for mutant in random.Random(seed).sample(mutants(library.source), number):
        begin = time.monotonic()
        if (how := library.judge(mutant)) != "not compiled":
            yield Verdict(mutant, how, time.monotonic() - begin)


def main(number: int, seed: int) -> int:
    tree = copied(ROOT)
    try:
        report(campaign(tree, number, seed))
    finally:
        shutil.rmtree(tree)
    return 0


if __name__ == "__main__":
    sys.exit(main(**numbers(__doc__, number=50, seed=0)))
