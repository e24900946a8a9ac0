"""`rpcmp health`: check whether a stage server is serving."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from rpcmp.cli import echo
from rpcmp.cli.options import certs_options
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
    from rpcmp.net.peer_connection import Dialer
    from rpcmp.net.security import Security
    from rpcmp.server.connection import SERVING, check_health

    if server_name is not None and certs is None:
        raise click.UsageError("--server-name is checked against a certificate: give --certs DIR")
    where = addresses.with_defaults(address)
    dialer = Dialer(Security(certs, insecure), server_name)
    status = asyncio.run(check_health(where, dialer, seconds))
    echo(f"{where} is {status}")
    if status != SERVING:
        raise click.exceptions.Exit(NOT_SERVING)
