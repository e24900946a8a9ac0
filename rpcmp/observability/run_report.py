"""What `rpcmp report` reads from run folders: their figures, compared, as tables.

A folder is read within bounds, and also if its run was killed.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from rpcmp.config.files import MIB, open_regular, read_bytes
from rpcmp.config.stored import flat
from rpcmp.config.types import format_size
from rpcmp.errors import ConfigError
from rpcmp.observability.events import (
    CheckpointEvent,
    EvalEvent,
    Event,
    FaultEvent,
    StepEvent,
    SummaryEvent,
    TimelineEvent,
    WarningEvent,
    parse,
)
from rpcmp.observability.run_folder import CONFIG, EVENTS, FORMAT, METRICS, RUN, RunInfo

MAX_JSON = 16 * MIB
"""Largest `run.json` and `config.json`, in bytes."""

MAX_LINE = 4 * MIB
"""Largest line of `metrics.jsonl` and `events.jsonl`, in bytes."""

MAX_LINES = 1024 * MIB
"""Largest `metrics.jsonl` and `events.jsonl`, in bytes."""

MAX_EVENTS = 5_000_000
"""Most lines of these files: each is an object in memory that is larger than its line."""

MAX_TIME = 2.0**53
"""Upper limit of times in seconds, beyond any date."""

MOST_DIGITS = 300
"""More than any float that is finite may have."""

MAX_LISTED = 3
"""Folders that an error message lists."""

Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True)
class Record:
    """The contents of a run's folder.

    Attributes:
        path: the folder.
        info: the contents of `run.json`.
        config: the job's config; see rpcmp.config.files.
        events: the events in order, without those that this version does not define; each has a
            time.
    """

    path: Path
    info: RunInfo
    config: dict[str, Any]
    events: Sequence[Event]

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.absolute().name

    def all(self, kind: type[Kind]) -> list[Kind]:
        return [event for event in self.events if isinstance(event, kind)]


def read(path: Path) -> Record:
    """Read the folder of a run.

    Raises:
        ConfigError: it is not the folder of a run, is damaged, or was written by a newer rpcmp.
    """
    info = _read_info(path)
    try:
        config = _loads(read_bytes(path / CONFIG, MAX_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path / CONFIG, error) from error
    if not isinstance(config, dict):
        raise _damaged(path / CONFIG, "it is not a JSON object")
    events = chain(*(_read_events(path / name) for name in (METRICS, EVENTS)))
    # Not merged: a clock that was set back leaves them unsorted.
    return Record(path, info, config, sorted(events, key=lambda event: event.time or 0.0))


def _loads(text: bytes) -> Any:
    """Return the JSON document; raises ValueError for an integer too large for any use."""
    return json.loads(text, parse_int=_integer)


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _read_info(path: Path) -> RunInfo:
    file = path / RUN
    try:
        data = _loads(read_bytes(file, MAX_JSON))
        number = data.get("format") if isinstance(data, dict) else None
        if isinstance(number, int) and number != FORMAT:  # its other keys may differ too
            raise ConfigError(
                f"{path} has format {number}, and this rpcmp reads format {FORMAT}: a newer one "
                "wrote it; update rpcmp here, or run `rpcmp report` where the run was"
            )
        return RunInfo.model_validate(data)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path} is no folder of a run: {_instead(path)}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise _damaged(file, f"{where}: {first['msg']}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(file, error) from error


def _instead(path: Path) -> str:
    """Suggest other folders for one that is not the folder of a run."""
    if not path.exists():
        return "there is nothing of that name"
    files = sorted(path.glob(f"*/{RUN}"), key=lambda file: file.stat().st_mtime)
    if not files:
        return f"it has no {RUN}; `rpcmp drive` makes one a run in `log.folder`"
    names = ", ".join(str(file.parent) for file in reversed(files[-MAX_LISTED:]))
    more = f" and {len(files) - MAX_LISTED} more" if len(files) > MAX_LISTED else ""
    return f"it holds {len(files)} of them; name one: {names}{more}"


def _read_events(file: Path) -> Iterator[Event]:
    """Yield the events of a file, without a last line that was cut off."""
    size = 0
    try:
        with open_regular(file) as lines:
            for number in count(1):
                line = lines.readline(MAX_LINE + 1)
                size += len(line)
                if len(line) > MAX_LINE:
                    raise ValueError(f"line {number} is longer than {MAX_LINE // MIB} MiB")
                if size > MAX_LINES:
                    raise ValueError(f"it is longer than {MAX_LINES // MIB} MiB")
                if number > MAX_EVENTS:
                    raise ValueError(f"it has more than {MAX_EVENTS:,} lines")
                if not line.endswith(b"\n"):
                    return
                if (event := _parse_line(line, number)) is not None:
                    yield event
    except (OSError, ValueError) as error:
        raise _damaged(file, error) from error


def _parse_line(line: bytes, number: int) -> Event | None:
    try:
        data = _loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"line {number} is not a JSON object")
    if not isinstance(data.get("event"), str) or not _is_time(data.get("time")):
        raise ValueError(f"line {number} is no event with a time")
    try:
        return parse(data, complete=False)  # an older version may not have written all keys
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from error


def _is_time(value: Any) -> bool:
    """Return whether `value` is a plausible time; an integer may have any number of digits."""
    return isinstance(value, int | float) and -MAX_TIME < value < MAX_TIME


def _damaged(file: Path, why: object) -> ConfigError:
    reason = (why.strerror or why) if isinstance(why, OSError) else why
    return ConfigError(
        f"{file} is damaged or missing: {reason}; restore the folder from a copy, or report on "
        "another run"
    )


Figures = dict[str, Any]
"""Values by name, in the order of a table; None if the run's events lack the value."""


