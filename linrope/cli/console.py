"""The console that all commands print to."""

from rich.console import Console

# Lines end where the text does: a terminal wraps long ones itself, and grep finds whole ones in a log. Numbers get
# no colours, and brackets in a path are no markup.
console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
if not console.is_terminal:
    console.width = 10_000  # of tables too
