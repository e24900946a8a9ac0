"""The command line: parse, call one library function, map errors to exit codes.

0  done (a drained server too)      1  failed      2  usage or configuration
75 temporary: a stage is unreachable or busy       128+n  ended by signal n
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

import click

import rpcmp
from rpcmp.errors import RpcmpError, StageError, exit_code

COMMANDS = (
    "bench",
    "certs",
    "completion",
    "doctor",
    "drain",
    "drive",
    "explain",
    "export",
    "health",
    "new",
    "report",
    "serve",
    "status",
    "trace",
    "tune",
    "verify",
)
"""Each is a function in a module of its name."""


class Commands(click.Group):
    """Imports a command when it is asked for: what runs every few seconds has to be quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """See click.Group."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """See click.Group."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"rpcmp.cli.{cmd_name}"), cmd_name)
        return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(rpcmp.__version__, package_name="rpcmp")
def cli() -> None:
    """Train one PyTorch model across several machines, by RPC.

    \b
    Example:
      rpcmp serve --stage 1        on each host
      rpcmp drive config.toml      on the driver
    """


def main() -> None:
    """Run the command line; the process ends here."""
    sys.exit(_run())


def _run() -> int:
    if "_RPCMP_COMPLETE" in os.environ:
        importlib.import_module("rpcmp.cli.completion")  # how our shells are spoken to
    try:
        return cli.main(prog_name="rpcmp", standalone_mode=False) or 0
    except RpcmpError as error:
        if isinstance(error, StageError) and error.traceback:
            click.echo(error.traceback.rstrip(), err=True)
        click.echo(f"rpcmp: {error}", err=True)
        if command := _remedy(error):
            click.echo(f"try: {command}", err=True)
        return exit_code(error)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 128 + signal.SIGINT


def _remedy(error: RpcmpError) -> str:
    """The command that helps next; empty where none does."""
    from rpcmp.cli.failed import failed
    from rpcmp.cli.remedy import remedy

    name, *arguments = sys.argv[1:]
    command = cli.get_command(click.Context(cli), name)
    if command is None:
        return ""
    return remedy(error, failed(command, name, arguments, COMMANDS)) or ""
