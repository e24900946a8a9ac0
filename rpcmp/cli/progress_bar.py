"""Progress of a measurement, which a signal stops early with the results so far."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import click
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from rpcmp.cli.console import Console
from rpcmp.cli.terminal import echo
from rpcmp.process.interpreter import count_stop_requests, handle_stop_signals
from rpcmp.tools.measurement import Progress as Tell

PLAIN_SECONDS = 2.0
"""Between two similar lines if there is no terminal."""

SILENT_SECONDS = 5.0
"""After which a line is printed again, with the time that is left by then."""


class Measuring(NamedTuple):
    """The measurement's end of a progress display.

    Attributes:
        tell: called with what is measured, and the seconds left.
        stop: set by a signal: return the results so far.
        signals: received so far.
    """

    tell: Tell
    stop: asyncio.Event
    signals: list[int]

    @property
    def exit_code(self) -> int:
        """Of the command: 0 unless a signal has stopped it."""
        return 128 + self.signals[0] if self.signals else 0


@contextlib.contextmanager
def measuring(name: str) -> Iterator[Measuring]:
    """Show the progress of a measurement in an event loop, and handle Ctrl-C.

    The first signal sets `stop`, the second cancels the current task.
    """
    task, stop = asyncio.current_task(), asyncio.Event()
    signals: list[int] = []

    def on_signal(signum: int) -> None:
        signals.append(signum)
        stop.set()
        if count_stop_requests(signals) > 1 and task is not None:
            task.cancel()

    console = Console(stderr=True)
    with (
        _bar(console, name) if console.is_terminal else _lines(name) as tell,
        handle_stop_signals(on_signal),
    ):
        try:
            yield Measuring(tell, stop, signals)
        except asyncio.CancelledError:
            if count_stop_requests(signals) < 2:
                raise
            raise click.exceptions.Exit(128 + signals[-1]) from None


@contextlib.contextmanager
def _lines(name: str) -> Iterator[Tell]:
    lines = _Lines(name)
    try:
        yield lines.tell
    finally:
        lines.close()


class _Lines:
    """Plain output: a line whenever another thing is measured, and from time to time."""

    def __init__(self, name: str) -> None:
        self._name, self._what = name, ""
        self._loop = asyncio.get_running_loop()
        self._shown, self._until = float("-inf"), float("inf")
        self._again: asyncio.TimerHandle | None = None

    def tell(self, what: str, left: float) -> None:
        is_other = what.partition(" ")[0] != self._what.partition(" ")[0]
        self._what, self._until = what, self._loop.time() + left
        if is_other or self._loop.time() - self._shown >= PLAIN_SECONDS:
            self._show()

    def close(self) -> None:
        if self._again is not None:
            self._again.cancel()

    def _show(self) -> None:
        self.close()
        self._shown = self._loop.time()
        echo(f"{self._name}: {self._what}, {_left(self._until - self._shown)}", err=True)
        self._again = self._loop.call_later(SILENT_SECONDS, self._show)


@contextlib.contextmanager
def _bar(console: Console, name: str) -> Iterator[Tell]:
    begin = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), _Left())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name, total=None, until=begin)

        def tell(what: str, left: float) -> None:
            done = time.monotonic() - begin
            finite = left < float("inf")
            progress.update(
                task,
                description=f"{name}: {what}",
                completed=done,
                total=done + left if finite else None,
                until=time.monotonic() + left,
            )

        yield tell


class _Left(ProgressColumn):
    """Seconds left, counted down between calls of `tell`."""

    def render(self, task: Task) -> Text:
        return Text(_left(task.fields["until"] - time.monotonic()))


def _left(seconds: float) -> str:
    if seconds == float("inf"):
        return "time left not known yet"
    if seconds < 0:
        return "longer than expected"
    return (
        f"about {max(1, seconds):.0f} s left"
        if seconds < 120
        else f"about {seconds / 60:.0f} min left"
    )
