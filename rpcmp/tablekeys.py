"""Nested tables, such as a config, as one flat table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def flat(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested tables and lists of tables, by dotted key; other lists are leaves."""
    if isinstance(values, list) and any(isinstance(item, dict) for item in values):
        values = dict(enumerate(values))
    if not isinstance(values, dict):
        yield prefix, values
        return
    for key, value in values.items():
        yield from flat(value, f"{prefix}.{key}" if prefix else str(key))
