"""The state of the page: a pure function of the run's events, of bounded size.

    apply(event)               version 41 ──> 42
    since(41)                  the changes after version 41: a few hundred bytes
    since(None)                the whole state, for a page that has just been opened

A browser that reconnects sends the last version that it has, so the server keeps no state per
browser.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rpcmp.config.topology import DRIVER
from rpcmp.observability import events
from rpcmp.observability.dashboard.history import Curve, Entries, Row, number, rounded

WEIGHT = 0.3
"""Weight of the newest step in the running means on the page, since single steps jitter."""

STATES = {"claimed": "starting"}
"""Plainer names on the page for states of the event `vitals`."""

VITALS = (
    *("phase", "microbatch", "seconds", "memory", "in_flight", "host", "pid", "restarts"),
    *("cpu_seconds", "device_memory"),
)
"""Keys of the event `vitals` that the page gets unchanged."""


class WorkerTable:
    """The workers of a run, by label, in the config's order."""

    def __init__(self) -> None:
        self._workers: dict[str, dict[str, Any]] = {}
        self._lost = events.LostWorkers()

    def values(self) -> list[dict[str, Any]]:
        """Return the workers as the page gets them."""
        return [{**worker, "busy": number(worker["busy"])} for worker in self._workers.values()]

    def start(self, event: events.RunEvent | events.StagesEvent) -> None:
        devices = {stage["name"]: stage.get("device") for stage in event.graph["stages"]}
        known = {worker["label"] for worker in event.workers}
        for label in [label for label in self._workers if label not in known | {DRIVER}]:
            del self._workers[label]  # its host has left
        for worker in event.workers:
            row = self._worker(worker["label"])
            row.update(rounded(worker), device=devices.get(worker["stage"]))

    def generation(self, event: events.GenerationEvent) -> None:
        self._lost.clear()
        for label, place in event.workers.items():
            self._worker(label).update(rounded(place))
        for worker in self._workers.values():
            worker["state"] = "running"

    def recovered(self) -> None:
        self._lost.clear()
        for worker in self._workers.values():
            if worker["state"] == events.LOST:
                worker["state"] = "running"

    def fault(self, stage: str, generation: int) -> None:
        """Mark a stage's workers as lost; all workers idle until the next generation."""
        for label, worker in self._workers.items():
            worker["busy"] = None
            if stage and stage in (label, worker["stage"]):
                worker["state"] = events.LOST
                self._lost.add(label, generation)

    def vitals(self, processes: Mapping[str, events.ProcessVitals], generation: int) -> None:
        for label, vital in processes.items():
            worker = self._worker(label)
            worker.update({key: rounded(value) for key, value in vital.items() if key in VITALS})
            if self._lost.revive(label, generation):
                state = str(vital.get("state", worker["state"]))
                worker["state"] = STATES.get(state, state)

    def step(self, busy: Mapping[str, float], generation: int) -> None:
        """Update how busy the workers are; `busy` is the share of a step that each computed."""
        for label, share in busy.items():
            worker = self._worker(label)
            before = worker["busy"]
            worker["busy"] = share if before is None else before + WEIGHT * (share - before)
            if worker["state"] == "starting" and label not in self._lost:
                worker["state"] = "running"
            if worker["state"] == events.LOST and self._lost.revive(label, generation):
                worker["state"] = "running"

    def end(self) -> None:
        """End the run. Lost workers stay lost, since they may be the reason."""
        for worker in self._workers.values():
            if worker["state"] != events.LOST:
                worker["state"] = "ended"

    def _worker(self, label: str) -> dict[str, Any]:
        """Return a worker's row; a run folder may lack the event that names the workers."""
        return self._workers.setdefault(
            label,
            {
                "label": label,
                "stage": label.partition(":")[0],
                "replica": 0,
                "state": "starting",
                "busy": None,
                "device": None,
            },
        )


def timeline(event: events.TimelineEvent) -> dict[str, Any]:
    """Return the pipeline diagram of a step.

    Spans are [kind, micro-batch, start, end] and idle times [loss, start, end], both in whole
    microseconds since the step's start.
    """
    stages = event.stages
    starts = [span[-2] for stage in stages for span in (*stage["spans"], *stage.get("idle", ()))]
    begin = min(starts, default=0.0)
    return {
        "step": event.step,
        "seconds": number(event.seconds),
        "bottleneck": event.bottleneck,
        "stages": [
            {
                "label": stage["label"],
                "host": stage.get("host", ""),
                "busy": rounded(stage.get("busy", {})),
                "lost": rounded(stage.get("lost", {})),
                "spans": [*_shifted(stage["spans"], begin)],
                "idle": [*_shifted(stage.get("idle", ()), begin)],
            }
            for stage in stages
        ],
    }


def _shifted(spans: Iterable[Any], begin: float) -> Iterable[list[Any]]:
    for *labels, start, end in spans:
        yield [*labels, round((start - begin) * 1e6), round((end - begin) * 1e6)]


EVALUATIONS = 500
"""Evaluations that are kept at most, spread over the whole run, the newest always included."""


