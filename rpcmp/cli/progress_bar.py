"""How far a measurement is, and its end on a signal: with what there is so far."""

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
from rpcmp.process.signals import count_stop_requests, handle_stop_signals
from rpcmp.tools.bench.comparison import Progress as Tell

PLAIN_SECONDS = 2.0
"""Between two lines of one kind where there is no terminal."""

SILENT_SECONDS = 5.0
"""After which a line is said again, with the time that is left by then."""


class Measuring(NamedTuple):
    """What a measurement has to know.

    Attributes:
        tell: told how far it is.
        stop: set when somebody wants what there is so far.
        signals: that have been received.
    """

    tell: Tell
    stop: asyncio.Event
    signals: list[int]

    @property
    def exit_code(self) -> int:
        """Of a command that was stopped; 0: it was not."""
        return 128 + self.signals[0] if self.signals else 0


@contextlib.contextmanager
def measuring(name: str) -> Iterator[Measuring]:
    """Show how long a measurement will take, and hear of a Ctrl-C; in an event loop.

    The first signal sets `stop`, the second cancels the task that is here.

    Raises:
        Exit: there was a second.
    """
    task, stop = asyncio.current_task(), asyncio.Event()
    signals: list[int] = []

    def heard(signum: int) -> None:
        signals.append(signum)
        stop.set()
        if count_stop_requests(signals) > 1 and task is not None:
            task.cancel()

    console = Console(stderr=True)
    with (
        _bar(console, name) if console.is_terminal else _lines(name) as tell,
        handle_stop_signals(heard),
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
    """A line whenever something else is measured, and while one thing goes on, for plain output."""

    def __init__(self, name: str) -> None:
        self._name, self._what = name, ""
        self._loop = asyncio.get_running_loop()
        self._shown, self._until = float("-inf"), float("inf")
        self._again: asyncio.TimerHandle | None = None

    def tell(self, what: str, left: float) -> None:
        """See Progress of rpcmp.tools.bench.comparison."""
        is_other = what.partition(" ")[0] != self._what.partition(" ")[0]
        self._what, self._until = what, self._loop.time() + left
        if is_other or self._loop.time() - self._shown >= PLAIN_SECONDS:
            self._show()

    def close(self) -> None:
        """Say nothing more."""
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
    """Seconds until the end, counted down from one call to the next."""

    def render(self, task: Task) -> Text:
        """See ProgressColumn."""
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
