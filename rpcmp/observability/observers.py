"""Observers of a run, which get its events without delaying it.

                         ┌─ queue ─> thread: observer.handle
    drive ──> report ────┼─ queue ─> thread: observer.handle
                         └─> show

An observer is as slow as its disk, its network or the user's code. The job's event loop, which
also carries tensors, never waits for it: an observer that lags misses events that are soon out of
date, and one that lags too far is dropped. `Logger` is the observer for functions of the user, such
as for Weights & Biases.
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
from rpcmp.observability.events import EndEvent, Event, Json, WarningEvent
from rpcmp.process.logging.collector import unreported


class Observer(Protocol):
    """Gets the events of a run; see `rpcmp.observability.events`.

    Both methods are called on a thread of the observer's own. An exception ends the observer, not
    the run.
    """

    @property
    def name(self) -> str:
        """Its name in warnings: "the run folder", "logger 'my_logs:wandb'"."""

    def handle(self, event: Event) -> None:
        """Handle the next event, without changing it: others get the same object."""

    def close(self) -> None:
        """Close; called once, after the last event, or after `handle` has raised."""


TRANSIENT = ("vitals", "timeline")
"""Events that the next of their kind replaces; an observer that lags does not get them."""

MAX_LAG = 100
"""Events in a queue above which the TRANSIENT ones are left out."""

MAX_QUEUE = 20_000
"""Events in a queue at which its observer is dropped."""

PATIENCE = 60.0
"""Seconds for all observers to finish after the run."""

Report = Callable[[Event], None]

Outcome = Literal["done", "failed", "interrupted"]


@contextlib.contextmanager
def watching(
    observers: Sequence[Observer], show: Report, patience: float = PATIENCE
) -> Iterator[Report]:
    """Pass events to `show` and all observers; emit the event `end` when the block is left.

    Args:
        observers: closed when the block is left.
        show: called directly, so it has to be quick; `report` raises its exceptions.
        patience: seconds for the observers to finish.
    """
    watch = _Watch(observers, show)
    outcome: tuple[Outcome, str] = ("done", "")
    try:
        yield watch.report
    except BaseException as error:
        outcome = _outcome(error)
        raise
    finally:
        watch.end(*outcome, patience)


class _Watch:
    """All observers of one run. Any thread may report."""

    def __init__(self, observers: Sequence[Observer], show: Report) -> None:
        self._show = show
        self._threads = [_ObserverThread(observer) for observer in observers]
        self._lock = threading.RLock()
        self._generation = 0

    def report(self, event: Event) -> None:
        with self._lock:
            self._drop_failed()
            self._emit(event)

    def end(self, outcome: Outcome, error: str, patience: float) -> None:
        """Pass `end` to the observers before it is shown, so that their failures come first."""
        deadline = time.monotonic() + patience
        with self._lock:
            self._drop_failed()
            end = self._stamped(EndEvent(outcome=outcome, error=error))
            for thread in self._threads:
                thread.put(end)
                thread.events.put(None)
        for thread in self._threads:
            thread.wait(deadline - time.monotonic())
        for thread in self._threads:
            if thread.failure is not None:
                self._show(self._stamped(WarningEvent(text=thread.failure)))
        self._show(end)

    def _emit(self, event: Event) -> None:
        if event.generation is not None:
            self._generation = event.generation
        if event.event not in TRANSIENT:  # these are only for observers; output may lag for hours
            self._show(event)
        for thread in self._threads:
            thread.put(event)

    def _drop_failed(self) -> None:
        # Read once per observer: another one may fail meanwhile.
        failures = [(thread, thread.failure) for thread in self._threads]
        self._threads = [thread for thread, failure in failures if failure is None]
        for _, failure in failures:
            if failure is not None:
                self._emit(self._stamped(WarningEvent(text=failure)))

    def _stamped(self, event: Event) -> Event:
        return event.stamped(time.time(), self._generation)


class _EventThread(threading.Thread):
    """Handles events in order, until `handle` raises or the queue yields None.

    Attributes:
        events: the queue.
        error: what `handle` raised.
    """

    def __init__(self, handle: Report, name: str) -> None:
        super().__init__(name=f"rpcmp-{name}", daemon=True)
        self.events: SimpleQueue[Event | None] = SimpleQueue()
        self.error: Exception | SystemExit | None = None
        self._on_event = handle
        self.start()

    def run(self) -> None:
        try:
            while (event := self.events.get()) is not None:
                self._on_event(event)
        except (Exception, SystemExit) as error:
            self.error = error


class _ObserverThread(_EventThread):
    """The thread of an observer.

    Attributes:
        failure: why it gets no more events; None: it has not failed.
    """

    def __init__(self, observer: Observer) -> None:
        self.failure: str | None = None
        self._observer = observer
        super().__init__(observer.handle, observer.name)

    def run(self) -> None:
        with unreported():
            super().run()
            if self.error is not None:
                self._fail(f"failed: {_reason(self.error)}")
            try:
                self._observer.close()
            except (Exception, SystemExit) as error:
                self._fail(f"failed: {_reason(error)}")

    def put(self, event: Event) -> None:
        """Queue an event, without waiting; events that the observer itself reports are skipped."""
        waiting = self.events.qsize()
        if self.failure is not None or threading.current_thread() is self:
            return
        if waiting >= MAX_QUEUE:
            self._drop(f"lags {waiting:,} events behind the run")
        elif waiting < MAX_LAG or event.event not in TRANSIENT:
            self.events.put(event)

    def wait(self, seconds: float) -> None:
        self.join(max(0.0, seconds))
        if self.is_alive():
            self._drop("did not finish in time")

    def _drop(self, why: str) -> None:
        """Discard the queue; the thread may hang in the observer."""
        self._fail(why)
        with contextlib.suppress(Empty):
            while True:
                self.events.get_nowait()
        self.events.put(None)

    def _fail(self, why: str) -> None:
        if self.failure is None:
            self.failure = f"{self._observer.name} {why}; the run goes on without it"


def _reason(error: BaseException) -> str:
    """Describe an error; the place in the code only helps if it is not an OSError."""
    if isinstance(error, RpcmpError):
        return str(error)
    return one_line(error) if isinstance(error, OSError) else importing.explain_error(error)


def _outcome(error: BaseException) -> tuple[Outcome, str]:
    """Return the outcome of a run that raised `error`, and the error's text."""
    interrupts = (InterruptedJobError, DrainingError, KeyboardInterrupt, asyncio.CancelledError)
    text = with_notes(error) if isinstance(error, RpcmpError) else one_line(error)
    return "interrupted" if isinstance(error, interrupts) else "failed", text


