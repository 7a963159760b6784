"""Mutants: small faults put into the sources one at a time, and whether the tests see them.

    python -m tests.campaigns.mutants --number 300 --jobs 2

Each mutant is one change of one expression or statement (``changes``), drawn with a seed, in a copy of the
tree. The tests of its module (``TESTS``) run until the first fails: then it is killed, as it is when they
hang. Printed are all mutants with their lines, and the share that was killed. A survivor asks for a test,
unless nobody can see what it changes (a shorter way to the same numbers, say).
"""

import argparse
import ast
import atexit
import importlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ATTENTION_KERNELS = (
    "angles", "backward", "decay", "forward", "gradients", "memory", "pieces", "segments", "step", "transition",
)  # fmt: skip
ROOT = Path(__file__).parents[2]
COPIED = ("linrope", "kernels", "tests", "docs", "benchmarks", "conftest.py", "pyproject.toml", "README.md")
PRELOADED = ("torch", "torch._dynamo", "sympy", "hypothesis", "pytest", "triton.runtime.interpreter")  # once
SAME_MTIME = 1.0e9  # of mutated files, so that none is taken for the module that Python has compiled before

B = "tests/backends"
# Those that see most faults soonest come first.
OPERATION = (
    f"{B}/test_options.py",
    f"{B}/test_equation.py",
    f"{B}/test_steps.py",
    f"{B}/test_exact_cases.py",
    "tests/operation/test_erase.py",
    f"{B}/test_gates.py",
    f"{B}/test_pieces.py",
    "tests/recurrence/test_state_in_place.py",
    f"{B}/test_stable_exponentials.py",
    f"{B}/test_invariance.py",
    "linrope/operation/functional.py",
)
ROTARY = (
    "tests/rotation/test_rotary.py",
    "tests/rotation/test_rotary_arguments.py",
    "tests/rotation/test_rotary_identity.py",
)
CHECKS = ("tests/operation/test_checks.py", "tests/test_hostile_inputs.py", "tests/layer/test_attention.py")
TRANSFORMS = (f"{B}/test_operators.py", f"{B}/test_transforms.py", f"{B}/test_compile.py")
TESTS: dict[str, tuple[str, ...]] = {
    "linrope/operation/functional.py": (*OPERATION, *CHECKS),
    **{
        f"linrope/operation/{name}.py": (
            *OPERATION,
            "tests/operation/test_decoding.py",
            *CHECKS,
            "tests/recurrence/test_state.py",
            f"{B}/test_numerics.py",
        )
        for name in ("attend", "map_facts", "plan", "positions")
    },
    "linrope/operation/checks.py": (*CHECKS, *OPERATION),
    "linrope/recurrence/state.py": (
        "tests/recurrence/test_state.py",
        "tests/recurrence/test_state_in_place.py",
        "tests/recurrence/test_state_memory.py",
        "tests/recurrence/test_state_files.py",
        *CHECKS,
        *OPERATION,
        "tests/operation/test_decoding.py",
        "tests/common/test_files.py",
    ),
    "linrope/rotation/rotary.py": (*ROTARY, "tests/rotation/test_frequencies.py", *OPERATION),
    "linrope/rotation/angles.py": ("tests/rotation/test_angles.py", *ROTARY, *OPERATION),
    "linrope/rotation/frequencies.py": ("tests/rotation/test_frequencies.py", *ROTARY),
    "linrope/recurrence/decay.py": (*OPERATION, f"{B}/test_numerics.py"),
    "linrope/recurrence/chunks.py": (*OPERATION, f"{B}/test_numerics.py"),
    "linrope/recurrence/transition.py": (
        *OPERATION,
        f"{B}/test_numerics.py",
        "tests/distributed/test_operation.py",
    ),
    "linrope/recurrence/packing.py": ("tests/recurrence/test_packing.py", *OPERATION, CHECKS[1]),
    "linrope/layer/state.py": ("tests/layer/test_state.py", "tests/decode"),
    **{
        f"linrope/decode/{name}.py": ("tests/decode", "tests/models/huggingface/test_prepared.py")
        for name in ("model_step", "preparation")
    },
    "linrope/ops/arguments.py": ("tests/ops", "tests/backends/test_missing_kernels.py"),
    **{f"linrope/ops/{name}.py": ("tests/ops",) for name in ("convolution", "norm")},
    "linrope/operation/features.py": OPERATION,
    "linrope/backends/__init__.py": (*OPERATION, *CHECKS, "tests/test_versions.py", TRANSFORMS[1]),
    "linrope/recurrence/call.py": (*OPERATION, *TRANSFORMS),
    **{
        f"linrope/backends/{name}.py": (*OPERATION, f"{B}/test_numerics.py", f"{B}/test_sums_of_gradients.py")
        for name in ("eager", "key_sum", "chunk_decay", "delta_rule")
    },
    "linrope/backends/native.py": (
        TRANSFORMS[0],
        *OPERATION,
        "tests/recurrence/test_state_memory.py",
        "tests/operation/test_decoding.py",
        "tests/kernels/cpu",
    ),
    **{
        f"linrope/backends/{name}.py": (*TRANSFORMS, *OPERATION, "tests/operation/test_decoding.py")
        for name in ("bridge", "operator")
    },
    "linrope/backends/equation.py": OPERATION,
    "linrope/backends/triton.py": (
        f"{B}/test_options.py",
        f"{B}/test_steps.py",
        f"{B}/test_equation.py",
        "tests/kernels/test_kernels.py",
        TRANSFORMS[2],
    ),
    # The Triton kernels, in the interpreter
    **{
        f"kernels/linrope_kernels/{name}.py": (
            f"{B}/test_options.py",
            f"{B}/test_steps.py",
            f"{B}/test_equation.py",
            f"{B}/test_gates.py",
            "tests/kernels/test_kernels.py",
        )
        for name in ATTENTION_KERNELS
    },
    **{
        f"kernels/linrope_kernels/{name}.py": ("tests/kernels/test_norm.py", "tests/ops/test_norm.py")
        for name in ("norm", "partial_sums")
    },
    "linrope/models/huggingface/cache.py": (
        "tests/models/huggingface/test_generation.py",
        "tests/models/huggingface/test_modeling.py",
        "tests/models/huggingface/test_resume.py",
    ),
    "linrope/layer/norm.py": ("tests/layer/test_norm.py",),
    "linrope/models/training/batch.py": (
        "tests/models/test_training.py",
        "tests/models/test_training_corpus.py",
    ),
}


