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

from rpcmp.bench.rounds import Progress as Tell
from rpcmp.cli.console import Console
from rpcmp.cli.terminal import echo
from rpcmp.process.signals import handled_by, wishes

PLAIN_SECONDS = 2.0
"""Between two lines of one kind where there is no terminal."""


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
        if wishes(signals) > 1 and task is not None:
            task.cancel()

    console = Console(stderr=True)
    with _bar(console, name) if console.is_terminal else _lines(name) as tell, handled_by(heard):
        try:
            yield Measuring(tell, stop, signals)
        except asyncio.CancelledError:
            if wishes(signals) < 2:
                raise
            raise click.exceptions.Exit(128 + signals[-1]) from None


@contextlib.contextmanager
def _lines(name: str) -> Iterator[Tell]:
    shown, kind = float("-inf"), ""

    def tell(what: str, left: float) -> None:
        nonlocal shown, kind
        before, kind = kind, what.partition(" ")[0]
        if kind != before or time.monotonic() - shown >= PLAIN_SECONDS:
            shown = time.monotonic()
            echo(f"{name}: {what}, {_seconds(left)} left", err=True)

    yield tell


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
    """Seconds until the end, counted down between two words of it."""

    def render(self, task: Task) -> Text:
        """See ProgressColumn."""
        return Text(f"{_seconds(max(0.0, task.fields['until'] - time.monotonic()))} left")


def _seconds(left: float) -> str:
    if left == float("inf"):
        return "nobody knows how long is"
    return f"{left:.0f} s" if left < 120 else f"{left / 60:.0f} min"
