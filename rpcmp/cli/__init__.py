"""The command line: parse, call one library function, print its result, exit with a code.

A module per command, see `COMMANDS`. May import every package, but each command only when it runs:
`--help` and shell completion must not wait for torch. Only `echo` here and `Console` in
rpcmp.cli.console print. A run does not depend on its output: it continues if the output's disk is
full, if its pipe has been closed, and if the terminal is gone.

0  done (a drained server too)      1  failed      2  usage or configuration
75 temporary: a stage is unreachable or busy       76 another driver has the job
128+n  ended by signal n
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import io
import logging
import os
import re
import select
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TextIO

import click

import rpcmp
from rpcmp.errors import RpcmpError, StageError, UnavailableError, exit_code, with_notes
from rpcmp.process.logging.collector import Display
from rpcmp.process.logging.records import Line, as_json, entry_of, visible

COMMANDS = (
    *("bench", "certs", "completion", "doctor", "drain", "drive", "explain", "export", "guide"),
    *("health", "join", "new", "plan", "report", "serve", "status", "trace", "tune", "verify"),
)
"""Each is a function of its own name in a module of its own name."""

RUNS = (["drive"], ["serve"], ["verify"], ["tune"], ["bench"])
"""Commands that do more than print something: they continue if their output is lost."""

log = logging.getLogger(__name__)


def echo(text: object = "", err: bool = False, nl: bool = True) -> None:
    """Print `text`, made visible first; see click.echo."""
    click.echo(visible(str(text)), err=err, nl=nl)


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
    try:
        sys.exit(_run())
    finally:
        gc.freeze()  # all memory goes now: to search it for garbage would take longer than its use


def _run() -> int:
    if "_RPCMP_COMPLETE" in os.environ:
        importlib.import_module("rpcmp.cli.completion")  # registers our shells
    began = datetime.now(UTC)
    is_lost = ignore_write_errors(is_a_run=sys.argv[1:2] in RUNS)
    display = Display()
    display.install()
    try:
        code = cli.main(prog_name="rpcmp", standalone_mode=False, obj=display) or 0
        return code or int(is_lost())
    except RpcmpError as error:
        display.finish()
        _show(error, display, began)
        return exit_code(error)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        display.finish()
        echo(f"rpcmp: {os.strerror(error.errno)}: raise the limit, see `ulimit -n`", err=True)
        return UnavailableError.exit_code
    except click.ClickException as error:
        message = io.StringIO()
        error.show(message)
        echo(message.getvalue(), err=True, nl=False)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 128 + signal.SIGINT
    finally:
        display.finish()


class LossyFile(io.FileIO):
    """A file that ignores failed writes: what cannot be written is lost.

    Args:
        on_failure: called with the first error.

    Attributes:
        failure: the first error, if any.
    """

    def __init__(self, fd: int, on_failure: Callable[[OSError], None]) -> None:
        super().__init__(fd, "w", closefd=False)
        self._on_failure = on_failure
        self.failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Return how many bytes were written or lost, which may be less than all."""
        try:
            while (written := super().write(data)) is None:  # it was made non-blocking
                select.select([], [self], [])
        except OSError as error:
            if self.failure is None:
                self.failure = error
                self._on_failure(error)
            return memoryview(data).nbytes
        return written


def ignore_write_errors(is_a_run: bool) -> Callable[[], bool]:
    """Replace standard output and standard error by streams whose writes never fail.

    Args:
        is_a_run: whether the output only reports on what is done, and is not itself the result.

    Returns:
        A function that returns whether part of the result was lost.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)  # else it would be the next socket's, and children write to it
    os.close(fd)

    def is_problem(error: OSError) -> bool:
        return is_a_run or error.errno != errno.EPIPE  # the reader has closed a pipe on purpose

    def warn(error: OSError) -> None:
        if is_problem(error):
            outcome = "the command continues without it" if is_a_run else "part of it is lost"
            log.warning("cannot write standard output: %s; %s", error.strerror, outcome)

    sys.stderr, _ = _lossy(sys.stderr, lambda error: None)
    sys.stdout, file = _lossy(sys.stdout, warn)

    def is_lost() -> bool:
        if file is None:
            return False
        sys.stdout.flush()
        return not is_a_run and file.failure is not None and is_problem(file.failure)

    return is_lost


def _lossy(
    stream: TextIO, on_failure: Callable[[OSError], None]
) -> tuple[TextIO, LossyFile | None]:
    """Return a stream that ignores failed writes and its file; None if `stream` has no file."""
    try:
        file = LossyFile(stream.fileno(), on_failure)
    except (AttributeError, OSError, ValueError):
        return stream, None
    lossy = io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=os.isatty(file.fileno()) or stream is sys.stderr,
    )
    return lossy, file


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
    echo(as_json(entry_of(line, stage, generation)) if display.json else line.text, err=True)


def _remedy(error: RpcmpError, began: datetime) -> str:
    from rpcmp.cli.hints import failed, remedy

    name, *arguments = sys.argv[1:]
    command = cli.get_command(click.Context(cli), name)
    if command is None:
        return ""
    return remedy(error, failed(command, name, arguments, began)) or ""