class Mutant(NamedTuple):
    """One change of a file."""

    path: str
    line: int
    before: str
    after: str
    source: str  # the whole file, changed


class Verdict(NamedTuple):
    mutant: Mutant
    how: str  # "killed", "timed out" or "survived"
    seconds: float


COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult,
}  # fmt: skip
METHODS = {"all": "any", "any": "all", "min": "max", "max": "min"}


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What a node may become."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield ast.Compare(node.left, [COMPARISONS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1)
        yield ast.Constant(node.value - 1)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert, ast.USub)):
        yield node.operand
    elif isinstance(node, ast.Attribute) and node.attr in METHODS and isinstance(node.ctx, ast.Load):
        yield ast.Attribute(node.value, METHODS[node.attr], node.ctx)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Call) and len(node.args) > 1 and not isinstance(node.args[1], ast.Starred):
        yield ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords)
    elif isinstance(node, (ast.AugAssign, ast.Raise)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield ast.Pass()


def visited(node: ast.AST) -> Iterator[ast.AST]:
    """The node and what is in it, but for annotations, defaults of overloads and texts of errors."""
    yield node
    if isinstance(node, ast.Raise):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from visited(child)


def mutants(path: str, source: str) -> list[Mutant]:
    """All of a file."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    data, found = source.encode(), []
    for node in visited(ast.parse(source)):
        for changed in changes(node):
            first = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
            last = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
            text = ast.unparse(ast.fix_missing_locations(changed))
            if isinstance(node, ast.expr):
                text = f"({text})"
            before = data[first:last].decode()
            whole = (data[:first] + text.encode() + data[last:]).decode()
            try:
                compile(whole, path, "exec")
            except SyntaxError:  # a part of an f-string or of a pattern
                continue
            found.append(Mutant(path, node.lineno, before, text, whole))  # type: ignore[attr-defined]
    return found


def drawn(tree: Path, paths: Sequence[str], number: int, seed: int) -> list[Mutant]:
    """So many, of all files as often as they can be changed."""
    possible = [mutant for path in sorted(paths) for mutant in mutants(path, (tree / path).read_text())]
    return random.Random(seed).sample(possible, min(number, len(possible)))


def copied(tree: Path) -> Path:
    """A copy of what the tests need, in a new folder."""
    copy = Path(tempfile.mkdtemp(prefix="mutants-"))
    for name in COPIED:
        if (tree / name).is_dir():
            shutil.copytree(tree / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (tree / name).exists():
            shutil.copy2(tree / name, copy / name)
    return copy


def passes(tree: Path, tests: Sequence[str], limit: float, *, cached: bool = True) -> bool | None:
    """Whether the tests pass, in a child, which has imported most already; None: they hang."""
    child = os.fork()
    if child == 0:
        _run_tests(tree, tests, cached)
    until = time.monotonic() + limit
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _run_tests(tree: Path, tests: Sequence[str], cached: bool) -> None:
    """Never returns. Nothing of the tree that this script is from stays imported."""
    code = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        os.chdir(tree)
        sys.dont_write_bytecode = cached
        sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT), str(ROOT / "kernels"))]
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "linrope")]:
            del sys.modules[name]
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = int(pytest.main([*options, *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


_worker: dict[str, Path] = {}


def _begin(tree: Path, preloaded: Sequence[str]) -> None:
    """Of a worker: a copy of the tree of its own."""
    os.environ["TRITON_INTERPRET"] = "1"
    # It may have options that only this project's conftest.py defines.
    os.environ.pop("PYTEST_ADDOPTS", None)
    for name in preloaded:
        importlib.import_module(name)
    _worker["tree"] = copied(tree)
    atexit.register(shutil.rmtree, _worker["tree"], ignore_errors=True)


def _baseline(tests: Sequence[str], limit: float) -> bool | None:
    return passes(_worker["tree"], tests, limit, cached=False)


def _judge(task: tuple[Mutant, Sequence[str], float]) -> Verdict:
    mutant, tests, limit = task
    file = _worker["tree"] / mutant.path
    whole, when, begin = file.read_bytes(), file.stat().st_mtime, time.monotonic()
    try:
        file.write_text(mutant.source)
        os.utime(file, (SAME_MTIME, SAME_MTIME))
        # File by file, since a fault mostly shows in the first, and to collect the others takes longer.
        good: bool | None = True
        for test in tests:
            good = good and passes(_worker["tree"], (test,), limit)
    finally:
        file.write_bytes(whole)
        os.utime(file, (when, when))
    how = {True: "survived", False: "killed", None: "timed out"}[good]
    return Verdict(mutant, how, time.monotonic() - begin)


def campaign(
    tree: Path, tests: dict[str, tuple[str, ...]], *, number: int, seed: int, jobs: int, limit: float,
    preloaded: Sequence[str] = (),
) -> Iterator[Verdict]:  # fmt: skip
    """The verdict on each mutant, as it is known; RuntimeError where tests fail without any."""
    chosen = drawn(tree, list(tests), number, seed)
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, _begin, (tree, preloaded)) as pool:
        needed = dict.fromkeys(test for mutant in chosen for test in tests[mutant.path])
        if not pool.apply(_baseline, (list(needed), 10 * limit)):
            raise RuntimeError(f"tests fail without any mutant: {' '.join(needed)}")
        tasks = [(mutant, tests[mutant.path], limit) for mutant in chosen]
        yield from pool.imap_unordered(_judge, tasks)


def report(verdicts: Iterable[Verdict]) -> float:
    """Prints each survivor as it comes, and at the end the share that was killed, which it returns."""
    count = killed = 0
    for mutant, how, seconds in verdicts:
        count, killed = count + 1, killed + (how != "survived")
        print(
            f"{how:9} {mutant.path}:{mutant.line}: {_line(mutant.before)} -> {_line(mutant.after)} "
            f"({seconds:.0f} s)",
            flush=True,
        )
    share = killed / max(count, 1)
    print(f"{killed} of {count} mutants killed: {share:.1%}")
    return share


def _line(text: str) -> str:
    return " ".join(text.split())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=600, help="seconds after which tests count as hanging")
    parser.add_argument("--only", nargs="*", help="parts of the names of the modules to change")
    given = parser.parse_args(arguments)
    tests = {
        path: files
        for path, files in TESTS.items()
        if given.only is None or any(part in path for part in given.only)
    }
    report(
        campaign(
            ROOT, tests, number=given.number, seed=given.seed, jobs=given.jobs, limit=given.limit,
            preloaded=PRELOADED,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
