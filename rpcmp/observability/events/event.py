"""The base class of all events, with their JSON form, and the types of values inside of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields, replace
from typing import Any, ClassVar, Self, TypedDict

Json = dict[str, Any]
"""An event as a JSON object: a line of `--json`, and what a user's logger gets."""

STAMP = ("time", "generation")
"""Keys that every event has once it is emitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event of a run.

    A field whose default is None is an optional key: while it is None, the JSON form lacks it.

    Attributes:
        event: the value of the key `event`.
        FLAT: the field whose entries are keys of the event itself; empty: none.
        STAMP_FIRST: whether the JSON form has `time` and `generation` before the other keys.
        time: when the event was emitted, in seconds since 1970.
        generation: the generation in which it was emitted.
    """

    event: ClassVar[str] = ""
    FLAT: ClassVar[str] = ""
    STAMP_FIRST: ClassVar[bool] = False

    time: float | None = None
    generation: int | None = None

    def stamped(self, time: float, generation: int) -> Self:
        """The event with `time`, and with `generation` unless it has one already."""
        known = self.generation
        return replace(self, time=time, generation=generation if known is None else known)

    def to_json(self) -> Json:
        """The event as a JSON object; nested values are those of the event, not copies."""
        own: Json = {}
        for field in own_fields(type(self)):
            value = getattr(self, field.name)
            if field.name == self.FLAT:
                own |= value
            elif value is not None or field.default is not None:
                own[field.name] = value
        stamp = {key: value for key in STAMP if (value := getattr(self, key)) is not None}
        first, last = (stamp, own) if self.STAMP_FIRST else (own, stamp)
        return {"event": self.event, **first, **last}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], complete: bool) -> Self:
        """The event of an object that `to_json` returned and JSON has carried.

        Args:
            data: the object; keys that the class does not define are ignored.
            complete: refuse an object that lacks a key. Without it a missing number is NaN or 0,
                and anything else is empty: an older version did not write the key.

        Raises:
            ValueError: a value is of the wrong type, or missing.
        """
        values = {key: _value(cls, "float | int", key, data) for key in STAMP if key in data}
        for field in own_fields(cls):
            key = field.name
            if key == cls.FLAT:
                taken = {"event", *STAMP, *(each.name for each in own_fields(cls))} - {key}
                values[key] = {
                    name: _value(cls, "float", name, data) for name in data if name not in taken
                }
            elif key in data:
                values[key] = _value(cls, str(field.type), key, data)
            elif complete and field.default is not None:
                raise ValueError(f"the event {cls.event!r} has no {key!r}")
            elif field.default is not None:
                values[key] = _EMPTY[_types(str(field.type))[-1]]()
        return cls(**values)


def own_fields(kind: type[Event]) -> list[Field[Any]]:
    """The fields of an event's class other than `time` and `generation`, in their order."""
    return [field for field in fields(kind) if field.name not in STAMP]


_EMPTY: dict[str, Callable[[], Any]] = {
    "str": str,
    "Literal": str,
    "int": int,
    "float": lambda: math.nan,
    "bool": bool,
    "dict": dict,
    "list": list,
    "None": lambda: None,
}

_ACCEPTED: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "Literal": str,
    "int": int,
    "float": (int, float),
    "bool": bool,
    "dict": dict,
    "list": list,
    "None": type(None),
}


def _types(annotation: str) -> list[str]:
    """The built-in types that a field's annotation allows, as "dict" for a TypedDict."""
    names = (part.partition("[")[0] for part in annotation.split(" | "))
    return [name if name in _ACCEPTED else "dict" for name in names]


def _value(kind: type[Event], annotation: str, key: str, data: Mapping[str, Any]) -> Any:
    value, types = data[key], _types(annotation)
    if value is None and "float" in types and "None" not in types:
        return math.nan  # JSON has no number that is not finite: null stands for it
    if not any(isinstance(value, _ACCEPTED[each]) for each in types):
        raise ValueError(f"the event {kind.event!r} has {key} = {value!r:.100}, which is not valid")
    return value


class WorkerInfo(TypedDict):
    """A worker of the event `run`; `address` is empty until its server is started."""

    label: str
    stage: str
    stage_index: int
    replica: int
    address: str


class StageInfo(TypedDict):
    """A stage of the event `run`; `schedule_row` is its row in a pipeline diagram."""

    name: str
    index: int
    inputs: list[str]
    replicas: int
    device: str
    schedule_row: int


class GraphInfo(TypedDict):
    """The graph of stages of the event `run`, in topological order."""

    stages: list[StageInfo]


class StagePlan(TypedDict):
    """What the event `plan` predicts of a stage."""

    num_layers: int
    busy_s: float
    bubble: float
    memory_bytes: int
    limit_bytes: int | None


class ProcessPlace(TypedDict):
    """Where a process of a generation runs."""

    host: str
    pid: int


class WorkerPlace(ProcessPlace):
    """Where a worker of a generation runs."""

    address: str
    device: str


class ProcessVitals(TypedDict, total=False):
    """The state of a process in the event `vitals`; the driver's is empty until it has reported."""

    state: str
    restarts: int
    host: str
    pid: int
    phase: str
    microbatch: int
    seconds: float
    memory: int
    cpu_seconds: float
    in_flight: int


LinkTraffic = TypedDict(
    "LinkTraffic", {"from": str, "to": str, "bytes": int, "bytes_per_s": float, "rtt_s": float}
)
"""The traffic from one member to another in the event `vitals`."""


class StageTimeline(TypedDict):
    """What a stage did in the step of the event `timeline`.

    `spans` are [kind, micro-batch, start, end], `idle` are [reason, start, end], both in seconds
    since the step's start; `busy` and `lost` are shares of the step, by kind and by reason.
    """

    label: str
    host: str
    spans: list[list[Any]]
    idle: list[list[Any]]
    busy: dict[str, float]
    lost: dict[str, float]


class Memory(TypedDict):
    """The memory of a stage's process in bytes, in the event `summary`."""

    idle: int
    peak: int


class BestStep(TypedDict):
    """The best checkpoint that is kept, in the event `summary`."""

    step: int
    metric: str
    value: float
    path: str


class PlanOutcome(TypedDict):
    """The plan of the event `plan` and what came of it, in the event `summary`."""

    balance: list[int]
    predicted_step_s: float
    measured_step_s: float | None
