"""Progress of a run or a measurement: a bar on a terminal, plain lines elsewhere, or JSON."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import click
import rich.progress
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from rpcmp.cli import echo
from rpcmp.cli.console import Console
from rpcmp.observability.events import (
    EndEvent,
    Event,
    GenerationEvent,
    LogEvent,
    StartEvent,
    StepEvent,
    SummaryEvent,
    UiEvent,
)
from rpcmp.observability.events.event import dumps
from rpcmp.observability.events.wording import (
    RunContext,
    describe,
    describe_busy,
    describe_details,
    describe_loss_scale,
)
from rpcmp.observability.observers import Report
from rpcmp.process.interpreter import count_stop_requests, handle_stop_signals
from rpcmp.process.logging.collector import Display, RecordSource
from rpcmp.process.logging.records import as_text, visible
from rpcmp.tools.measurement import Progress

PLAIN_SECONDS = 2.0
"""Between two similar lines if there is no terminal."""

REPEAT_SECONDS = 5.0
"""After which a measurement's line is printed again, with the time that is left by then."""

NOT_SHOWN = (GenerationEvent, LogEvent, EndEvent)
"""Events without a line, since the log and the command's own errors have the same contents."""


@contextlib.contextmanager
def event_printer(as_json: bool, verbose: bool, quiet: bool) -> Iterator[Report]:
    """Yield the function that shows a run's events."""
    console = Console()
    if as_json:
        yield lambda event: echo(dumps(event.to_json()))
    elif console.is_terminal and not quiet and not verbose:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            TextColumn("{task.fields[busy]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        with rich.progress.Progress(*columns, console=console, transient=True) as bar:
            yield _EventBar(bar).show
    else:
        yield _EventLines(echo, 0.0 if verbose else PLAIN_SECONDS, quiet).show


def plain(write: Callable[[str], None]) -> Report:
    """Return a function that passes the events of a run to `write` as plain lines."""
    return _EventLines(write, PLAIN_SECONDS, quiet=False).show


class _EventLines:
    """Writes a line for the first and the last step, and for a step every few seconds."""

    def __init__(self, write: Callable[[str], None], interval: float, quiet: bool) -> None:
        self._run = RunContext()
        self._write = write
        self._interval = interval
        self._quiet = quiet
        self._last_shown = float("-inf")

    def show(self, event: Event) -> None:
        self._run.add(event)
        if isinstance(event, StepEvent):
            is_due = time.monotonic() - self._last_shown >= self._interval
            if not is_due and event.step < self._run.steps:
                return
            self._last_shown = time.monotonic()
        if not self._quiet or isinstance(event, SummaryEvent | UiEvent):
            for line in _lines_of(event, self._run):
                self._write(visible(line))


class _EventBar:
    """Shows steps in a progress bar, and all other events above it."""

    def __init__(self, bar: rich.progress.Progress) -> None:
        self._run = RunContext()
        self._bar = bar
        self._task = bar.add_task("starting", total=None, loss="", speed="", busy="")

    def show(self, event: Event) -> None:
        self._run.add(event)
        match event:
            case StartEvent():
                self._bar.update(self._task, total=event.steps, description="training")
            case StepEvent():
                self._bar.update(
                    self._task,
                    completed=event.step,
                    description=f"epoch {event.epoch}",
                    loss=f"loss {event.loss:.4f}",
                    speed=f"{event.samples_per_s:,.0f} samples/s",
                    busy=f"{describe_busy(event)}{describe_loss_scale(event)}".strip(),
                )
            case _:
                for line in _lines_of(event, self._run):
                    self._bar.console.print(line, soft_wrap=True)


def _lines_of(event: Event, run: RunContext) -> Iterator[str]:
    if not isinstance(event, NOT_SHOWN) and (line := describe(event, run)):
        yield line
        yield from describe_details(event)


def with_log(show: Report, write: Callable[[str], None]) -> Report:
    """Return a function that passes log lines to `write`, and all other events to `show`."""

    def show_both(event: Event) -> None:
        if isinstance(event, LogEvent):
            write(as_text(event.to_json()))
        else:
            show(event)

    return show_both


def logged(show: Report, display: Display) -> Report:
    """Return a function that passes log lines to `display`, and all events to `show`."""
    source = RecordSource("driver")
    display.source = lambda: source

    def show_logged(event: Event) -> None:
        nonlocal source
        generation = source.generation if event.generation is None else event.generation
        step = event.step if isinstance(event, StepEvent) else source.step
        source = RecordSource("driver", generation, step)
        if isinstance(event, LogEvent):
            display.show(event.to_json())
        show(event)

    return show_logged


class Measuring(NamedTuple):
    """The measurement's end of a progress display.

    Attributes:
        progress: called with what is measured, and the seconds left.
        stop: set by a signal: return the results so far.
        signals: received so far.
    """

    progress: Progress
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
    display = _measurement_bar(console, name) if console.is_terminal else _measurement_lines(name)
    with display as progress, handle_stop_signals(on_signal):
        try:
            yield Measuring(progress, stop, signals)
        except asyncio.CancelledError:
            if count_stop_requests(signals) < 2:
                raise
            raise click.exceptions.Exit(128 + signals[-1]) from None


@contextlib.contextmanager
def _measurement_lines(name: str) -> Iterator[Progress]:
    """Print a line when another thing is measured, and from time to time."""
    loop = asyncio.get_running_loop()
    current, until, last_shown = "", float("inf"), float("-inf")
    timer: asyncio.TimerHandle | None = None

    def show() -> None:
        nonlocal last_shown, timer
        if timer is not None:
            timer.cancel()
        last_shown = loop.time()
        echo(f"{name}: {current}, {_left(until - last_shown)}", err=True)
        timer = loop.call_later(REPEAT_SECONDS, show)

    def update(what: str, left: float) -> None:
        nonlocal current, until
        is_other = what.partition(" ")[0] != current.partition(" ")[0]
        current, until = what, loop.time() + left
        if is_other or loop.time() - last_shown >= PLAIN_SECONDS:
            show()

    try:
        yield update
    finally:
        if timer is not None:
            timer.cancel()


@contextlib.contextmanager
def _measurement_bar(console: Console, name: str) -> Iterator[Progress]:
    start = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), _TimeLeft())
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None, until=start)

        def update(what: str, left: float) -> None:
            done = time.monotonic() - start
            bar.update(
                task,
                description=f"{name}: {what}",
                completed=done,
                total=done + left if left < float("inf") else None,
                until=time.monotonic() + left,
            )

        yield update


class _TimeLeft(rich.progress.ProgressColumn):
    """Seconds left, counted down between updates."""

    def render(self, task: rich.progress.Task) -> Text:
        return Text(_left(task.fields["until"] - time.monotonic()))


def _left(seconds: float) -> str:
    if seconds == float("inf"):
        return "time left not known yet"
    if seconds < 0:
        return "longer than expected"
    if seconds < 120:
        return f"about {max(1, seconds):.0f} s left"
    return f"about {seconds / 60:.0f} min left"
