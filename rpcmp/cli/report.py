"""`rpcmp report`: the outcome of a run, or of several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rpcmp.checkpoint.files import write_durably
from rpcmp.cli import echo
from rpcmp.cli.options import require_writable
from rpcmp.errors import ConfigError

if TYPE_CHECKING:
    from rpcmp.observability.run_report import Comparison

REPORT = "report.html"
COMPARISON = "comparison.html"

WIDTH = 10_000
"""More characters than a row has: a terminal wraps lines more legibly than rich folds cells."""


@click.command()
@click.argument(
    "folders",
    metavar="DIR [DIR]...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"The file to write. [default: {REPORT} in DIR, {COMPARISON} in the first of several]",
)
@click.option("--text", is_flag=True, help="Print tables instead of writing a file.")
def report(folders: tuple[Path, ...], output: Path | None, text: bool) -> None:
    """Write an HTML report of the run in DIR, or compare several.

    Prints the report's path. DIR is the folder that a run of `rpcmp drive` has kept in
    `log.folder`. The run may still go on, or have been killed. The file needs no other files and no
    network.

    \b
    Example:
      rpcmp report runs/digits-20261122-101500
      rpcmp report runs/digits-20261122-101500 runs/digits-20261122-113000 --text
    """
    from rpcmp.observability.run_report import read

    if text and output is not None:
        raise click.UsageError("--text prints to the terminal; give it or --output, not both")
    runs = [read(folder) for folder in folders]
    if text:
        from rpcmp.observability.run_report import compare

        _print(compare(runs))
        return
    from rpcmp.observability.dashboard.html_report import html

    path = output or folders[0] / (REPORT if len(runs) == 1 else COMPARISON)
    if output is not None:
        require_writable(path)
    try:
        page = html(runs)
        if output is None:  # never through a link, or into a pipe, in a run folder of another user
            write_durably(path, [page.encode()], mode=0o644)
        else:
            path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    echo(path)


def _print(comparison: Comparison) -> None:
    from rpcmp.cli.console import Console, table
    from rpcmp.observability.run_report import tables

    for part in tables(comparison):
        if not part.rows:
            echo(f"{part.title}: none\n")
            continue
        heads = (part.title, *comparison.names)
        rows = [(name, *values) for name, values in part.rows]
        Console(width=WIDTH, soft_wrap=True).print(table(heads, rows, pad_edge=False))
        echo()
    if len(comparison.names) > 1:
        echo(comparison.verdict)
