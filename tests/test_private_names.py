"""Private names of other packages are used in one module only, where each has its reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import linrope
from tests.support.sources import parsed

ROOT = Path(linrope.__file__).parents[1]
FILES = [
    *sorted((ROOT / "linrope").rglob("*.py")),
    *sorted((ROOT / "kernels" / "linrope_kernels").rglob("*.py")),
]
HOME = ROOT / "linrope" / "common" / "private_names.py"
DOCUMENTED = {"_asdict", "_fields", "_replace"}  # of named tuples


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def members(tree: ast.AST) -> Iterator[str]:
    """What the source's own classes define, and what it assigns to attributes of any object."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for item in ast.walk(node):
                if isinstance(item, ast.FunctionDef):
                    yield item.name
                elif isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
                    yield item.id
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr


def by_text(node: ast.Call) -> bool:
    """True for getattr(x, "name") and its kin, and for vars(x).get("name")."""
    function = ast.unparse(node.func)
    return function in ("getattr", "hasattr", "setattr") or function.startswith("vars(")


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_names(tree: ast.AST, own: set[str]) -> list[str]:
    """Private names that are imported from other packages, or read from objects and not in ``own``."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own | DOCUMENTED:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and not (
            node.level or (node.module or "").startswith("linrope")
        ):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in names if any(map(is_private, name.split(".")))]
        elif isinstance(node, ast.Import):
            found += [x.name for x in node.names if any(map(is_private, x.name.split(".")))]
        elif isinstance(node, ast.Call) and by_text(node):
            names = [x.value for x in node.args if isinstance(x, ast.Constant) and isinstance(x.value, str)]
            found += [ast.unparse(node) for name in names if is_private(name) and name not in own]
    return found


def test_one_module_uses_private_names_of_other_packages() -> None:
    trees = {path: parsed(path) for path in FILES}
    own = {name for tree in trees.values() for name in members(tree)}
    assert {path for path, tree in trees.items() if private_names(tree, own)} == {HOME}


@pytest.mark.parametrize(
    "source",
    ["torch._C._len_torch_dispatch_stack()", "x._version", "from torch.utils import _pytree", "import torch._dynamo",
     "from torch._subclasses.fake_tensor import FakeTensor", "import torch._inductor as x", "op._schema.arguments",
     "from transformers.modeling_utils import _load", "getattr(module, '_forward_hooks')",
     "vars(module).get('_old_forward', module.forward)"],
)  # fmt: skip
def test_the_check_itself_finds_private_names(source: str) -> None:
    assert private_names(ast.parse(source), set())


def test_own_private_names_are_none_of_its_business() -> None:
    source = "class A:\n def _f(self): self._x = 1\na._f()\na._x\nfrom linrope.a import _b\nx._replace(a=1)"
    tree = ast.parse(source)
    assert private_names(tree, set(members(tree))) == []
