"""Each worker as the page shows it: its health, and how busy it is.

    starting ──> building ──> running ──fault──> lost ──next generation──> building ──> running

A fault holds until the next generation, whatever a sign of life from before says meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rpcmp.page.values import number, plain
from rpcmp.process.channel import Message

WEIGHT = 0.3
"""Of the newest step in the mean that is shown as utilization: single steps jitter."""

LOST = "lost"

STATES = {"claimed": "starting"}
"""The words of the page for those of vitals that say little to people."""

VITALS = (
    *("phase", "microbatch", "seconds", "memory", "in_flight", "host", "pid", "restarts"),
    "cpu_seconds",
)
"""What is shown as it comes."""


class Workers:
    """All workers of a run, by label, in the config's order."""

    def __init__(self) -> None:
        self._workers: dict[str, dict[str, Any]] = {}
        self._lost: dict[str, int] = {}

    def values(self) -> list[dict[str, Any]]:
        """As the page gets them."""
        return [{**worker, "busy": number(worker["busy"])} for worker in self._workers.values()]

    def begin(self, event: Message) -> None:
        """The run has begun; event `run`."""
        devices = {stage["name"]: stage.get("device") for stage in event["graph"]["stages"]}
        for worker in event["workers"]:
            known = self._worker(worker["label"])
            known.update(plain(worker), device=devices.get(worker["stage"]))

    def generation(self, event: Message) -> None:
        """A group has begun; event `generation`."""
        self._lost.clear()
        for label, where in event.get("workers", {}).items():
            self._worker(label).update(plain(where))
        for worker in self._workers.values():
            worker["state"] = "running"

    def recovered(self) -> None:
        """A group goes on."""
        self._lost.clear()
        for worker in self._workers.values():
            if worker["state"] == LOST:
                worker["state"] = "running"

    def fault(self, stage: str, generation: int) -> None:
        """A worker is gone; nothing computes until the next generation."""
        for label, worker in self._workers.items():
            worker["busy"] = None
            if stage and stage in (label, worker["stage"]):
                worker["state"] = LOST
                self._lost[label] = generation

    def vitals(self, found: Mapping[str, Message], generation: int) -> None:
        """The newest signs of life; event `vitals`."""
        for label, vital in found.items():
            worker = self._worker(label)
            worker.update({key: plain(vital[key]) for key in VITALS if key in vital})
            if self._lost.get(label, -1) < generation:
                self._lost.pop(label, None)
                state = str(vital.get("state", worker["state"]))
                worker["state"] = STATES.get(state, state)

    def step(self, busy: Mapping[str, float], generation: int) -> None:
        """A step has ended; `busy` is the share of it in which each worker computed."""
        for label, share in busy.items():
            worker = self._worker(label)
            before = worker["busy"]
            worker["busy"] = share if before is None else before + WEIGHT * (share - before)
            if worker["state"] == "starting" and label not in self._lost:
                worker["state"] = "running"
            if worker["state"] == LOST and self._lost.get(label, -1) < generation:
                worker["state"] = "running"

    def end(self) -> None:
        """The run has ended. What was lost stays so: that may be why."""
        for worker in self._workers.values():
            if worker["state"] != LOST:
                worker["state"] = "ended"

    def _worker(self, label: str) -> dict[str, Any]:
        """A worker; a run folder may lack the event that names them."""
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
