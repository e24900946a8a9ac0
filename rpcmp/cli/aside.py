"""Showing what happens without holding it up."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from rpcmp.process.channel import Message

Report = Callable[[Message], None]


@contextlib.contextmanager
def aside(show: Report) -> Iterator[Report]:
    """Show events in a thread of their own, in order, all of them before the block is left.

    Output may go to somebody who reads it slowly, or not for a while; the job's event loop, which
    carries its tensors, must not wait for that.

    Raises:
        Exception: what `show` has raised, at the next event.
    """
    events: SimpleQueue[Message | None] = SimpleQueue()
    errors: list[Exception] = []

    def run() -> None:
        while (event := events.get()) is not None:
            try:
                show(event)
            except Exception as error:
                errors.append(error)
                return

    def report(event: Message) -> None:
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
