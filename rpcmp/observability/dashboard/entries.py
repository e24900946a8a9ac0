"""The list of events on the page: faults, generations, checkpoints, evaluations, messages.

The newest entries of each kind are kept, so that a flood of one kind hides no other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from rpcmp.observability.events.definitions import (
    EndEvent,
    FaultEvent,
    LogEvent,
    WaitingEvent,
    WarningEvent,
)
from rpcmp.observability.events.event import Event
from rpcmp.observability.events.wording import RunContext, describe

LIMIT = 200
"""Entries of each kind."""

KINDS = {
    "fault": "fault",
    "waiting": "fault",
    "replaced": "fault",
    "generation": "generation",
    "recovered": "generation",
    "resumed": "generation",
    "checkpoint": "checkpoint",
    "best": "checkpoint",
    "eval": "evaluation",
    "early_stop": "evaluation",
    "warning": "message",
    "log": "message",
    "plan": "run",
    "shares": "run",
    "start": "run",
    "report": "run",
    "summary": "run",
    "end": "run",
}
"""The kind of entry that each event makes; other events make none."""


class Entries:
    """The entries of one run, oldest first."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._kept: dict[str, deque[dict[str, Any]]] = {
            kind: deque(maxlen=limit) for kind in KINDS.values()
        }
        self._run = RunContext()
        self.counts: Counter[str] = Counter()

    def add(self, event: Event, version: int) -> bool:
        """Take in the next event of the run; returns whether it made an entry."""
        self._run.add(event)
        kind = KINDS.get(event.event)
        if kind is None:
            return False
        entry = {
            "n": version,
            "kind": kind,
            "time": event.time,
            "step": getattr(event, "step", None),
            "generation": event.generation,
            "stage": getattr(event, "stage", ""),
            "level": _level(event),
            "text": describe(event, self._run),
        }
        self._kept[kind].append(entry)
        self.counts[kind] += 1
        return True

    def since(self, version: int) -> list[dict[str, Any]]:
        """Return the entries made after `version`, in order."""
        return sorted(self._newer(version), key=lambda entry: int(entry["n"]))

    def _newer(self, version: int) -> Iterator[dict[str, Any]]:
        for kept in self._kept.values():
            yield from (entry for entry in kept if entry["n"] > version)


def _level(event: Event) -> str:
    match event:
        case FaultEvent():
            return "error"
        case WarningEvent() | WaitingEvent():
            return "warning"
        case EndEvent():
            return "error" if event.outcome == "failed" else "info"
        case LogEvent():
            level = event.level.lower()
            return {"error": "error", "critical": "error", "warning": "warning"}.get(level, "info")
    return "info"
