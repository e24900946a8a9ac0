"""The events of a run's processes: generations, faults, vitals and timelines.

A process has one of these states, which `vitals`, the page and the metrics name alike:

    claimed ──> building ──> running ──> ended
                    any of them ──fault──> lost ──next generation──> claimed ...

A process stays lost until the next generation, whatever older reports about it arrive meanwhile.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from rpcmp.observability.events.event import Event, event_type

LOST = "lost"

WORKER_STATES = ("claimed", "building", "running", "ended", LOST)
"""The states of a worker and of the driver, in the event `vitals`."""


def state_name(enum_name: str) -> str:
    """Return the name in events and metrics of a `ServerState` of the protos."""
    return enum_name.removeprefix("SERVER_STATE_").lower()


class LostWorkers:
    """The workers that are lost, with the generation in which each was lost."""

    def __init__(self) -> None:
        self._generations: dict[str, int] = {}

    def __contains__(self, label: object) -> bool:
        return label in self._generations

    def add(self, label: str, generation: int) -> None:
        self._generations[label] = generation

    def revive(self, label: str, generation: int) -> bool:
        """Return whether a report of `generation` shows that the worker is not lost any more."""
        if self._generations.get(label, -1) >= generation:
            return False
        self._generations.pop(label, None)
        return True

    def clear(self) -> None:
        """Start a generation, in which no worker is lost yet."""
        self._generations.clear()


class ProcessPlace(TypedDict):
    """The location of a process of a generation."""

    host: str
    pid: int


class WorkerPlace(ProcessPlace):
    """The location of a worker of a generation."""

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
    device: str
    device_memory: int


LinkTraffic = TypedDict(
    "LinkTraffic", {"from": str, "to": str, "bytes": int, "bytes_per_s": float, "rtt_s": float}
)
"""The traffic from one member to another in the event `vitals`."""


class StageTimeline(TypedDict):
    """A stage's computation and idle times in the step of the event `timeline`.

    `spans` are [kind, micro-batch, start, end], `idle` are [reason, start, end], both in seconds
    since the step's start; `busy` and `lost` are shares of the step, by kind and by reason.
    """

    label: str
    host: str
    spans: list[list[Any]]
    idle: list[list[Any]]
    busy: dict[str, float]
    lost: dict[str, float]


@event_type("generation")
class GenerationEvent(Event):
    """A generation, which is a group of processes, has started.

    Attributes:
        step: the step after which it goes on
        workers: `address`, `host`, `pid` and `device` of each worker
        driver: `host` and `pid` of the driver's process
    """

    step: int
    workers: dict[str, WorkerPlace]
    driver: ProcessPlace


@event_type("fault")
class FaultEvent(Event):
    """A process of the run was lost.

    Attributes:
        step: the last step before
        error: what happened
        kind: name of the error in `rpcmp.errors`
        stage: label of the worker, or `driver`; empty if it is unknown
        host: host of that process; empty if it is unknown
    """

    step: int
    error: str
    kind: str
    stage: str
    host: str


@event_type("recovered")
class RecoveredEvent(Event):
    """The run goes on after a fault.

    Attributes:
        step: the step after which it goes on
        seconds: time since the fault
    """

    step: int
    seconds: float


@event_type("waiting")
class WaitingEvent(Event):
    """The run waits for a server that is gone.

    Attributes:
        stage: label of its worker
        address: address of the server
    """

    stage: str
    address: str


@event_type("replaced")
class ReplacedEvent(Event):
    """A spare has replaced a server that is gone.

    Attributes:
        stage: label of the worker
        lost: address of the server that is gone
        address: address of the spare
    """

    stage: str
    lost: str
    address: str


@event_type("rebalance")
class RebalanceEvent(Event):
    """Layers move between stages, or should: a host has become slower or faster, joined or left.

    Attributes:
        step: the last step before
        outcome: `moved`; `undone`: it goes on with the balance before; `suggested`: it is the
            user's choice
        balance: layers per stage that it goes on with, or should
        before: layers per stage before
        reason: what has changed, or why it was undone
        seconds: time without training that it took; 0 if only suggested
    """

    step: int
    outcome: Literal["moved", "undone", "suggested"]
    balance: list[int]
    before: list[int]
    reason: str
    seconds: float


@event_type("vitals")
class VitalsEvent(Event):
    """Each second, to loggers alone: the state of all processes.

    Attributes:
        step: the last step
        workers: of each worker: `state`, `restarts`, `host`, `pid`, `phase`, `microbatch`,
            `seconds` in that phase, `memory` in bytes, `cpu_seconds`, `in_flight` micro-batches,
            its `device` and what torch has there, `device_memory` in bytes, 0 on the CPU
        driver: the same of the driver's process, without a device; empty before it has reported
        links: traffic `from` a member `to` another: `bytes`, `bytes_per_s`, `rtt_s`
    """

    step: int
    workers: dict[str, ProcessVitals]
    driver: ProcessVitals
    links: list[LinkTraffic]


@event_type("timeline")
class TimelineEvent(Event):
    """Every other second, to loggers alone: what each stage did in a step.

    Attributes:
        step: the step
        seconds: its duration
        stages: of each worker: `label`, `host`, `spans` of computation, `idle` times by reason,
            `busy` and `lost` shares
        bottleneck: which stage limits the speed, and why
    """

    step: int
    seconds: float
    stages: list[StageTimeline]
    bottleneck: str
