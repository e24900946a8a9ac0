"""`rpcmp join`: let a running job have one more host."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from rpcmp.cli import echo
from rpcmp.cli.options import certs_options


@click.command()
@click.argument("address")
@click.option(
    "--to",
    "server",
    metavar="HOST:PORT",
    required=True,
    help="A stage server of the job that it is to join: any of them.",
)
@certs_options
@click.option(
    "--wait",
    "seconds",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="How long to wait until it serves a stage; 0: not at all.",
)
def join(address: str, server: str, certs: Path | None, insecure: bool, seconds: float) -> None:
    """Let a running job have one more host.

    ADDRESS is that of a spare, as the job's driver reaches it. The job needs `rebalance = "auto"`.
    After its running step it goes on with one stage more, and with the same bits.

    \b
    Example:
      rpcmp serve --spare --listen 127.0.0.1:50060
      rpcmp join 127.0.0.1:50060 --to 127.0.0.1:50051
    """
    from rpcmp.job.server_calls import join as run
    from rpcmp.net.security import Security

    job = asyncio.run(run(address, server, Security(certs, insecure), seconds))
    echo(f"{address} serves a stage of job {job!r}" if seconds else f"job {job!r} has been told")