class State:
    """The state of one run's page.

    Attributes:
        version: increases by one with every event that changes the page.
    """

    def __init__(self) -> None:
        self.version = 0
        self._parts: dict[str, Any] = {
            "run": None,
            "progress": {"status": "starting", "step": 0, "steps": None, "generation": 1},
            "workers": None,  # made when it is read: a run has many events per read
            "links": [],
            "timeline": None,
            "evaluations": [],
            "counts": {},
        }
        self._versions = dict.fromkeys(self._parts, 0)
        self._workers = WorkerTable()
        self._curve = Curve()
        self._entries = Entries()
        self._begin: float | None = None

    def apply(self, event: events.Event) -> None:
        """Apply the run's next event; events that the page does not show change nothing."""
        before = self.version
        self.version += 1
        if self._begin is None:
            self._begin = event.time
        changed = self._update(event)
        if self._entries.add(event, self.version):
            self._set("counts", dict(self._entries.counts))
            changed = True
        if not changed:
            self.version = before
            return
        if self._begin is not None and event.time is not None:
            self._progress(seconds=number(event.time - self._begin))

    def since(self, version: int | None) -> dict[str, Any] | None:
        """Return the changes after `version`, or everything if it is None; None: no changes."""
        known = -1 if version is None else version
        if known >= self.version:
            return None
        changed = [name for name, last in self._versions.items() if last > known]
        return {
            "version": self.version,
            "is_all": version is None,
            "parts": {
                name: self._workers.values() if name == "workers" else self._parts[name]
                for name in changed
            },
            "curve": self._curve.since(known),
            "entries": self._entries.since(known),
        }

    def _update(self, event: events.Event) -> bool:
        """Apply an event; return whether it changes anything but the list of events."""
        generation = event.generation or 0
        match event:
            case events.RunEvent():
                self._run(event)
            case events.StagesEvent():
                self._workers.start(event)
                self._set("run", {**self._parts.get("run", {}), "graph": rounded(event.graph)})
            case events.StartEvent():
                self._progress(status="training", steps=event.steps)
            case events.GenerationEvent():
                self._workers.generation(event)
                self._progress(status="training", generation=generation)
            case events.RecoveredEvent():
                self._workers.recovered()
                self._progress(status="training", generation=generation)
            case events.FaultEvent():
                self._workers.fault(event.stage, generation)
                faults = self._parts["progress"].get("faults", [])
                self._progress(status="recovering", faults=[*faults, event.step][-EVALUATIONS:])
            case events.VitalsEvent():
                driver = {DRIVER: event.driver} if event.driver else {}
                self._workers.vitals({**driver, **event.workers}, generation)
                self._set("links", rounded(event.links))
            case events.StepEvent():
                self._step(event, generation)
            case events.EvalEvent():
                self._evaluation(event)
            case events.CheckpointEvent():
                self._progress(checkpoint={"step": event.step, "time": number(event.time)})
            case events.TimelineEvent():
                self._set("timeline", timeline(event))
                return True
            case events.EndEvent():
                self._workers.end()
                self._progress(status=event.outcome, error=event.error)
            case _:
                return False
        self._versions["workers"] = self.version
        return True

    def _run(self, event: events.RunEvent) -> None:
        self._workers.start(event)
        run = {
            "name": event.name,
            "config": event.config,
            "versions": event.versions,
            "driver": event.driver,
            "graph": event.graph,
            "job_id": event.job_id,
            "began": self._begin,
        }
        self._set("run", rounded(run))
        self._progress(steps=event.config.get("steps"))

    def _step(self, event: events.StepEvent, generation: int) -> None:
        self._workers.step(event.busy, generation)
        loss, rate = number(event.loss), event.samples_per_s
        seconds = self._seconds(event)
        self._curve.add(Row(1, event.step, seconds, loss, loss, loss, rate, self.version))
        before = self._parts["progress"].get("step_s")
        step_s = event.step_s
        mean = step_s if before is None else before + WEIGHT * (step_s - before)
        self._progress(
            step=event.step,
            epoch=event.epoch,
            loss=loss,
            rate=number(rate),
            step_s=number(mean),
            data_share=number(event.data_share),
            learning_rates=_rates(event),
            skipped=event.skipped_steps,
        )

    def _evaluation(self, event: events.EvalEvent) -> None:
        row = [event.step, number(self._seconds(event)), rounded(event.values)]
        rows = [*self._parts["evaluations"], row]
        self._set("evaluations", rows if len(rows) <= EVALUATIONS else rows[::-2][::-1])

    def _seconds(self, event: events.Event) -> float:
        return event.time - self._begin if self._begin and event.time is not None else 0.0

    def _progress(self, **values: Any) -> None:
        self._set("progress", {**self._parts["progress"], **values})

    def _set(self, name: str, value: Any) -> None:
        self._parts[name] = value
        self._versions[name] = self.version


def _rates(event: events.StepEvent) -> list[float | None]:
    """Return the rates of the parameter groups of the first stage with several, or else one."""
    groups = event.group_learning_rates or {}
    rates: list[float | None] = [*next(iter(groups.values()), [event.learning_rate])]
    return [rate for rate in map(number, rates) if rate is not None]
