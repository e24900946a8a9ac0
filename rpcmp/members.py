"""Names in an RPC group. Ranks follow the config: its stages in order, then the driver."""

from __future__ import annotations

from collections.abc import Iterable

DRIVER = "driver"
"""The driver's name; no stage can have it, since theirs hold a colon."""


def member(stage_name: str, replica: int = 0) -> str:
    """A worker's name."""
    return f"{stage_name}:{replica}"


def members(stage_names: Iterable[str]) -> list[str]:
    """All names, by rank."""
    return [*(member(name) for name in stage_names), DRIVER]
