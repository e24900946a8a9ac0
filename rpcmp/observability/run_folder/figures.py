"""The figures of runs, their comparison, and tables of it for terminal and page."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rpcmp.config.files import flat
from rpcmp.config.types import format_size
from rpcmp.observability.events import (
    CheckpointEvent,
    EvalEvent,
    Event,
    FaultEvent,
    StepEvent,
    SummaryEvent,
    TimelineEvent,
    WarningEvent,
)
from rpcmp.observability.run_folder.reader import Record

Figures = dict[str, Any]
"""Values by name, in the order of a table; None if the run's events lack the value."""


def figures(run: Record) -> Figures:
    """Return all figures of a run; times in seconds, shares between 0 and 1."""
    steps = run.all(StepEvent)
    summary = next(iter(run.all(SummaryEvent)), None)
    return {
        "outcome": run.info.outcome,
        "error": run.info.error or None,
        "continues": run.info.continues,
        "steps": steps[-1].step if steps else None,
        "whole time": _seconds(run.events),
        "first loss": _finite(steps[0].loss) if steps else None,
        "last loss": _finite(steps[-1].loss) if steps else None,
        **{f"test {name}": value for name, value in _metrics(run, summary).items()},
        "step time": _median([step.step_s for step in steps]),
        "samples/s": _median([step.samples_per_s for step in steps]),
        "data share": _mean([step.data_share for step in steps]),
        **{f"busy {label}": share for label, share in _busy(steps).items()},
        **{f"bubble {label}": share for label, share in _bubbles(run).items()},
        **{f"peak memory {label}": size for label, size in _memory(summary).items()},
        "faults": len(run.all(FaultEvent)),
        "warnings": len(run.all(WarningEvent)),
        "checkpoints": len(run.all(CheckpointEvent)),
        "parameters sha256": summary.parameters_sha256 if summary else None,
        **{f"version of {name}": version for name, version in run.info.versions.items()},
    }


def _seconds(events: Iterable[Event]) -> float | None:
    times = [event.time for event in events if event.time is not None]
    return times[-1] - times[0] if times else None


