"""`rpcmp report`: what became of a run, or of several beside each other."""

from __future__ import annotations

from pathlib import Path

import click

from rpcmp.cli.options import require_writable
from rpcmp.cli.terminal import echo
from rpcmp.errors import ConfigError

REPORT = "report.html"
COMPARISON = "comparison.html"


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
    help=f"Where to write it. [default: {REPORT} in DIR, {COMPARISON} in the first of several]",
)
@click.option("--text", is_flag=True, help="Print tables instead.")
def report(folders: tuple[Path, ...], output: Path | None, text: bool) -> None:
    """Make one HTML file of the run in DIR, or of several to compare.

    Prints its path. DIR is the folder that a run of `rpcmp drive` has kept in `log.folder`, also of
    one that still goes on or was killed. The file needs nothing beside it and no network.

    \b
    Example:
      rpcmp report runs/digits-20261122-101500
      rpcmp report runs/digits-20261122-101500 runs/digits-20261122-113000 --text
    """
    from rpcmp.observability.run_folder.reader import read

    if text and output is not None:
        raise click.UsageError("--text prints to the terminal; give it or --output, not both")
    runs = [read(folder) for folder in folders]
    if text:
        from rpcmp.cli.runtable import run_tables
        from rpcmp.observability.run_folder.figures import compare

        run_tables(compare(runs))
        return
    from rpcmp.observability.dashboard.html import html

    path = output or folders[0] / (REPORT if len(runs) == 1 else COMPARISON)
    require_writable(path)
    try:
        if output is None:  # a run folder may be somebody else's: never write through a link in it
            path.unlink(missing_ok=True)
        path.write_text(html(runs), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    echo(path)
