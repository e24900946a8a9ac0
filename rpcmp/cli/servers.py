"""Ask stage servers: `rpcmp health`, `rpcmp status` and `rpcmp drain`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from rpcmp.cli.options import addresses_of, certs_options, config_argument, connect_option
from rpcmp.cli.terminal import echo
from rpcmp.config import addresses

NOT_SERVING = 1
"""Exit code for a server that is draining."""


@click.command()
@click.argument("address", default="", metavar="[ADDRESS]")
@certs_options
@click.option(
    "--server-name",
    metavar="HOST",
    envvar="RPCMP_SERVER_NAME",
    help="The name that the server's certificate must contain, if it is not the host of ADDRESS.",
)
@click.option(
    "--timeout",
    "seconds",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    default=2.0,
    show_default=True,
    help="How long the server may take to answer.",
)
def health(
    address: str, certs: Path | None, insecure: bool, server_name: str | None, seconds: float
) -> None:
    """Check whether a stage server is serving, for probes.

    Uses the standard gRPC health service. Exits 0 if the server is SERVING, 1 if it is draining, 75
    if it does not answer, and 2 if its certificate is not the expected one. ADDRESS is HOST:PORT,
    or one of both; the default is 127.0.0.1:50051. --certs may be a stage's own or a driver's.

    \b
    Examples:
      rpcmp health
      rpcmp health 50052 --certs stage1 --server-name host-b
    """
    from rpcmp.net.dialer import Dialer
    from rpcmp.net.security import Security
    from rpcmp.server.probe import SERVING, probe

    if server_name is not None and certs is None:
        raise click.UsageError("--server-name is checked against a certificate: give --certs DIR")
    where = addresses.completed(address)
    dialer = Dialer(Security(certs, insecure), server_name)
    status = asyncio.run(probe(where, dialer, seconds))
    echo(f"{where} is {status}")
    if status != SERVING:
        raise click.exceptions.Exit(NOT_SERVING)


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

    Asks the addresses of CONFIG or of --connect, or else localhost's default ports. Exits 75 if a
    stage does not answer.

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
            stage["job"] or "-",
            *(_or_dash(stage[key]) for key in ("generation", "step", "parameters")),
            f"{stage['memory'] / 2**20:,.0f} MiB" if stage["memory"] else "-",
            stage["torch"] or "-",
            str(stage["supervisor_pid"] or "-"),
            str(stage["worker_pid"] or "-"),
        )
        for stage in stages
    ]
    print_wide(table(COLUMNS, rows), WIDTH)


def _or_dash(number: int) -> str:
    return f"{number:,}" if number else "-"


@click.command()
@click.argument("address")
@certs_options
@click.option("--wait/--no-wait", default=True, help="Return once the server has exited.")
def drain(address: str, certs: Path | None, insecure: bool, wait: bool) -> None:
    """Stop a stage server once its job's running step is saved.

    It accepts no new job. A running job continues once the server, or a spare, is there again.

    \b
    Example:
      rpcmp drain 127.0.0.1:50051
    """
    from rpcmp.job.server_calls import drain as run
    from rpcmp.net.security import Security

    job = asyncio.run(run(address, wait, Security(certs, insecure)))
    echo(f"{address} is draining job {job!r}" if job and not wait else f"{address} has ended")
