"""The events of a run: a class for each, whose fields are the keys of its JSON form.

Everything that observes a run gets these events: the terminal, `--json`, the run folder, the page,
the metrics, TensorBoard and the user's loggers. `wording.py` describes them for people. The
names of the other modules are exported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rpcmp.observability.events.event import *
from rpcmp.observability.events.process_events import *
from rpcmp.observability.events.run_events import *
from rpcmp.observability.events.training_events import *

EVENTS: dict[str, type[Event]] = {
    kind.event: kind
    for kind in (
        UiEvent,
        RunEvent,
        MeasuringEvent,
        PlanEvent,
        SharesEvent,
        GenerationEvent,
        StartEvent,
        StepEvent,
        ScheduleEvent,
        EvalEvent,
        EarlyStopEvent,
        ReportEvent,
        CheckpointEvent,
        BestEvent,
        FaultEvent,
        RecoveredEvent,
        WaitingEvent,
        ReplacedEvent,
        StagesEvent,
        RebalanceEvent,
        ResumedEvent,
        WarningEvent,
        LogEvent,
        SummaryEvent,
        KeptEvent,
        EndEvent,
        VitalsEvent,
        TimelineEvent,
    )
}
"""All events, by the value of their key `event`, in the order of the documentation."""


def parse(data: Mapping[str, Any], complete: bool = True) -> Event | None:
    """Return the event of a JSON object; None if this version does not define such an event.

    Args:
        data: the object.
        complete: refuse an object that lacks a key; see `Event.from_json`.

    Raises:
        ValueError: a value is of the wrong type, or missing.
    """
    kind = EVENTS.get(data["event"])
    return None if kind is None else kind.from_json(data, complete)
