"""The events of a run: one class for each, whose fields are the keys of its JSON form.

`python -m rpcmp.observability.events` prints them as the table of the documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rpcmp.observability.events.event import (
    BestStep,
    Event,
    GraphInfo,
    LinkTraffic,
    Memory,
    PlanOutcome,
    ProcessPlace,
    ProcessVitals,
    StagePlan,
    StageTimeline,
    WorkerInfo,
    WorkerPlace,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UiEvent(Event):
    """First of all, with `--ui`. Loggers do not get it, since the address may hold a token.

    Attributes:
        url: address of the page
    """

    event: ClassVar[str] = "ui"

    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
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

    event: ClassVar[str] = "run"

    name: str
    config: dict[str, Any]
    versions: dict[str, str]
    driver: str
    pid: int
    job_id: str
    graph: GraphInfo
    workers: list[WorkerInfo]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEvent(Event):
    """The balance was measured: what it promises.

    Attributes:
        balance: layers of each stage
        step_s: predicted seconds of a step
        bubble: predicted share of a step in which stages idle, over all stages
        stages: the prediction for each stage: `num_layers`, `busy_s`, `bubble`, `memory_bytes`,
            `limit_bytes`
    """

    event: ClassVar[str] = "plan"

    balance: list[int]
    step_s: float
    bubble: float
    stages: dict[str, StagePlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesEvent(Event):
    """With `balance_replicas`, after the replicas were measured.

    Attributes:
        shares: micro-batches that each replica of a stage gets, in proportion to each other
    """

    event: ClassVar[str] = "shares"

    shares: dict[str, list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEvent(Event):
    """A generation, which is a group of processes, has started.

    Attributes:
        step: the step after which it goes on
        workers: `address`, `host`, `pid` and `device` of each worker
        driver: `host` and `pid` of the driver's process
    """

    event: ClassVar[str] = "generation"

    step: int
    workers: dict[str, WorkerPlace]
    driver: ProcessPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEvent(Event):
    """Training starts.

    Attributes:
        steps: optimizer steps that the whole run will have done
    """

    event: ClassVar[str] = "start"

    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent(Event):
    """After each optimizer step.

    Attributes:
        step: number of the step, from 1
        epoch: number of its epoch, from 1
        loss: mean loss of the mini-batch
        samples_per_s: samples per second
        step_s: seconds since the end of the step before
        data_share: share of that time in which the driver waited for samples
        busy: share of that time in which each stage computed
        busy_seconds: seconds in which each stage computed, by kind: `F` forward, `B` backward, `W`
            weight gradients, `O` optimizer
        learning_rate: learning rate of the first stage that has one
        learning_rates: learning rate of each stage's first parameter group
        loss_scale: with `[loss_scaling]`: what the loss was multiplied by
        is_skipped: with `[loss_scaling]`: whether the step updated nothing
        skipped_steps: with `[loss_scaling]`: steps skipped so far
        group_learning_rates: of each stage with several parameter groups: the learning rate of each
    """

    event: ClassVar[str] = "step"

    step: int
    epoch: int
    loss: float
    samples_per_s: float
    step_s: float
    data_share: float
    busy: dict[str, float]
    busy_seconds: dict[str, dict[str, float]]
    learning_rate: float | None
    learning_rates: dict[str, float | None]
    loss_scale: float | None = None
    is_skipped: bool | None = None
    skipped_steps: int | None = None
    group_learning_rates: dict[str, list[float]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalEvent(Event):
    """After each evaluation.

    Attributes:
        step: the step that it followed
        epoch: epoch of that step
        values: the `loss`, and each metric, by its name
    """

    event: ClassVar[str] = "eval"
    FLAT: ClassVar[str] = "values"

    step: int
    epoch: int
    values: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopEvent(Event):
    """`[early_stopping]` ends the run.

    Attributes:
        metric: the metric that is watched
        mode: `min` or `max`: which values of it are better
        best: its best value; `null` if no evaluation gave a number
        best_step: the step with the best value
        waited: evaluations since then, none of which was better
        step: the last step of the run
    """

    event: ClassVar[str] = "early_stop"

    metric: str
    mode: Literal["min", "max"]
    best: float | None
    best_step: int
    waited: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportEvent(Event):
    """The config's `report` has returned.

    Attributes:
        text: what it returned
    """

    event: ClassVar[str] = "report"

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEvent(Event):
    """A checkpoint is complete on the disks.

    Attributes:
        step: its step
        path: its folder
        seconds: how long saving it took
        bytes: size of its files
    """

    event: ClassVar[str] = "checkpoint"

    step: int
    path: str
    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BestEvent(Event):
    """With `checkpoint.best`: a checkpoint is the best so far.

    Attributes:
        step: its step
        metric: the metric that decides
        value: value of the metric
    """

    event: ClassVar[str] = "best"

    step: int
    metric: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultEvent(Event):
    """A process of the run was lost.

    Attributes:
        step: the last step before
        error: what happened
        kind: name of the error in `rpcmp.errors`
        stage: label of the worker, or `driver`; empty if it is unknown
        host: host of that process; empty if it is unknown
    """

    event: ClassVar[str] = "fault"

    step: int
    error: str
    kind: str
    stage: str
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredEvent(Event):
    """The run goes on after a fault.

    Attributes:
        step: the step after which it goes on
        seconds: time since the fault
    """

    event: ClassVar[str] = "recovered"

    step: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingEvent(Event):
    """The run waits for a server that is gone.

    Attributes:
        stage: label of its worker
        address: address of the server
    """

    event: ClassVar[str] = "waiting"

    stage: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacedEvent(Event):
    """A spare has replaced a server that is gone.

    Attributes:
        stage: label of the worker
        lost: address of the server that is gone
        address: address of the spare
    """

    event: ClassVar[str] = "replaced"

    stage: str
    lost: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedEvent(Event):
    """With `--resume`.

    Attributes:
        step: the step after which the run goes on; 0 if there was no checkpoint
        run: `job_id` of the run that the checkpoint is from; missing if there was none
        changed: keys of the config that have changed since then
    """

    event: ClassVar[str] = "resumed"

    step: int
    run: str | None = None
    changed: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarningEvent(Event):
    """Something is allowed but hardly intended, or went wrong without ending the run.

    Attributes:
        text: the warning
    """

    event: ClassVar[str] = "warning"

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
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

    event: ClassVar[str] = "log"
    STAMP_FIRST: ClassVar[bool] = True

    stage: str
    step: int
    level: str
    logger: str
    text: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryEvent(Event):
    """Training has ended.

    Attributes:
        steps: optimizer steps of the whole run
        is_cut_short: whether it was stopped before its end
        loss: loss of the last step
        metrics: the last evaluation
        loss_scale: with `[loss_scaling]`: the scale at the end
        skipped_steps: with `[loss_scaling]`: steps that were skipped
        parameters_sha256: hash of all parameters and buffers
        hosts: what decides the bits of the results on each stage's host
        memory: bytes of each stage's process: `idle` when its model was built, and `peak`; on a
            GPU, what torch has allocated there
        best: with `checkpoint.best`: `step`, `metric`, `value` and `path` of the best checkpoint
        plan: with a measured balance: `balance`, `predicted_step_s` and `measured_step_s`, a median
    """

    event: ClassVar[str] = "summary"

    steps: int
    is_cut_short: bool
    loss: float
    metrics: dict[str, float]
    loss_scale: float | None = None
    skipped_steps: int | None = None
    parameters_sha256: str
    hosts: dict[str, dict[str, str]]
    memory: dict[str, Memory]
    best: BestStep | None = None
    plan: PlanOutcome | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptEvent(Event):
    """At the end of a run that keeps a folder.

    Attributes:
        path: the run's folder
    """

    event: ClassVar[str] = "kept"

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEvent(Event):
    """Last, however the run ended.

    Attributes:
        outcome: `done`, `failed` or `interrupted`
        error: why it failed or was interrupted; else empty
    """

    event: ClassVar[str] = "end"

    outcome: Literal["done", "failed", "interrupted"]
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VitalsEvent(Event):
    """Each second, to loggers alone: the state of all processes.

    Attributes:
        step: the last step
        workers: of each worker: `state`, `restarts`, `host`, `pid`, `phase`, `microbatch`,
            `seconds` in that phase, `memory` in bytes, `cpu_seconds`, `in_flight` micro-batches
        driver: the same of the driver's process; empty before it has reported
        links: traffic `from` a member `to` another: `bytes`, `bytes_per_s`, `rtt_s`
    """

    event: ClassVar[str] = "vitals"

    step: int
    workers: dict[str, ProcessVitals]
    driver: ProcessVitals
    links: list[LinkTraffic]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEvent(Event):
    """Every other second, to loggers alone: what each stage did in a step.

    Attributes:
        step: the step
        seconds: its duration
        stages: of each worker: `label`, `host`, `spans` of computation, `idle` times by reason,
            `busy` and `lost` shares
        bottleneck: which stage limits the speed, and why
    """

    event: ClassVar[str] = "timeline"

    step: int
    seconds: float
    stages: list[StageTimeline]
    bottleneck: str


EVENTS: dict[str, type[Event]] = {
    kind.event: kind
    for kind in (
        UiEvent,
        RunEvent,
        PlanEvent,
        SharesEvent,
        GenerationEvent,
        StartEvent,
        StepEvent,
        EvalEvent,
        EarlyStopEvent,
        ReportEvent,
        CheckpointEvent,
        BestEvent,
        FaultEvent,
        RecoveredEvent,
        WaitingEvent,
        ReplacedEvent,
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
