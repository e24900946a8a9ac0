"""`rpcmp report`: what became of a run, or of several beside each other."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument(
    "folders",
    metavar="DIR [DIR]...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
)
def report(folders: tuple[Path, ...]) -> None:
    """Show how the run in DIR went; compare the runs in several.

    DIR is the folder that a run of `rpcmp drive` has kept in `log.folder`, also of one that still
    goes on or was killed.

    \b
    Example:
      rpcmp report runs/digits-20261122-101500
      rpcmp report runs/digits-20261122-101500 runs/digits-20261122-113000
    """
    from rpcmp.cli.runtable import run_tables
    from rpcmp.runfolder.compare import compare
    from rpcmp.runfolder.reader import read

    run_tables(compare([read(folder) for folder in folders]))
