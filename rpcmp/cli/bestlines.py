"""What `rpcmp drive` says of evaluations that were the best, or not better any more."""

from __future__ import annotations

from typing import Any

from rpcmp.process.channel import Message


def line(event: Message) -> str:
    """One line for one event."""
    if event["event"] == "best":
        return f"the best so far is kept: step {event['step']}, {_value(event)}"
    waited = f"{event['waited']} evaluation" + ("s" if event["waited"] > 1 else "")
    if event["best"] is None:
        return f"stopped early after step {event['step']}: {event['metric']} was NaN in {waited}"
    found = f"{event['metric']} {event['best']:.4f} after step {event['best_step']}"
    return (
        f"stopped early after step {event['step']}: {waited} in a row brought nothing better "
        f"than {found}"
    )


def kept(best: dict[str, Any]) -> str:
    """Where the best checkpoint is."""
    return f"best step {best['step']}, {_value(best)}, in {best['path']}"


def _value(best: dict[str, Any]) -> str:
    return f"{best['metric']} {best['value']:.4f}"
