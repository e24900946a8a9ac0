"""What happened in a run, as lines: faults, generations, checkpoints, evaluations, messages.

Of each kind the newest are kept, so that a flood of one hides nothing of another.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from rpcmp.config import validation
from rpcmp.config.types import format_size
from rpcmp.observability.dashboard.curves import plain
from rpcmp.process.channel import Message

LIMIT = 200
"""Lines of each kind."""

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
"""Of the events that are worth a line."""


class Entries:
    """The lines of one run, oldest first."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._kept: dict[str, deque[dict[str, Any]]] = {
            kind: deque(maxlen=limit) for kind in KINDS.values()
        }
        self.counts: Counter[str] = Counter()

    def add(self, event: Message, version: int) -> bool:
        """Take an event; whether it was worth a line."""
        kind = KINDS.get(event["event"])
        if kind is None:
            return False
        entry = {
            "n": version,
            "kind": kind,
            "time": event.get("time"),
            "step": event.get("step"),
            "generation": event.get("generation"),
            "stage": str(event.get("stage") or ""),
            "level": _level(event),
            "text": text(event),
        }
        self._kept[kind].append(entry)
        self.counts[kind] += 1
        return True

    def since(self, version: int) -> list[dict[str, Any]]:
        """Those after `version`, in order."""
        return sorted(self._newer(version), key=lambda entry: int(entry["n"]))

    def _newer(self, version: int) -> Iterator[dict[str, Any]]:
        for kept in self._kept.values():
            yield from (entry for entry in kept if entry["n"] > version)


def _level(event: Message) -> str:
    """How much it matters: "error", "warning" or "info"."""
    match event["event"]:
        case "fault":
            return "error"
        case "warning" | "waiting":
            return "warning"
        case "end":
            return "error" if event["outcome"] == "failed" else "info"
        case "log":
            level = str(event.get("level", "")).lower()
            return {"error": "error", "critical": "error", "warning": "warning"}.get(level, "info")
    return "info"


def text(event: Message) -> str:
    """What the line of an event says; its stage and step stand beside it."""
    match event["event"]:
        case "fault":
            return f"Lost: {event['error']}"
        case "waiting":
            return f"Waiting for the server at {event['address']}"
        case "replaced":
            return f"The spare at {event['address']} takes the place of {event['lost']}"
        case "generation":
            return f"Generation {event['generation']} begins"
        case "recovered":
            return f"Going on after {event['seconds']:.1f} s"
        case "resumed":
            return _resumed(event)
        case "checkpoint":
            return _checkpoint(event)
        case "best":
            return f"The best so far: {event['metric']} {_value(event['value'])}"
        case "eval":
            found = validation.evaluation_values(event)
            return ", ".join(f"{name} {_value(value)}" for name, value in found.items())
        case "early_stop":
            return f"Stopped early: {event['metric']} has not become better"
        case "log":
            times = f" (x {event['count']})" if event.get("count", 1) > 1 else ""
            return f"{event.get('logger', '')}: {event['text']}{times}".removeprefix(": ")
        case "plan":
            return f"Balance {event['balance']}, predicted step {event['step_s'] * 1e3:,.1f} ms"
        case "shares":
            return f"Replicas share micro-batches {plain(event['shares'])}"
        case "start":
            return f"{event['steps']:,} steps"
        case "summary":
            return f"Done: {event['steps']:,} steps, loss {_value(event['loss'])}"
        case "end":
            why = f": {event['error']}" if event.get("error") else ""
            return f"The run has ended, {event['outcome']}{why}"
    return str(event.get("text", ""))


def _resumed(event: Message) -> str:
    if not event["step"]:
        return "No checkpoint to resume from: starting from the beginning"
    changed = ", ".join(event.get("changed", ()))
    return "Resuming" + (f"; changed since: {changed}" if changed else "")


def _checkpoint(event: Message) -> str:
    size = f", {format_size(event['bytes'])}" if event.get("bytes") else ""
    took = f" in {event['seconds']:.1f} s" if event.get("seconds") is not None else ""
    return f"Checkpoint{took}{size}: {event['path']}"


def _value(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
