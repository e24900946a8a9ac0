"""The events of a run as a whole: what it is, what it logs, how it ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self, TypedDict

from rpcmp.observability.events.event import Event, event_type


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
    """The prediction for a stage in the event `plan`."""

    num_layers: int
    busy_s: float
    messages_s: float
    bubble: float
    memory_bytes: int
    limit_bytes: int | None


@event_type("ui")
class UiEvent(Event):
    """First of all, with `--ui`. Loggers do not get it, since the address may hold a token.

    Attributes:
        url: address of the page
    """

    url: str


@event_type("run")
class RunEvent(Event):
    """Before anything is started: what the job is.

    Attributes:
        name: the job's name
        config: the config, without what is secret
        versions: of `rpcmp`, `torch` and `python`
        driver: host of the driver
        pid: process id of the driver
        job_id: unique for each start of a run
        graph: `stages`, in topological order, with their `inputs`, `replicas` and `device`
        workers: `label`, `stage`, `replica` and, if it is known by now, `address` of each worker
    """

    name: str
    config: dict[str, Any]
    versions: dict[str, str]
    driver: str
    pid: int
    job_id: str
    graph: GraphInfo
    workers: list[WorkerInfo]


@event_type("stages")
class StagesEvent(Event):
    """Hosts have joined or left: the run has other stages from now on.

    Attributes:
        step: the step after which it goes on
        graph: as in `run`
        workers: as in `run`
    """

    step: int
    graph: GraphInfo
    workers: list[WorkerInfo]


@event_type("measuring")
class MeasuringEvent(Event):
    """Before the first step, if `balance`, `balance_replicas` or `rebalance` asks for speeds."""


@event_type("plan")
class PlanEvent(Event):
    """The balance was measured: what it promises.

    Attributes:
        balance: layers of each stage
        step_s: predicted seconds of a step
        bubble: predicted share of a step in which stages idle, over all stages
        is_rehearsed: whether steps were measured; if not, `step_s` is without messages and data
        loading_s: predicted seconds for the samples of a step, beside the step before
        stages: the prediction for each stage: `num_layers`, `busy_s`, `messages_s`, `bubble`,
            `memory_bytes`, `limit_bytes`
    """

    balance: list[int]
    step_s: float
    bubble: float
    is_rehearsed: bool
    loading_s: float
    stages: dict[str, StagePlan]


@event_type("shares")
class SharesEvent(Event):
    """With `balance_replicas`, after the replicas were measured.

    Attributes:
        shares: micro-batches that each replica of a stage gets, in proportion to each other
    """

    shares: dict[str, list[int]]


@event_type("resumed")
class ResumedEvent(Event):
    """With `--resume`.

    Attributes:
        step: the step after which the run goes on; 0 if there was no checkpoint
        run: `job_id` of the run that the checkpoint is from; missing if there was none
        changed: keys of the config that have changed since then
        from_memory: true if it goes on from what the stage servers held, since the driver was lost
        is_complete: true if the run had ended after that step, so that there is nothing left to do
    """

    step: int
    run: str | None = None
    changed: list[str]
    from_memory: bool | None = None
    is_complete: bool | None = None


@event_type("warning")
class WarningEvent(Event):
    """Something is allowed but hardly intended, or went wrong without ending the run.

    Attributes:
        text: the warning
    """

    text: str


@event_type("log", stamp_first=True)
class LogEvent(Event):
    """A process of the run has logged or printed a line.

    Attributes:
        stage: label of the worker, or `driver`
        step: the step that the process was in; 0 before the first
        level: level of the line, as in `logging`
        logger: name of the logger, or `stdout` or `stderr`
        text: the line
        count: how many equal or similar lines it stands for, itself included
    """

    stage: str
    step: int
    level: str
    logger: str
    text: str
    count: int

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> Self:
        """Convert a record of `rpcmp.process.logging`; the parts of its text may be any objects.

        A record that is made by hand may have None for its logger's name. An error here would
        lose the record, since it could not be logged in turn.
        """
        texts = {key: str(entry[key]) for key in ("stage", "level", "logger", "text")}
        return cls.from_json({**entry, **texts}, complete=True)


@event_type("kept")
class KeptEvent(Event):
    """At the end of a run that keeps a folder.

    Attributes:
        path: the run's folder
    """

    path: str


@event_type("end")
class EndEvent(Event):
    """Last, however the run ended.

    Attributes:
        outcome: `done`, `failed` or `interrupted`
        error: why it failed or was interrupted; else empty
    """

    outcome: Literal["done", "failed", "interrupted"]
    error: str