def figures(run: Record) -> Figures:
    """Return all figures of a run; times in seconds, shares between 0 and 1."""
    steps = run.all(StepEvent)
    summary = next(iter(run.all(SummaryEvent)), None)
    memory = summary.memory if summary else {}
    busy = (pair for step in steps[1:] or steps for pair in step.busy.items())
    bubbles = (
        (stage["label"], stage["lost"].get("bubble", 0.0))
        for event in run.all(TimelineEvent)
        for stage in event.stages
    )
    return {
        "outcome": run.info.outcome,
        "error": run.info.error or None,
        "continues": run.info.continues,
        "steps": steps[-1].step if steps else None,
        "whole time": _seconds(run.events),
        "first loss": _finite(steps[0].loss) if steps else None,
        "last loss": _finite(steps[-1].loss) if steps else None,
        **{f"test {name}": _finite(value) for name, value in _metrics(run, summary).items()},
        "step time": _average(statistics.median, [step.step_s for step in steps]),
        "samples/s": _average(statistics.median, [step.samples_per_s for step in steps]),
        "data share": _average(statistics.fmean, [step.data_share for step in steps]),
        **{f"busy {label}": share for label, share in _mean_by_label(busy).items()},
        **{f"bubble {label}": share for label, share in _mean_by_label(bubbles).items()},
        **{f"peak memory {label}": sizes["peak"] for label, sizes in memory.items()},
        "faults": len(run.all(FaultEvent)),
        "warnings": len(run.all(WarningEvent)),
        "checkpoints": len(run.all(CheckpointEvent)),
        "parameters sha256": summary.parameters_sha256 if summary else None,
        **{f"version of {name}": version for name, version in run.info.versions.items()},
    }


def _seconds(events: Iterable[Event]) -> float | None:
    times = [event.time for event in events if event.time is not None]
    return times[-1] - times[0] if times else None


def _metrics(run: Record, summary: SummaryEvent | None) -> dict[str, float]:
    """Return the metrics of the end of the run, or of its last evaluation."""
    if summary and summary.metrics:
        return summary.metrics
    evaluations = run.all(EvalEvent)
    return evaluations[-1].values if evaluations else {}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _average(function: Callable[[Sequence[float]], float], values: Sequence[float]) -> float | None:
    """Average the finite values of all steps but the first, which warms up."""
    finite = [value for value in values[1:] or values if math.isfinite(value)]
    return function(finite) if finite else None


def _mean_by_label(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    by_label: dict[str, list[float]] = defaultdict(list)
    for label, value in values:
        by_label[label].append(value)
    return {label: statistics.fmean(values) for label, values in by_label.items()}


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
    figures = [(name, [_in_unit(name, v) for v in values]) for name, values in comparison.figures]
    yield Table("Figures", figures)
    if len(comparison.names) > 1:
        settings = [(name, [*map(_text, values)]) for name, values in comparison.settings]
        yield Table("Settings that differ", settings)
        # With all digits, since the last ones may differ.
        losses = [
            (f"step {step:,}", ["not finite" if loss is None else repr(loss) for loss in values])
            for step, values in comparison.losses
        ]
        yield Table("Loss", losses)


def _in_unit(name: str, value: Any) -> str:
    if value is None:
        return "-"
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


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
