"""What looks at a run.

Telling observers of a run without holding it up.

                         ┌─ queue ─> thread: observer.tell
    drive ──> report ────┼─ queue ─> thread: observer.tell
                         └─> show

What an observer does takes as long as its disk, its network or its user's code does. The job's
event loop, which carries its tensors, never waits for it: an observer that lags misses what is
soon out of date, and one that lags without end is dropped.

Loggers: the user's own functions that are told of a run, such as for Weights & Biases.

Showing what happens without holding it up.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Literal, Protocol

from rpcmp.config import importing
from rpcmp.config.schema import Config
from rpcmp.config.types import Factory
from rpcmp.errors import (
    DrainingError,
    FactoryError,
    InterruptedJobError,
    RpcmpError,
    one_line,
    with_notes,
)
from rpcmp.observability.events.definitions import EndEvent, WarningEvent
from rpcmp.observability.events.event import Event, Json
from rpcmp.process.logging.display import unreported


class Observer(Protocol):
    """Is told what happens in a run; see `rpcmp.observability.events` for the events.

    Both methods are called on a thread of the observer's own. What they raise ends the observer,
    not the run.
    """

    @property
    def name(self) -> str:
        """What a warning calls it: "the run folder", "logger 'my_logs:wandb'"."""

    def tell(self, event: Event) -> None:
        """Take an event, in order, and leave it as it is: others get the same object."""

    def close(self) -> None:
        """Finish; called once, after the last event, or after `tell` has raised."""


PASSING = ("vitals", "timeline")
"""Events that the next of their kind replaces: one that lags does without."""

LAG = 100
"""Events in a queue from which on PASSING ones are left out."""

MOST = 20_000
"""Events in a queue at which its observer is given up."""

PATIENCE = 60.0
"""Seconds for all observers to finish when the run has ended."""

Report = Callable[[Event], None]

Outcome = Literal["done", "failed", "interrupted"]


@contextlib.contextmanager
def watching(
    observers: Sequence[Observer], show: Report, patience: float = PATIENCE
) -> Iterator[Report]:
    """Tell `show` and all observers what is reported, then the event `end`, which is the last.

    Args:
        observers: closed when the block is left.
        show: called at once, so it has to be quick; what it raises, `report` raises.
        patience: seconds for the observers to finish.
    """
    watch = _Watch(observers, show)
    try:
        yield watch.report
    except BaseException as error:
        watch.end(*_outcome(error), patience)
        raise
    else:
        watch.end("done", "", patience)


class _Watch:
    """All who look at one run. Any thread may report."""

    def __init__(self, observers: Sequence[Observer], show: Report) -> None:
        self._show = show
        self._posts = [_ObserverQueue(observer) for observer in observers]
        self._lock = threading.RLock()
        self._generation = 0

    def report(self, event: Event) -> None:
        with self._lock:
            self._drop_those_who_failed()
            self._tell(event)

    def end(self, outcome: Outcome, error: str, patience: float) -> None:
        """Observers hear the end first: what goes wrong with them is shown before it."""
        ends = time.monotonic() + patience
        with self._lock:
            self._drop_those_who_failed()
            stamped = self._stamped(EndEvent(outcome=outcome, error=error))
            for post in self._posts:
                post.tell(stamped)
                post.finish()
        for post in self._posts:
            post.join(ends - time.monotonic())
        for post in self._posts:
            if post.failure is not None:
                self._show(self._stamped(WarningEvent(text=post.failure)))
        self._show(stamped)

    def _tell(self, event: Event) -> None:
        if event.generation is not None:
            self._generation = event.generation
        if event.event not in PASSING:  # for observers alone; output may go unread for hours
            self._show(event)
        for post in self._posts:
            post.tell(event)

    def _drop_those_who_failed(self) -> None:
        found = [(post, post.failure) for post in self._posts]  # another may fail meanwhile
        self._posts = [post for post, failure in found if failure is None]
        for _, failure in found:
            if failure is not None:
                self._tell(self._stamped(WarningEvent(text=failure)))

    def _stamped(self, event: Event) -> Event:
        return event.stamped(time.time(), self._generation)


class _ObserverQueue:
    """An observer with its queue and its thread.

    Attributes:
        failure: why it is told nothing any more; None: it is.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self.failure: str | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"rpcmp-{observer.name}", daemon=True
        )
        self._thread.start()

    def tell(self, event: Event) -> None:
        """Never waits. What an observer reports on this thread it is not told."""
        waiting = self._events.qsize()
        if self.failure is not None or threading.current_thread() is self._thread:
            return
        if waiting >= MOST:
            self._give_up(f"lags {waiting:,} events behind the run")
        elif waiting < LAG or event.event not in PASSING:
            self._events.put(event)

    def finish(self) -> None:
        self._events.put(None)

    def join(self, seconds: float) -> None:
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._give_up("did not finish in time")

    def _give_up(self, why: str) -> None:
        """What it has not heard it will not hear: its thread may hang in the last `tell`."""
        self._fail(why)
        with contextlib.suppress(Empty):
            while True:
                self._events.get_nowait()
        self._events.put(None)

    def _fail(self, why: str) -> None:
        if self.failure is None:
            self.failure = f"{self._observer.name} {why}; the run goes on without it"

    def _run(self) -> None:
        with unreported():
            self._tell_all()

    def _tell_all(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                self._observer.tell(event)
        except (Exception, SystemExit) as error:
            self._fail(f"failed: {_reason(error)}")
        try:
            self._observer.close()
        except (Exception, SystemExit) as error:
            self._fail(f"failed: {_reason(error)}")


def _reason(error: BaseException) -> str:
    """Where in the code a disk was full helps nobody."""
    if isinstance(error, RpcmpError):
        return str(error)
    return one_line(error) if isinstance(error, OSError) else importing.explain_error(error)


def _outcome(error: BaseException) -> tuple[Outcome, str]:
    """How a run ended that raised `error`, and the error's text."""
    ended = (InterruptedJobError, DrainingError, KeyboardInterrupt, asyncio.CancelledError)
    text = with_notes(error) if isinstance(error, RpcmpError) else one_line(error)
    return "interrupted" if isinstance(error, ended) else "failed", text


class Logger:
    """One of them; an observer.

    Args:
        made: "module:callable", with arguments.
        what: its key in the config.
        config: the job, which the callable is given.

    Raises:
        FactoryError: the callable raised, or did not return a function.
    """

    def __init__(self, made: Factory, what: str, config: Config) -> None:
        self.name = f"the logger {made.callable!r}"
        found: Any = importing.create(made, what, config)
        if not callable(found):
            raise FactoryError(
                f"{what} = {made.callable!r} returned {type(found).__name__}; it has to return a "
                "function that takes an event"
            )
        self._tell: Callable[[Json], Any] = found

    def tell(self, event: Event) -> None:
        """See Observer. The user's code gets a copy of the event's JSON form, which it may change.

        Raises:
            FactoryError: it has raised; says where.
        """
        try:
            self._tell(copy.deepcopy(event.to_json()))
        except (Exception, SystemExit) as error:
            raise FactoryError(importing.explain_error(error)) from error

    def close(self) -> None:
        """See Observer. The event `end` was its last."""


def loggers(config: Config) -> list[Logger]:
    """Those of a config; all are looked up before the first is called.

    Raises:
        FactoryError: one cannot be had.
    """
    named = {f"log.loggers.{index}": made for index, made in enumerate(config.log.loggers)}
    if named:
        sys.path.insert(0, str(config.folder))
    for what, made in named.items():
        importing.resolve(made.callable, what)
    return [Logger(made, what, config) for what, made in named.items()]


@contextlib.contextmanager
def aside(show: Report) -> Iterator[Report]:
    """Show events in a thread of their own, in order, all of them before the block is left.

    Output may go to somebody who reads it slowly, or not for a while; the job's event loop, which
    carries its tensors, must not wait for that.

    Raises:
        Exception: what `show` has raised, at the next event.
    """
    events: SimpleQueue[Event | None] = SimpleQueue()
    errors: list[Exception] = []

    def run() -> None:
        while (event := events.get()) is not None:
            try:
                show(event)
            except Exception as error:
                errors.append(error)
                return

    def report(event: Event) -> None:
        if errors:
            raise errors[0]
        events.put(event)

    showing = threading.Thread(target=run, name="rpcmp-output", daemon=True)
    showing.start()
    try:
        yield report
    finally:
        events.put(None)
        showing.join()
    if errors:
        raise errors[0]
