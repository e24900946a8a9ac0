"""`rpcmp serve`: run a stage server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from rpcmp.cli import echo
from rpcmp.cli.options import certs_options, log_options, metrics_option
from rpcmp.config import addresses
from rpcmp.process.channel import continue_without, die_with_parent
from rpcmp.process.logging.collector import Display
from rpcmp.process.logging.records import pass_on

if TYPE_CHECKING:
    from rpcmp.net.security import Security
    from rpcmp.process.sandbox.confinement import FileAccess
    from rpcmp.server.stage_server import StageServer

log = logging.getLogger(__name__)


def _modules(
    ctx: click.Context, option: click.Parameter, names: tuple[str, ...]
) -> tuple[str, ...]:
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise click.BadParameter(f"{name!r} is not a module, such as my_models or my.models")
    return names


@click.command()
@click.option("--stage", type=click.IntRange(min=0), help="Index of the stage.")
@click.option("--spare", is_flag=True, help="Take over the stage of a server that is lost.")
@click.option(
    "--replica", type=click.IntRange(min=0), default=0, help="Index of the stage's replica."
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Where to listen; port 0 picks a free one. [default: 127.0.0.1, with --certs 0.0.0.0, and "
    f"port {addresses.FIRST_PORT} + stage + {addresses.PORTS_PER_REPLICA} x replica]",
)
@certs_options
@click.option(
    "--no-code",
    is_flag=True,
    help="Refuse jobs that bring Python files, and let jobs use only models, losses and optimizers "
    "of torch.nn and torch.optim, and of rpcmp.metrics and rpcmp.examples.",
)
@click.option(
    "--allow",
    "allowed",
    metavar="MODULE",
    multiple=True,
    callback=_modules,
    help="Like --no-code, but let jobs also use functions and classes defined in this module or "
    "below it. Repeatable.",
)
@click.option(
    "--checkpoints",
    metavar="DIR",
    type=click.Path(file_okay=False, resolve_path=True, path_type=Path),
    default="checkpoints",
    show_default=True,
    help="Let jobs keep checkpoints only in this folder or below it.",
)
@click.option(
    "--confine/--no-confine",
    "confine",
    default=None,
    help="Keep a job's code from this user's files, keys and processes.  [default: confine]",
)
@click.option(
    "--data",
    metavar="DIR",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, resolve_path=True),
    help="Let a confined job's code read DIR. Repeatable.",
)
@click.option(
    "--device",
    default="",
    metavar="DEVICE",
    help='What `device = "auto"` is here, such as cuda:1.  [default: a free one for each stage]',
)
@metrics_option
@log_options
@click.option("--parent", type=int, hidden=True, help="End with this process.")
@click.option("--forks", type=int, hidden=True, help="Descriptor of a line to its fork server.")
@click.option("--lender", type=int, hidden=True, help="Descriptor to get another such line by.")
def serve(
    stage: int | None,
    spare: bool,
    replica: int,
    listen: str | None,
    certs: Path | None,
    insecure: bool,
    no_code: bool,
    allowed: tuple[str, ...],
    checkpoints: Path,
    confine: bool | None,
    data: tuple[Path, ...],
    device: str,
    metrics: str | None,
    parent: int | None,
    forks: int | None,
    lender: int | None,
    display: Display,
) -> None:
    """Serve one stage of a model to one job after another.

    On SIGTERM the running job finishes its step and saves, then the server exits. The job waits for
    the server to come back, or for a spare.

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
    if spare and replica:
        raise click.UsageError("a spare takes the place of any replica: leave --replica out")
    from rpcmp.net.security import Security

    if parent is not None:
        die_with_parent(parent, signal.SIGTERM)
    everywhere = "127.0.0.1" if certs is None else "0.0.0.0"
    address = listen or f"{everywhere}:{addresses.default_port(stage or 0, replica)}"
    security = Security(certs, insecure)
    security.require_allowed([address])
    security.require_may_serve(stage)
    host, port = addresses.parse(address)

    def announce(port: int) -> None:
        name = "spare" if stage is None else f"stage {stage}"
        echo(f"{name} is SERVING on {addresses.format_address(host, port)}")

    async def run() -> int:
        # gRPC's core would print a line for each invalid header.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        gc.disable()  # what is imported stays
        # Imported late: `rpcmp --help` needs no gRPC.
        from rpcmp.process.fork_client import WORKERS, Forks
        from rpcmp.process.resources import raise_descriptor_limit
        from rpcmp.server.admission import Admission
        from rpcmp.server.lifecycle import serve as run_server
        from rpcmp.server.stage_server import StageServer

        gc.freeze()
        gc.enable()
        raise_descriptor_limit()
        lines = [None if fd is None else socket.socket(fileno=fd) for fd in (forks, lender)]
        if lines[1] is not None:  # its other end is our parent's
            continue_without(lines[1])
        # A server that the job itself has started here need not be confined: its author started it.
        is_confining = parent is None if confine is None else confine
        file_access = _file_access(certs, data) if is_confining else None
        # A driver that has started us prints the workers' lines itself.
        show = pass_on if parent is None else lambda entry: None
        admission = Admission(
            stage,
            replica,
            accepts_code=not no_code,
            allowed=list(allowed) if allowed or no_code else None,
            checkpoints=checkpoints,
            file_access=file_access,
        )
        fork_server = Forks([WORKERS], *lines)
        server = StageServer(admission, fork_server, security, show, parent or 0, device)
        display.source = lambda: server.log_source
        with _metrics_at(metrics, server, security):  # before the server is announced
            return await run_server(server, host, port, announce)

    sys.exit(asyncio.run(run()))


def _file_access(certs: Path | None, data: Sequence[Path]) -> FileAccess:
    """Return what workers may open; warn if the kernel cannot keep them from opening more."""
    from rpcmp.process.sandbox import confinement

    if lacks := confinement.missing_protection():
        log.warning(
            "this kernel does not confine a job's code wholly (%s): it can %s",
            *(confinement.kernel_support(), lacks),
        )
    return confinement.FileAccess(
        readable=tuple(map(str, data)), hidden=confinement.hidden_by(certs)
    )


@contextlib.contextmanager
def _metrics_at(address: str | None, server: StageServer, security: Security) -> Iterator[None]:
    """Serve the server's metrics at `address`, if there is one."""
    if address is None:
        yield
        return
    from rpcmp.observability.prometheus import serving
    from rpcmp.server.server_metrics import ServerMetrics

    server_metrics = ServerMetrics(server)
    with serving(server_metrics.store, address, security) as url:
        echo(f"metrics at {url}", err=True)
        server.metrics_port = urlsplit(url).port or 0
        update = asyncio.ensure_future(server_metrics.run())
        try:
            yield
        finally:
            update.cancel()
