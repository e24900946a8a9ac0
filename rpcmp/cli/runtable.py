"""The tables of `rpcmp report --text`."""

from __future__ import annotations

from collections.abc import Iterable

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rpcmp.runfolder.compare import Comparison
from rpcmp.runfolder.tables import tables

WIDTH = 10_000
"""Characters, more than a row has."""


def run_tables(found: Comparison) -> None:
    """Print how the runs went; of several also which settings and losses differ."""
    for table in tables(found):
        if table.rows:
            _print(table.title, found.names, table.rows)
        else:
            click.echo(f"{table.title}: none\n")
    if len(found.names) > 1:
        click.echo(found.verdict)


def _print(title: str, names: list[str], rows: Iterable[tuple[str, list[str]]]) -> None:
    table = Table(title, *names, box=None, header_style="bold", pad_edge=False)
    for name, values in rows:
        table.add_row(*map(escape, (name, *values)))
    # As wide as it is: a terminal wraps lines more legibly than rich folds cells.
    Console(width=WIDTH, highlight=False, soft_wrap=True).print(table)
    click.echo()
