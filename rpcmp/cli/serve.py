"""`rpcmp serve`: a stage server."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import click

from rpcmp import addresses
from rpcmp.cli.options import certs_options
from rpcmp.process.channel import die_with_parent


@click.command()
@click.option("--stage", type=click.IntRange(min=0), help="Index of the stage.")
@click.option("--spare", is_flag=True, help="Take the stage of whichever server is lost.")
@click.option("--replica", type=click.IntRange(min=0), default=0, help="Which copy of the stage.")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Where to listen; port 0 takes a free one. [default: 127.0.0.1, with --certs 0.0.0.0, and "
    f"port {addresses.FIRST_PORT} + stage + {addresses.PORTS_A_REPLICA} x replica]",
)
@certs_options
@click.option("--no-code", is_flag=True, help="Refuse jobs that bring Python files along.")
@click.option(
    "--allow",
    "allowed",
    metavar="MODULE",
    multiple=True,
    help="Let jobs use callables of this module and those below it alone, and bring no files "
    "along. Repeatable.",
)
@click.option("--parent", type=int, hidden=True, help="End with this process.")
@click.option("--forks", type=int, hidden=True, help="Descriptor of a line to its fork server.")
def serve(
    stage: int | None,
    spare: bool,
    replica: int,
    listen: str | None,
    certs: Path | None,
    insecure: bool,
    no_code: bool,
    allowed: tuple[str, ...],
    parent: int | None,
    forks: int | None,
) -> None:
    """Serve one stage of a model to one job after the other.

    SIGTERM lets the running job finish its step and save, and then ends the server; the job waits
    for it to come back, or for a spare.

    \b
    Examples:
      rpcmp serve --stage 1
      rpcmp serve --stage 1 --certs stage1
      rpcmp serve --spare --listen 127.0.0.1:50100
    """
    if (stage is None) is not spare:
        raise click.UsageError("give --stage N, or --spare")
    if stage is None and listen is None:
        raise click.UsageError("a spare has no port of its own: give --listen HOST:PORT")
    from rpcmp.wire.security import Security

    if parent is not None:
        die_with_parent(parent, signal.SIGTERM)
    everywhere = "127.0.0.1" if certs is None else "0.0.0.0"
    address = listen or f"{everywhere}:{addresses.default_port(stage or 0, replica)}"
    security = Security(certs, insecure)
    security.require_allowed([address])
    security.require_may_serve(stage)
    host, port = addresses.parse(address)

    def announce(bound: int) -> None:
        who = "spare" if stage is None else f"stage {stage}"
        where = f"[{host}]" if ":" in host else host
        click.echo(f"{who} is SERVING on {where}:{bound}")

    async def run() -> int:
        # Of headers that make no sense gRPC's core would print a line each.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        # Imported late: `rpcmp --help` needs no gRPC.
        from rpcmp.process.forking import WORKERS, Forks
        from rpcmp.server.serve import serve as run_server
        from rpcmp.server.server import StageServer

        line = None if forks is None else socket.socket(fileno=forks)
        server = StageServer(stage, replica, not no_code, Forks([WORKERS], line), security, allowed)
        return await run_server(server, host, port, announce)

    sys.exit(asyncio.run(run()))
