"""Findings of `rpcmp doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def failed(found: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(one["where"], one["check"]) for one in found if one["status"] == "failed"]
