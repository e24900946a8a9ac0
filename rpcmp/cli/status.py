"""`rpcmp status`: a table of every stage of a job."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from rpcmp.cli import echo
from rpcmp.cli.options import addresses_of, config_argument, connect_option

COLUMNS = (
    *("stage", "address", "health", "job", "generation", "step", "parameters", "memory"),
    *("torch", "supervisor", "worker"),
)

WIDTH = 140
"""Characters that a row may take."""


@click.command()
@config_argument
@connect_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(config: Path, overrides: tuple[str, ...], connect: str | None, as_json: bool) -> None:
    """Show every stage of CONFIG: its server, its job and its worker.

    Asks the addresses of CONFIG or of --connect, or else localhost's default ports. A job whose
    driver was lost is "held" for the time that is shown: `rpcmp drive --resume` goes on with it.
    Exits 75 if a stage does not answer.

    \b
    Example:
      rpcmp status config.toml
    """
    from rpcmp.config import loader
    from rpcmp.job.server_calls import status_of_all

    job = loader.load_config(config, overrides)
    servers = addresses_of(connect, job) or job.addresses or addresses_of("default", job) or []
    stages = asyncio.run(status_of_all(job, servers))
    if as_json:
        echo(json.dumps({"stages": stages}))
    else:
        _print_status(stages)
    if any(stage["health"] == "UNREACHABLE" for stage in stages):
        raise click.exceptions.Exit(75)


def _print_status(stages: Iterable[dict[str, Any]]) -> None:
    from rpcmp.cli.console import print_wide, table

    rows = [
        (
            f"{stage['index']} {stage['name']}",
            stage["address"],
            stage["health"],
            _job(stage),
            *(_or_dash(stage[key]) for key in ("generation", "step", "parameters")),
            f"{stage['memory'] / 2**20:,.0f} MiB" if stage["memory"] else "-",
            stage["torch"] or "-",
            str(stage["supervisor_pid"] or "-"),
            str(stage["worker_pid"] or "-"),
        )
        for stage in stages
    ]
    print_wide(table(COLUMNS, rows), WIDTH)


def _job(stage: dict[str, Any]) -> str:
    """Return the job's name, and how long it is held if its driver was lost."""
    minutes, seconds = divmod(stage["held_s"], 60)
    held = f" (held, {minutes}:{seconds:02})" if stage["held_s"] else ""
    return f"{stage['job']}{held}" or "-"


def _or_dash(number: int) -> str:
    return f"{number:,}" if number else "-"
