"""What the page knows of a run: a pure function of its events, bounded however long the run is.

    take(event)                version 41 ──> 42
    since(41)                  what has changed after version 41, alone: a few hundred bytes
    since(None)                all of it, for a page that has just been opened

A browser that was away asks for what it has missed by the last version it saw; whoever serves it
has to remember nothing of it.
"""

from __future__ import annotations

from typing import Any

from rpcmp import evaluated
from rpcmp.members import DRIVER
from rpcmp.page.entries import Entries
from rpcmp.page.series import Row, Series
from rpcmp.page.timeline import timeline
from rpcmp.page.values import number, plain
from rpcmp.page.workers import WEIGHT, Workers
from rpcmp.process.channel import Message

EVALUATIONS = 500
"""About so many are kept, over the whole run, and always the newest."""


class State:
    """One run, as far as its events have come.

    Attributes:
        version: up by one with every event that changed anything.
    """

    def __init__(self) -> None:
        self.version = 0
        self._parts: dict[str, Any] = {
            "run": None,
            "progress": {"status": "starting", "step": 0, "steps": None, "generation": 1},
            "workers": [],
            "links": [],
            "timeline": None,
            "evaluations": [],
            "counts": {},
        }
        self._versions = dict.fromkeys(self._parts, 0)
        self._workers = Workers()
        self._curve = Series()
        self._entries = Entries()
        self._begin: float | None = None

    def take(self, event: Message) -> None:
        """Take the run's next event; events of other kinds than the page's change nothing."""
        before = self.version
        self.version += 1
        if self._begin is None:
            self._begin = event.get("time")
        changed = self._apply(event)
        if self._entries.add(event, self.version):
            self._set("counts", dict(self._entries.counts))
            changed = True
        if not changed:
            self.version = before
            return
        if self._begin is not None and "time" in event:
            self._progress(seconds=number(event["time"] - self._begin))

    def since(self, version: int | None) -> dict[str, Any] | None:
        """What a page that knows `version` lacks; all for None; None where it lacks nothing."""
        known = -1 if version is None else version
        if known >= self.version:
            return None
        changed = [name for name, last in self._versions.items() if last > known]
        return {
            "version": self.version,
            "is_all": version is None,
            "parts": {name: self._part(name) for name in changed},
            "curve": self._curve.since(known),
            "entries": self._entries.since(known),
        }

    def _part(self, name: str) -> Any:
        return self._workers.values() if name == "workers" else self._parts[name]

    def _apply(self, event: Message) -> bool:
        """Whether the page shows events of this kind anywhere but in the list of events."""
        generation = int(event.get("generation", 0))
        match event["event"]:
            case "run":
                self._run(event)
            case "start":
                self._progress(status="training", steps=event["steps"])
            case "generation":
                self._workers.generation(event)
                self._progress(status="training", generation=generation)
            case "recovered":
                self._workers.recovered()
                self._progress(status="training", generation=generation)
            case "fault":
                self._workers.fault(event.get("stage", ""), generation)
                faults = self._parts["progress"].get("faults", [])
                self._progress(status="recovering", faults=[*faults, event["step"]][-EVALUATIONS:])
            case "vitals":
                driver = {DRIVER: event["driver"]} if event.get("driver") else {}
                self._workers.vitals({**driver, **event["workers"]}, generation)
                self._set("links", plain(event.get("links", [])))
            case "step":
                self._step(event, generation)
            case "eval":
                self._evaluation(event)
            case "checkpoint":
                self._progress(checkpoint=plain({"step": event["step"], "time": event.get("time")}))
            case "timeline":
                self._set("timeline", timeline(event))
                return True
            case "end":
                self._workers.end()
                self._progress(status=event["outcome"], error=event.get("error") or "")
            case _:
                return False
        self._versions["workers"] = self.version
        return True

    def _run(self, event: Message) -> None:
        kept = ("name", "config", "versions", "driver", "graph", "job_id")
        self._workers.begin(event)
        self._set("run", plain({key: event.get(key) for key in kept} | {"began": self._begin}))
        self._progress(steps=(event.get("config") or {}).get("steps"))

    def _step(self, event: Message, generation: int) -> None:
        self._workers.step(event["busy"], generation)
        loss, rate = number(event["loss"]), event["samples_per_s"]
        row = Row(1, event["step"], self._seconds(event), loss, loss, loss, rate)
        self._curve.add(row, self.version)
        before = self._parts["progress"].get("step_s")
        step_s = event["step_s"]
        mean = step_s if before is None else before + WEIGHT * (step_s - before)
        self._progress(
            step=event["step"],
            epoch=event.get("epoch"),
            loss=loss,
            rate=number(rate),
            step_s=number(mean),
            data_share=number(event.get("data_share")),
            learning_rates=_rates(event),
            skipped=event.get("skipped_steps"),
        )

    def _evaluation(self, event: Message) -> None:
        found = {name: plain(value) for name, value in evaluated.values(event).items()}
        row = [event["step"], number(self._seconds(event)), found]
        rows = [*self._parts["evaluations"], row]
        self._set("evaluations", rows if len(rows) <= EVALUATIONS else rows[::-2][::-1])

    def _seconds(self, event: Message) -> float:
        """Since the run's begin."""
        return float(event["time"] - self._begin) if self._begin and "time" in event else 0.0

    def _progress(self, **values: Any) -> None:
        self._set("progress", {**self._parts["progress"], **values})

    def _set(self, name: str, value: Any) -> None:
        self._parts[name] = value
        self._versions[name] = self.version


def _rates(event: Message) -> list[float | None]:
    """The learning rates of a step: of the groups of the first stage that has several, or one."""
    several = event.get("group_learning_rates") or {}
    rates = next(iter(several.values()), [event.get("learning_rate")])
    return [found for rate in rates if (found := number(rate)) is not None]
