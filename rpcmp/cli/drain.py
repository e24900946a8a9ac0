"""`rpcmp drain`: stop a stage server once its job's running step is saved."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from rpcmp.cli import echo
from rpcmp.cli.options import certs_options


@click.command()
@click.argument("address")
@certs_options
@click.option(
    "--leave",
    is_flag=True,
    help='It does not come back: a spare takes its stage at once, or, with `rebalance = "auto"`, '
    "the other stages take its layers.",
)
@click.option("--wait/--no-wait", default=True, help="Return once the server has exited.")
def drain(address: str, certs: Path | None, insecure: bool, leave: bool, wait: bool) -> None:
    """Stop a stage server once its job's running step is saved.

    It accepts no new job. A running job continues once the server, or a spare, is there again. With
    --leave the server ends when the others hold all that it held.

    \b
    Example:
      rpcmp drain 127.0.0.1:50051
    """
    from rpcmp.job.server_calls import drain as run
    from rpcmp.net.security import Security

    job = asyncio.run(run(address, wait, Security(certs, insecure), leave))
    if wait:
        echo(f"{address} has ended")
    else:
        echo(f"{address} is draining job {job!r}" if job else f"{address} is ending")
