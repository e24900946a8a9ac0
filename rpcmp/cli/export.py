"""`rpcmp export`: write a checkpoint's model to one file."""

from __future__ import annotations

from pathlib import Path

import click

from rpcmp.cli import echo


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--best", is_flag=True, help="Export the best checkpoint, by `checkpoint.best`.")
@click.option(
    "--tied-once",
    is_flag=True,
    help="Write `tied` parameters once, for safetensors.torch.load_model, and not under each name.",
)
def export(folder: Path, file: Path, best: bool, tied_once: bool) -> None:
    """Write a checkpoint's model to one FILE that plain torch loads.

    DIR is a checkpoint folder, whose newest complete checkpoint is exported, or one step folder in
    it. Files of stages that ran on other hosts must have been copied there. Everything is checked
    before it is used.

    \b
    Example:
      rpcmp export checkpoints model.safetensors
      rpcmp export --best checkpoints model.safetensors
    """
    from rpcmp.checkpoint.state_export import export as run
    from rpcmp.config.types import format_size

    result = run(folder, file, best, tied_once)
    for problem in result.skipped:
        echo(f"skipped: {problem}", err=True)
    mark = result.manifest.best if best else None
    what = f"step {result.step}" + (f", {mark.metric} {mark.value:.4f}" if mark else "")
    echo(f"{what}: {result.num_tensors} tensors, {format_size(result.size)} written to {file}")
