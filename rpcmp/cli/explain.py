"""`rpcmp explain`: what a run will do, before it does it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import click

from rpcmp.cli.options import addresses_of, config_argument, connect_option
from rpcmp.cli.terminal import echo
from rpcmp.config import loader


@click.command()
@config_argument
@connect_option
@click.option(
    "--no-measure",
    is_flag=True,
    help="Measure nothing and ask nobody: servers need not run. Then there is no prediction.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def explain(
    config: Path,
    overrides: tuple[str, ...],
    connect: str | None,
    no_measure: bool,
    as_json: bool,
) -> None:
    """Show what a run of CONFIG will do.

    The stages with their layers, parameters and memory; the schedule of one step, drawn; how long
    a step will take; who listens and who dials whom; which files are read and written. Layers are
    measured for some seconds, on this machine, or where CONFIG or --connect say that the stages
    are. Nothing is trained or written.

    \b
    Example:
      rpcmp explain config.toml --set schedule=zero-bubble
    """
    from rpcmp.cli.explanation import show
    from rpcmp.tools.explain.gather import explain as find_out

    job = loader.load_config(config, overrides)
    found = asyncio.run(find_out(job, addresses_of(connect, job), measures=not no_measure))
    if as_json:
        echo(json.dumps(found.as_json()))
    else:
        show(found)
