"""A run's page as one file, or that of several side by side; `rpcmp report` writes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rpcmp.page.assets import single_file
from rpcmp.page.state import State
from rpcmp.runfolder.compare import compare
from rpcmp.runfolder.reader import Record
from rpcmp.runfolder.tables import tables


def html(runs: Sequence[Record]) -> str:
    """A page that shows `runs`; it works without network and without files beside it."""
    data: dict[str, Any] = {"runs": [{"name": run.name, "state": _state(run)} for run in runs]}
    if len(runs) > 1:
        found = compare(runs)
        data["comparison"] = {
            "tables": [asdict(table) for table in tables(found)],
            "verdict": found.verdict,
        }
    return single_file(json.dumps(data, allow_nan=False, separators=(",", ":")))


def _state(run: Record) -> dict[str, Any] | None:
    state = State()
    for event in run.events:
        state.take(event)
    return state.since(None)
