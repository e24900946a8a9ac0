"""Events of a run, built from dicts that name only the keys of interest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rpcmp.observability.events import Event, parse


def typed(data: Mapping[str, Any]) -> Event:
    """Return the event of `data`; missing keys are empty."""
    event = parse(data, complete=False)
    assert event is not None, f"there is no event {data['event']!r}"
    return event
