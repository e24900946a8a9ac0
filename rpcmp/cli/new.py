"""`rpcmp new`: write the files of a new job."""

from __future__ import annotations

from pathlib import Path

import click

from rpcmp.cli import completion, echo


@click.command()
@click.argument("name")
@click.option(
    "--like",
    metavar="EXAMPLE",
    shell_complete=completion.examples,
    help="Start from one of the examples, such as resnet50.",
)
def new(name: str, like: str | None) -> None:
    """Write NAME.py, a model, and NAME.toml, its config, ready to run.

    Into the current folder, with comments. Nothing is overwritten. `rpcmp guide examples`
    describes the examples; what one needs besides its own file it takes from the package.

    \b
    Examples:
      rpcmp new my_model
      rpcmp new my_model --like llama
    """
    from rpcmp.tools.new import create

    model, config = create(name, Path.cwd(), like)
    echo(f"{model.name}: the model")
    echo(f"{config.name}: how it is trained, and where")
    next_commands = {
        f"rpcmp drive {config.name}": "trains it, on stage servers of its own",
        f"rpcmp verify {config.name} --steps 5": "proves that the bits are those of one process",
        f"rpcmp doctor {config.name}": "tells what would go wrong, before a run on several hosts",
    }
    width = max(map(len, next_commands))
    for command, why in next_commands.items():
        echo(f"  {command:{width}}  # {why}")
