"""The log of `rpcmp drive`: what the stages say and what its own process does, as it comes."""

from __future__ import annotations

from collections.abc import Callable

from rpcmp.logs.display import Display, Place
from rpcmp.logs.entry import as_text
from rpcmp.process.channel import Message

Show = Callable[[Message], None]


def with_log(show: Show, write: Callable[[str], None]) -> Show:
    """Have `show` write events, and the lines of the log between them, as in a terminal."""

    def show_both(event: Message) -> None:
        if event["event"] == "log":
            write(as_text(event))
        else:
            show(event)

    return show_both


def logged(show: Show, display: Display) -> Show:
    """Show the lines of the log among a run's events on `display`, and all events by `show`."""
    place = Place("driver")
    display.place = lambda: place

    def show_logged(event: Message) -> None:
        nonlocal place
        generation = event.get("generation", place.generation)
        step = event["step"] if event["event"] == "step" else place.step
        place = Place("driver", generation, step)
        if event["event"] == "log":
            display.show(event)
        show(event)

    return show_logged
