"""The layers of the code: imports point down, nothing reaches for a GPU library, files stay short."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import linrope
from tests.support.sources import parsed

ROOT = Path(linrope.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
KERNELS_USER = ROOT / "backends" / "triton.py"
KERNEL_FILES = sorted((ROOT.parent / "kernels").rglob("*.py"))

# From top to bottom. The rooms of one floor do not know each other.
FLOORS = [
    {"__main__"},
    {"cli"},
    {"first_use", "integrations", "models", "versions"},
    {"conformance", "decode", "distributed"},
    {"layer"},
    {"ops"},
    {"operation"},
    {"backends"},
    {"feature_maps"},
    {"recurrence"},
    {"cuda_graphs", "rotation"},
    {"common"},
]
RANK = {name: rank for rank, level in enumerate(FLOORS) for name in level}
PUBLIC = RANK["layer"]  # linrope itself re-exports all from there down


def imported(tree: ast.Module, package: str) -> Iterator[str]:
    """Absolute names of the modules that the source imports, wherever the statement stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def upward(tree: ast.Module, module: str, is_package: bool = False) -> list[str]:
    """The imports in a linrope module's source that the order of FLOORS forbids."""
    own = module.split(".")[1]
    found = []
    for name in imported(tree, module if is_package else module.rpartition(".")[0]):
        parts = name.split(".")
        if parts[0] != "linrope":
            continue
        other = parts[1] if len(parts) > 1 else ""
        rank = RANK.get(other, PUBLIC)  # a name of linrope/__init__.py, where it is no module
        if other != own and rank <= RANK[own]:
            found.append(name)
    return found


def module_of(path: Path) -> str:
    """The name under which Python imports the file."""
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path) for path in FILES} - {"linrope"}


def test_imports_point_down_only() -> None:
    for path in set(FILES) - {ROOT / "__init__.py"}:
        module = module_of(path)
        assert module.split(".")[1] in RANK, f"{path} has no place in FLOORS"
        assert upward(parsed(path), module, path.name == "__init__.py") == [], path


@pytest.mark.parametrize(
    ("source", "module", "found"),
    [
        ("from linrope.layer.attention import X", "operation.functional", ["linrope.layer.attention.X"]),
        ("from linrope import layer", "operation.functional", ["linrope.layer"]),
        ("from linrope import Rotary", "layer.attention", ["linrope.Rotary"]),
        ("import linrope.cli.main", "models.lm", ["linrope.cli.main"]),
        ("def f():\n    from ..operation.functional import X", "backends.eager", ["linrope.operation.functional.X"]),
        ("from linrope.recurrence.state import X", "common.files", ["linrope.recurrence.state.X"]),
        ("from linrope.backends.eager import X", "feature_maps.base", ["linrope.backends.eager.X"]),
        ("import linrope", "rotation.rotary", ["linrope"]),
        ("from linrope.common.files import X", "recurrence.state", []),
        ("from linrope import Rotary", "models.lm", []),
        ("from linrope import backends\nimport torch", "operation.functional", []),
        ("from .base import X", "feature_maps.favor", []),
    ],
)  # fmt: skip
def test_the_check_itself_finds_upward_imports(source: str, module: str, found: list[str]) -> None:
    assert upward(ast.parse(source), f"linrope.{module}") == found


def test_the_picture_of_the_layers_is_up_to_date() -> None:
    picture = Path(__file__).parents[1] / "docs" / "assets" / "layers.svg"  # docs/layers.py draws it
    texts = re.findall("<!-- (.*) -->", picture.read_text("utf-8"))
    assert [x for x in texts if x in RANK] == [x for floor in FLOORS for x in sorted(floor - {"__main__"})]


def tops(path: Path, package: str) -> set[str]:
    """The packages that the file imports."""
    return {name.split(".")[0] for name in imported(parsed(path), package)}


def test_one_file_imports_the_kernels_and_none_triton() -> None:
    for path in FILES:
        own = {"linrope_kernels"} if path == KERNELS_USER else set()
        assert tops(path, module_of(path.parent)) & {"triton", "linrope_kernels"} == own, path


def test_the_kernels_import_torch_and_triton_only() -> None:
    for path in KERNEL_FILES:
        allowed = {"torch", "triton", "linrope_kernels", *sys.stdlib_module_names}
        assert tops(path, path.parent.name) <= allowed, path


def test_files_stay_under_400_lines() -> None:
    assert [x for x in (*FILES, *KERNEL_FILES) if len(x.read_text("utf-8").splitlines()) >= 400] == []


def imported_when_loaded(path: Path) -> set[str]:
    """The modules of linrope that a module imports before it runs anything."""
    outside = [node for node in parsed(path).body if not isinstance(node, ast.If)]  # if TYPE_CHECKING
    names = imported(ast.Module(outside, []), module_of(path))
    return {m for name in names for m in (name, name.rpartition(".")[0]) if m in MODULES} - {module_of(path)}


def circles(graph: dict[str, set[str]]) -> list[str]:
    """The modules that lie on a circle of imports."""
    while leaves := [name for name, others in graph.items() if not others & graph.keys()]:
        graph = {name: others for name, others in graph.items() if name not in leaves}
    return sorted(graph)


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module_of(path): imported_when_loaded(path) for path in FILES if path.name != "__init__.py"}
    assert circles(graph) == []


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"a"}, "c": {"a"}, "d": set()}) == ["a", "b", "c"]
