"""The events of a run, each told once however often its steps are done again.

When each event of a run was reported, and in which generation: said in one place.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rpcmp.process.channel import Message

KEPT = 64
"""Losses that are remembered, to be compared with those of a replay."""


class EventLog:
    """Passes on what the driver processes of all generations report.

    Args:
        report: told of what is new.

    Attributes:
        step: the last that was reported.
        step_seconds: of the steps that were reported.
    """

    def __init__(self, report: Callable[[Message], None]) -> None:
        self._report = report
        self._told: set[str] = set()
        self._losses: dict[int, float] = {}
        self._evaluated = -1
        self.step = 0
        self.step_seconds: list[float] = []

    def tell(self, event: Message) -> None:
        """Pass on an event, unless it tells what is known."""
        match event["event"]:
            case "step":
                self._tell_step(event)
            case "eval":
                if event["step"] > self._evaluated:
                    self._evaluated = event["step"]
                    self._report(event)
            case "start" | "report" | "early_stop":
                self._tell_once(event)
            case _:
                self._report(event)

    def _tell_once(self, event: Message) -> None:
        if event["event"] not in self._told:
            self._told.add(event["event"])
            self._report(event)

    def _tell_step(self, event: Message) -> None:
        step, loss = event["step"], event["loss"]
        before = self._losses.get(step)
        if before is not None and before.hex() != loss.hex():
            text = (
                f"step {step} gave a loss of {loss!r} in its replay and {before!r} before: the "
                "model draws on something that is not reproducible"
            )
            self._report({"event": "warning", "text": text})
        if step <= self.step:
            return
        self.step = step
        self.step_seconds.append(event["step_s"])
        self._losses[step] = loss
        self._losses.pop(step - KEPT, None)
        self._report(event)


class Stamp:
    """Passes events on with `time`, in seconds since 1970, and `generation`.

    Args:
        report: told of them.
        generation: says which one it is now.
    """

    def __init__(self, report: Callable[[Message], None], generation: Callable[[], int]) -> None:
        self._report = report
        self._generation = generation

    def __call__(self, event: Message) -> None:
        """Pass one on; the generation that it says itself stands."""
        generation = event.get("generation", self._generation())
        self._report({**event, "time": time.time(), "generation": generation})
