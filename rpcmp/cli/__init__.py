"""The command line: parse, call one library function, map errors to exit codes.

A module per command, see `COMMANDS`. May import every package, but each command only when
it runs: `--help` and shell completion must not wait for torch.

0  done (a drained server too)      1  failed      2  usage or configuration
75 temporary: a stage is unreachable or busy       128+n  ended by signal n
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import signal
import sys
from datetime import UTC, datetime

import click

import rpcmp
from rpcmp.cli.terminal import echo, forgive
from rpcmp.errors import RpcmpError, StageError, exit_code, with_notes
from rpcmp.process.logging.collector import Display
from rpcmp.process.logging.records import Line, as_json, entry_of, visible

COMMANDS = (
    *("bench", "certs", "completion", "doctor", "drain", "drive", "explain", "export", "guide"),
    *("health", "new", "report", "serve", "status", "trace", "tune", "verify"),
)
"""Each is a function of its own name in a module of its own name."""

RUNS = (["drive"], ["serve"], ["verify"], ["tune"], ["bench"])
"""Commands that do more than print something: they go on if their output is lost."""


class Commands(click.Group):
    """Imports a command when it is used: probes that run every few seconds have to be quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"rpcmp.cli.{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(rpcmp.__version__, package_name="rpcmp")
def cli() -> None:
    """Train one PyTorch model across several machines, by RPC.

    \b
    Example:
      rpcmp serve --stage 1        on each host
      rpcmp drive config.toml      on the driver
      rpcmp guide                  what there is to read
    """


def main() -> None:
    sys.exit(_run())


def _run() -> int:
    if "_RPCMP_COMPLETE" in os.environ:
        importlib.import_module("rpcmp.cli.completion")  # registers our shells
    began = datetime.now(UTC)
    is_lost = forgive(is_a_run=sys.argv[1:2] in RUNS)
    display = Display()
    display.install()
    try:
        code = cli.main(prog_name="rpcmp", standalone_mode=False, obj=display) or 0
        return code or int(is_lost())
    except RpcmpError as error:
        display.finish()
        _show(error, display, began)
        return exit_code(error)
    except click.ClickException as error:
        said = io.StringIO()
        error.show(said)
        echo(said.getvalue(), err=True, nl=False)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 128 + signal.SIGINT
    finally:
        display.finish()


def _show(error: RpcmpError, display: Display, began: datetime) -> None:
    """Print why the command failed and what helps, as the last lines of its log."""
    text = f"rpcmp: {with_notes(error)}"
    if isinstance(error, StageError) and error.traceback:
        text = f"{error.traceback.rstrip()}\n{text}"
    if not display.json:
        # Much of it may be untrusted: only our own line "try:" is to be pasted into a shell.
        text = re.sub(r"^(?=try:)", "  ", visible(text), flags=re.MULTILINE)
    _print(Line("ERROR", "rpcmp", text), display)
    with contextlib.suppress(OSError):  # the hint depends on files; the error is printed
        if command := _remedy(error, began):
            _print(Line("INFO", "rpcmp", f"try: {command}"), display)


def _print(line: Line, display: Display) -> None:
    stage, generation, _ = display.source()
    said = as_json(entry_of(line, stage, generation)) if display.json else line.text
    echo(said, err=True)


def _remedy(error: RpcmpError, began: datetime) -> str:
    from rpcmp.cli.hints import failed, remedy

    name, *arguments = sys.argv[1:]
    command = cli.get_command(click.Context(cli), name)
    if command is None:
        return ""
    return remedy(error, failed(command, name, arguments, list(COMMANDS), began)) or ""
