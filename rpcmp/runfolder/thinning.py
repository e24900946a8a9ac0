"""Fewer of the events that come as long as a run lasts, so that a long run fills no disk."""

from __future__ import annotations

from rpcmp.process.channel import Message

SECONDS = 30.0
"""Between two of a kind, at first."""

SHARE = 0.05
"""Of the time that has passed: later, two of a kind are as far apart as this."""


class Thinning:
    """Lets pass fewer and fewer events of each kind, and keeps the newest that it held back."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._passed: dict[str, float] = {}
        self._held: dict[str, Message] = {}

    def passes(self, event: Message) -> bool:
        """Whether to write an event; it has a `time`."""
        kind, now = event["event"], event["time"]
        if self._first is None:
            self._first = now
        since = now - self._passed.get(kind, float("-inf"))
        if 0 <= since < max(SECONDS, SHARE * (now - self._first)):
            self._held[kind] = event
            return False
        self._passed[kind] = now
        self._held.pop(kind, None)
        return True

    def take_held(self) -> list[Message]:
        """The newest of each kind, where it was held back."""
        held, self._held = list(self._held.values()), {}
        return held
