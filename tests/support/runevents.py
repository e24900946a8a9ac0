"""Events of a run, made of dicts that name only the keys that a test is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rpcmp.observability.events import Event, parse


def typed(data: Mapping[str, Any]) -> Event:
    """The event; a key that is missing is empty."""
    event = parse(data, complete=False)
    assert event is not None, f"there is no event {data['event']!r}"
    return event
