"""A run's page as one file, or that of several side by side; `rpcmp report` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rpcmp.page.assets import single_file
from rpcmp.page.compare import Outcome, differences
from rpcmp.page.state import State
from rpcmp.process.channel import Message


@dataclass(frozen=True)
class RunData:
    """What is known of a run that is over, or of one that still goes on.

    Attributes:
        name: what the page calls it.
        events: in order, as `rpcmp.job.drive` reports them; read once.
    """

    name: str
    events: Iterable[Message]


def html(runs: Sequence[RunData]) -> str:
    """A page that shows `runs`; it works without network and without files beside it."""
    states, outcomes = [], []
    for run in runs:
        state, outcome = State(), Outcome()
        for event in run.events:
            state.take(event)
            outcome.take(event)
        states.append(state.since(None))
        outcomes.append(outcome)
    data: dict[str, Any] = {
        "runs": [
            {"name": run.name, "state": state} for run, state in zip(runs, states, strict=True)
        ]
    }
    if len(runs) > 1:
        data["differences"] = differences(outcomes)
    return single_file(json.dumps(data, allow_nan=False, separators=(",", ":")))
