"""The layout of results in the terminal: names with values, and tables. Knows nothing of what is shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def facts(out: Console, pairs: Iterable[tuple[str, str]]) -> None:
    """Print names and values, one pair a line."""
    for name, value in pairs:
        out.print(f"  [dim]{name:<18}[/]{value}")


def rows(headings: Sequence[str], lines: Iterable[Sequence[str]], *, words: int = 1) -> Table:
    """A table with `words` columns of text, and columns of figures after them."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for at, heading in enumerate(headings):
        table.add_column(heading, justify="left" if at < words else "right")
    for line in lines:
        table.add_row(*line)
    return table
