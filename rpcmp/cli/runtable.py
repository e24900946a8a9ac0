"""The tables of `rpcmp report --text`."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from rpcmp.cli.console import Console
from rpcmp.cli.terminal import echo
from rpcmp.observability.run_folder.figures import Comparison, tables

WIDTH = 10_000
"""Characters, more than a row has."""


def run_tables(found: Comparison) -> None:
    """Print how the runs went; of several also which settings and losses differ."""
    for table in tables(found):
        if table.rows:
            _print(table.title, found.names, table.rows)
        else:
            echo(f"{table.title}: none\n")
    if len(found.names) > 1:
        echo(found.verdict)


def _print(title: str, names: list[str], rows: Iterable[tuple[str, list[str]]]) -> None:
    table = Table(title, *names, box=None, header_style="bold", pad_edge=False)
    for name, values in rows:
        table.add_row(name, *values)
    # As wide as it is: a terminal wraps lines more legibly than rich folds cells.
    Console(width=WIDTH, soft_wrap=True).print(table)
    echo()