def _metrics(run: Record, summary: SummaryEvent | None) -> dict[str, float | None]:
    """Return the metrics of the end of the run, or of its last evaluation."""
    evaluations = run.all(EvalEvent)
    values = summary.metrics if summary else {}
    if not values and evaluations:
        values = evaluations[-1].values
    return {name: _finite(value) for name, value in values.items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _median(values: Sequence[float]) -> float | None:
    known = _warm(values)
    return statistics.median(known) if known else None


def _mean(values: Sequence[float]) -> float | None:
    known = _warm(values)
    return statistics.fmean(known) if known else None


def _warm(values: Sequence[float]) -> list[float]:
    """Return the finite values of all steps but the first, which warms up."""
    return [value for value in values[1:] or values if math.isfinite(value)]


def _busy(steps: list[StepEvent]) -> dict[str, float]:
    """Return the share of time that each worker computed, over all steps but the first."""
    shares: dict[str, list[float]] = defaultdict(list)
    for step in steps[1:] or steps:
        for label, share in step.busy.items():
            shares[label].append(share)
    return {label: statistics.fmean(values) for label, values in shares.items()}


def _bubbles(run: Record) -> dict[str, float]:
    """Return the bubble of each worker as a share of time, over the steps with a timeline."""
    shares: dict[str, list[float]] = defaultdict(list)
    for event in run.all(TimelineEvent):
        for stage in event.stages:
            shares[stage["label"]].append(stage["lost"].get("bubble", 0.0))
    return {label: statistics.fmean(values) for label, values in shares.items()}


def _memory(summary: SummaryEvent | None) -> dict[str, int]:
    memory = summary.memory if summary else {}
    return {label: sizes["peak"] for label, sizes in memory.items()}


SHOWN = 8
"""Steps whose losses are shown, spread over all steps in common."""

Row = tuple[str, list[Any]]
"""A name, and a value for each run, which may be None."""


@dataclass(frozen=True)
class Comparison:
    """A comparison of one or several runs.

    Attributes:
        names: names of the runs.
        figures: figures of the runs.
        settings: the config keys whose values differ, in dotted form.
        losses: the losses at some of the common steps, the first and the last included.
        shared: number of steps in common.
        first_difference: the first common step whose losses are not equal to the last bit; None:
            all are equal.
    """

    names: list[str]
    figures: list[Row]
    settings: list[Row]
    losses: list[tuple[int, list[float | None]]]
    shared: int
    first_difference: int | None

    @property
    def verdict(self) -> str:
        """Whether the losses are equal, as a sentence."""
        if not self.shared:
            return "the runs have no step in common"
        if self.first_difference is None:
            return f"the losses of all {self.shared:,} steps in common are the same, bit for bit"
        return (
            f"the losses differ from step {self.first_difference:,} on; steps in common: "
            f"{self.shared:,}"
        )


def compare(runs: Sequence[Record]) -> Comparison:
    """Compare `runs`, at least one."""
    losses = [{event.step: _finite(event.loss) for event in run.all(StepEvent)} for run in runs]
    shared = sorted(set.intersection(*(set(each) for each in losses)))
    differing = (step for step in shared if len({each[step] for each in losses}) > 1)
    configs = [dict(flat(run.config)) for run in runs]
    return Comparison(
        names=[run.name for run in runs],
        figures=[row for row in _rows(map(figures, runs)) if any(v is not None for v in row[1])],
        settings=[row for row in _rows(configs) if any(value != row[1][0] for value in row[1])],
        losses=[(step, [each[step] for each in losses]) for step in _spread(shared)],
        shared=len(shared),
        first_difference=next(differing, None),
    )


def _rows(runs: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    runs = list(runs)
    for name in dict.fromkeys(name for run in runs for name in run):
        yield name, [run.get(name) for run in runs]


def _spread(steps: Sequence[int]) -> Iterable[int]:
    """Return some of the steps, evenly spread, the first and the last included."""
    if len(steps) <= SHOWN:
        return steps
    last = len(steps) - 1
    return [steps[index * last // (SHOWN - 1)] for index in range(SHOWN)]


@dataclass(frozen=True)
class Table:
    """A table of text; each row has a name, and a text for each run."""

    title: str
    rows: list[tuple[str, list[str]]]


def tables(comparison: Comparison) -> Iterator[Table]:
    """Yield the table of figures; for several runs also the settings and losses that differ."""
    yield Table("Figures", [_figure(row) for row in comparison.figures])
    if len(comparison.names) > 1:
        settings = [(name, _texts(values)) for name, values in comparison.settings]
        yield Table("Settings that differ", settings)
        losses = [(f"step {step:,}", _losses(values)) for step, values in comparison.losses]
        yield Table("Loss", losses)


def _figure(row: Row) -> tuple[str, list[str]]:
    name, values = row
    return name, ["-" if value is None else _in_unit(name, value) for value in values]


def _in_unit(name: str, value: Any) -> str:
    match name.split():
        case ["step", "time"]:
            return f"{value * 1e3:,.1f} ms"
        case ["whole", "time"]:
            return f"{value:,.1f} s"
        case ["samples/s"]:
            return f"{value:,.0f}"
        case ["busy" | "bubble", *_] | ["data", "share"]:
            return f"{value:.0%}"
        case ["peak", "memory", *_]:
            return format_size(value)
    return _text(value)


def _texts(values: Iterable[Any]) -> list[str]:
    return ["-" if value is None else _text(value) for value in values]


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _losses(values: Iterable[float | None]) -> list[str]:
    """Format losses with all digits, since the last ones may differ."""
    return ["not finite" if value is None else repr(value) for value in values]
