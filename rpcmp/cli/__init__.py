"""The command line: parse, call one library function, map errors to exit codes.

0  done (a drained server too)      1  failed      2  usage or configuration
75 temporary: a stage is unreachable or busy       128+n  ended by signal n
"""

from __future__ import annotations

import signal
import sys

import click

import rpcmp
from rpcmp.cli.bench import bench
from rpcmp.cli.certs import certs
from rpcmp.cli.doctor import doctor
from rpcmp.cli.drain import drain
from rpcmp.cli.drive import drive
from rpcmp.cli.export import export
from rpcmp.cli.serve import serve
from rpcmp.cli.status import status
from rpcmp.cli.trace import trace
from rpcmp.cli.tune import tune
from rpcmp.cli.verify import verify
from rpcmp.errors import RpcmpError, StageError, exit_code


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(rpcmp.__version__, package_name="rpcmp")
def cli() -> None:
    """Train one PyTorch model across several machines, by RPC.

    \b
    Example:
      rpcmp serve --stage 1        on each host
      rpcmp drive config.toml      on the driver
    """


cli.add_command(serve)
cli.add_command(drive)
cli.add_command(doctor)
cli.add_command(status)
cli.add_command(certs)
cli.add_command(drain)
cli.add_command(trace)
cli.add_command(verify)
cli.add_command(export)
cli.add_command(bench)
cli.add_command(tune)


def main() -> None:
    """Run the command line; the process ends here."""
    sys.exit(_run())


def _run() -> int:
    try:
        return cli.main(standalone_mode=False) or 0
    except RpcmpError as error:
        if isinstance(error, StageError) and error.traceback:
            click.echo(error.traceback.rstrip(), err=True)
        click.echo(f"rpcmp: {error}", err=True)
        return exit_code(error)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 128 + signal.SIGINT
