"""What several runs have not in common: how they went, and what their configs say."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rpcmp.page.values import number, plain
from rpcmp.process.channel import Message


class Outcome:
    """What became of a run, figure by figure; None for one that its events do not tell."""

    def __init__(self) -> None:
        self._config: dict[str, Any] = {}
        self._versions: dict[str, Any] = {}
        self._values: dict[str, Any] = dict.fromkeys(FIGURES)
        self._rates: list[float] = []
        self._step_s: list[float] = []
        self._times: list[float] = []
        self._counts = dict.fromkeys(COUNTED, 0)
        self._metrics: dict[str, Any] = {}

    def take(self, event: Message) -> None:
        """Take the run's next event."""
        if "time" in event:
            self._times.append(event["time"])
            del self._times[1:-1]
        match event["event"]:
            case "run":
                self._config = dict(flat(plain(event.get("config") or {})))
                self._versions = plain(event.get("versions") or {})
            case "step":
                self._values.update(steps=event["step"], loss=number(event["loss"]))
                self._rates.append(event["samples_per_s"])
                self._step_s.append(event["step_s"])
            case "fault" | "checkpoint" as kind:
                self._counts[kind] += 1
            case "summary":
                self._metrics = plain(event.get("metrics") or {})
                self._values["parameters sha256"] = event.get("parameters_sha256")
            case "end":
                self._values["outcome"] = event["outcome"]

    @property
    def figures(self) -> dict[str, Any]:
        """By name, in the order of the table. Medians leave out the first step, which warms up."""
        more = {
            "duration, s": number(self._times[-1] - self._times[0]) if self._times else None,
            "samples/s, median": _median(self._rates),
            "step, s, median": _median(self._step_s),
            "faults": self._counts["fault"],
            "checkpoints": self._counts["checkpoint"],
        }
        metrics = {f"test {name}": value for name, value in self._metrics.items()}
        versions = {f"version of {name}": value for name, value in self._versions.items()}
        return {**self._values, **more, **metrics, **versions}

    @property
    def config(self) -> Mapping[str, Any]:
        """By dotted key."""
        return self._config


FIGURES = ("outcome", "steps", "loss", "parameters sha256")
COUNTED = ("fault", "checkpoint")


def differences(outcomes: Sequence[Outcome]) -> dict[str, list[list[Any]]]:
    """Two tables, each a list of [name, a value for each run]: all figures, and the keys of the
    configs that not all of them set to the same."""
    configs = [outcome.config for outcome in outcomes]
    differing = [row for row in _rows(configs) if any(value != row[1] for value in row[2:])]
    return {"figures": [*_rows([one.figures for one in outcomes])], "config": differing}


def flat(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested tables and lists of tables, by dotted key; other lists are leaves."""
    if isinstance(values, list) and any(isinstance(item, dict) for item in values):
        values = dict(enumerate(values))
    if not isinstance(values, dict):
        yield prefix, values
        return
    for key, value in values.items():
        yield from flat(value, f"{prefix}.{key}" if prefix else str(key))


def _rows(runs: Sequence[Mapping[str, Any]]) -> Iterator[list[Any]]:
    for name in _names(runs):
        yield [name, *(run.get(name) for run in runs)]


def _names(runs: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    return dict.fromkeys(name for run in runs for name in run)


def _median(values: Sequence[float]) -> float | None:
    counted = values[1:] or values
    return number(statistics.median(counted)) if counted else None