class Logger:
    """An observer that calls a function of the user.

    Args:
        factory: "module:callable", with arguments; it returns the function.
        key: its key in the config.
        config: the job, an argument of the callable.

    Raises:
        FactoryError: the callable raised, or did not return a function.
    """

    def __init__(self, factory: Factory, key: str, config: Config) -> None:
        self.name = f"the logger {factory.callable!r}"
        function: Any = importing.create(factory, key, config)
        if not callable(function):
            raise FactoryError(
                f"{key} = {factory.callable!r} returned {type(function).__name__}; it has to "
                "return a function that takes an event"
            )
        self._function: Callable[[Json], Any] = function

    def handle(self, event: Event) -> None:
        """Call the function with a copy of the event's JSON form, which it may change."""
        try:
            self._function(copy.deepcopy(event.to_json()))
        except (Exception, SystemExit) as error:
            raise FactoryError(importing.explain_error(error)) from error

    def close(self) -> None:
        """Do nothing: the function's last event was `end`."""


def create_loggers(config: Config) -> list[Logger]:
    """Return the loggers of a config; all are imported before the first is called.

    Raises:
        FactoryError: a logger cannot be imported or created.
    """
    factories = {f"log.loggers.{i}": factory for i, factory in enumerate(config.log.loggers)}
    if factories:
        sys.path.insert(0, str(config.folder))
    for key, factory in factories.items():
        importing.resolve(factory.callable, key)
    return [Logger(factory, key, config) for key, factory in factories.items()]


@contextlib.contextmanager
def in_background(show: Report) -> Iterator[Report]:
    """Call `show` on a thread of its own; all events are shown before the block is left.

    Output may be read slowly, or not at all for a while, and the job's event loop, which also
    carries tensors, must not wait for that. An exception of `show` is raised at the next event.
    """
    thread = _EventThread(show, "output")

    def report(event: Event) -> None:
        if thread.error is not None:
            raise thread.error
        thread.events.put(event)

    try:
        yield report
    finally:
        thread.events.put(None)
        thread.join()
    if thread.error is not None:
        raise thread.error
