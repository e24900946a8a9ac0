"""What became of a run, in figures."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rpcmp import evaluated
from rpcmp.process.channel import Message
from rpcmp.runfolder.reader import Record

Figures = dict[str, Any]
"""By name, in the order of a table; None for what the run's events do not tell."""


def figures(run: Record) -> Figures:
    """All of them; seconds, and shares between 0 and 1."""
    steps = run.all("step")
    summary = next(iter(run.all("summary")), {})
    return {
        "outcome": run.info.outcome,
        "error": run.info.error or None,
        "continues": run.info.continues,
        "steps": steps[-1]["step"] if steps else None,
        "whole time": _seconds(run.events),
        "first loss": steps[0]["loss"] if steps else None,
        "last loss": steps[-1]["loss"] if steps else None,
        **{f"test {name}": value for name, value in _metrics(run, summary).items()},
        "step time": _median(steps, "step_s"),
        "samples/s": _median(steps, "samples_per_s"),
        "data share": _mean(steps, "data_share"),
        **{f"busy {label}": share for label, share in _busy(steps).items()},
        **{f"bubble {label}": share for label, share in _bubbles(run).items()},
        **{f"peak memory {label}": size for label, size in _memory(summary).items()},
        "faults": len(run.all("fault")),
        "warnings": len(run.all("warning")),
        "checkpoints": len(run.all("checkpoint")),
        "parameters sha256": summary.get("parameters_sha256"),
        **{f"version of {name}": version for name, version in run.info.versions.items()},
    }


def _seconds(events: Iterable[Message]) -> float | None:
    times = [event["time"] for event in events]
    return times[-1] - times[0] if times else None


def _metrics(run: Record, summary: Message) -> dict[str, Any]:
    """Of the end of the run, or else of its last evaluation."""
    if summary.get("metrics"):
        return dict(summary["metrics"])
    last = next(reversed(run.all("eval")), {})
    return evaluated.values(last)


def _median(steps: list[Message], key: str) -> float | None:
    """Without the first step, which warms up."""
    found = [*_numbers(steps[1:] or steps, key)]
    return statistics.median(found) if found else None


def _mean(steps: list[Message], key: str) -> float | None:
    found = [*_numbers(steps[1:] or steps, key)]
    return statistics.fmean(found) if found else None


def _numbers(events: Iterable[Message], key: str) -> Iterator[float]:
    for event in events:
        if isinstance(event.get(key), int | float):
            yield event[key]


def _busy(steps: list[Message]) -> dict[str, float]:
    """The share of each stage's time in which it computed, over all steps but the first."""
    found: dict[str, list[float]] = defaultdict(list)
    for step in steps[1:] or steps:
        for label, share in step.get("busy", {}).items():
            found[label].append(share)
    return {label: statistics.fmean(shares) for label, shares in found.items()}


def _bubbles(run: Record) -> dict[str, float]:
    """The share of each stage's time in which nothing could be done, over the steps looked at."""
    found: dict[str, list[float]] = defaultdict(list)
    for event in run.all("timeline"):
        for stage in event["stages"]:
            found[stage["label"]].append(stage["lost"].get("bubble", 0.0))
    return {label: statistics.fmean(shares) for label, shares in found.items()}


def _memory(summary: Mapping[str, Any]) -> dict[str, int]:
    return {label: sizes["peak"] for label, sizes in summary.get("memory", {}).items()}
