"""What an event `eval` says: the loss and the metrics, beside what every event has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OTHER_KEYS = ("event", "step", "epoch", "time", "generation")
"""Of the event; no metric can have such a name."""


def values(event: Mapping[str, Any]) -> dict[str, Any]:
    """Loss and metrics by name."""
    return {name: value for name, value in event.items() if name not in OTHER_KEYS}
