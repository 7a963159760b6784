"""The console that all commands print to, and the form of their tables."""

from rich import box
from rich.console import Console
from rich.table import Table

# Lines end where the text does: a terminal wraps long ones itself, and grep finds whole ones in a log. Numbers get
# no colours, and brackets in a path are no markup.
console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
if not console.is_terminal:
    console.width = 10_000  # of tables too


def plain_table(title: str) -> Table:
    """A table without lines between columns, to fit into 80 characters."""
    return Table(title=title, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
