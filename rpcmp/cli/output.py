"""The output of `rpcmp drive`: a progress bar on a terminal, plain lines elsewhere, or JSON."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rpcmp.cli.console import Console
from rpcmp.cli.terminal import echo
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
from rpcmp.process.logging.collector import Display, RecordSource
from rpcmp.process.logging.records import as_text, visible

PLAIN_SECONDS = 2.0
"""Seconds between the lines of steps without a terminal."""

NOT_SHOWN = (GenerationEvent, LogEvent, EndEvent)
"""Events without a line, since the log and the command's own errors have the same contents."""


@contextlib.contextmanager
def printer(as_json: bool, verbose: bool, quiet: bool) -> Iterator[Report]:
    """Yield the function that shows events."""
    if as_json:
        yield _show_json
        return
    console = Console()
    if console.is_terminal and not quiet and not verbose:
        with _bar(console) as progress:
            yield _Terminal(console, progress).show
        return
    yield _Plain(echo, every=0.0 if verbose else PLAIN_SECONDS, quiet=quiet).show


def _show_json(event: Event) -> None:
    echo(dumps(event.to_json()))


def plain(write: Callable[[str], None]) -> Report:
    """Return a function that passes the events of a run to `write` as plain lines."""
    return _Plain(write, PLAIN_SECONDS, quiet=False).show


class _Plain:
    """Writes a line for the first and the last step, and for a step every few seconds."""

    def __init__(self, write: Callable[[str], None], every: float, quiet: bool) -> None:
        self._run = RunContext()
        self._write = write
        self._every = every
        self._quiet = quiet
        self._shown = float("-inf")

    def show(self, event: Event) -> None:
        self._run.add(event)
        if isinstance(event, StepEvent):
            is_due = time.monotonic() - self._shown >= self._every
            if not is_due and event.step < self._run.steps:
                return
            self._shown = time.monotonic()
        if not self._quiet or isinstance(event, SummaryEvent | UiEvent):
            for line in _lines(event, self._run):
                self._write(visible(line))


class _Terminal:
    """Shows a progress bar, and all other events above it."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._run = RunContext()
        self._console = console
        self._progress = progress
        self._task = progress.add_task("starting", total=None, loss="", speed="", busy="")

    def show(self, event: Event) -> None:
        self._run.add(event)
        match event:
            case StartEvent():
                self._progress.update(self._task, total=event.steps, description="training")
            case StepEvent():
                self._progress.update(
                    self._task,
                    completed=event.step,
                    description=f"epoch {event.epoch}",
                    loss=f"loss {event.loss:.4f}",
                    speed=f"{event.samples_per_s:,.0f} samples/s",
                    busy=f"{describe_busy(event)}{describe_loss_scale(event)}".strip(),
                )
            case _:
                for line in _lines(event, self._run):
                    self._console.print(line, soft_wrap=True)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
        TextColumn("{task.fields[busy]}"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def _lines(event: Event, run: RunContext) -> Iterator[str]:
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
    place = RecordSource("driver")
    display.source = lambda: place

    def show_logged(event: Event) -> None:
        nonlocal place
        generation = place.generation if event.generation is None else event.generation
        step = event.step if isinstance(event, StepEvent) else place.step
        place = RecordSource("driver", generation, step)
        if isinstance(event, LogEvent):
            display.show(event.to_json())
        show(event)

    return show_logged
