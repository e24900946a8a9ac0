"""`rpcmp status`: what every stage server does."""

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
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def status(config: Path, overrides: tuple[str, ...], connect: str | None, as_json: bool) -> None:
    """Show every stage of CONFIG: its server, its job and its worker.

    Asks the addresses of CONFIG or of --connect, else localhost's default ports. Exits 75 where a
    stage does not answer.

    \b
    Example:
      rpcmp status config.toml
    """
    from rpcmp.cli.table import stage_table
    from rpcmp.job.server_calls import status_of_all

    job = loader.load_config(config, overrides)
    found = addresses_of(connect, job) or job.addresses or addresses_of("default", job) or []
    stages = asyncio.run(status_of_all(job, found))
    if as_json:
        echo(json.dumps({"stages": stages}))
    else:
        stage_table(stages)
    if any(stage["health"] == "UNREACHABLE" for stage in stages):
        raise click.exceptions.Exit(75)
