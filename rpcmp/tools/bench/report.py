"""What `rpcmp bench` says: a table, or one JSON object a case."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.table import Table

from rpcmp.tools.bench.benchmark import BenchmarkResult
from rpcmp.tools.bench.comparison import ContestantTimes
from rpcmp.tools.bench.statistics import Estimate, estimate, paired_ratio, spread

COLUMNS = ("contestant", "settings", "ms a step", "quartiles", "ours / it", "interval")


def as_json(result: BenchmarkResult) -> dict[str, Any]:
    """The case as plain data; times in seconds, ratios are ours / theirs.

    "max_in_flight" and what else ours runs with stand in "settings".
    """
    everybody = [result.ours, *result.peers]
    return {
        "case": result.case.name,
        "num_stages": result.case.num_stages,
        "num_microbatches": result.case.config.num_microbatches,
        "step_s": spread(result.ours.seconds).median,
        "bound_s": result.bound_s,
        "driver_cpu_s": _driver_cpu(result),
        "peers": {one.name: spread(one.seconds).median for one in result.peers},
        "pairs": result.pairs,
        "steps": result.steps,
        "ratios": {name: asdict(ratio) for name, ratio in ratios(result).items()},
        "spreads": {one.name: asdict(spread(one.seconds)) for one in everybody},
        "settings": {one.name: dict(one.settings) for one in everybody},
        "notes": result.notes,
    }


def ratios(result: BenchmarkResult) -> dict[str, Estimate]:
    """Ours / theirs by name, and ours / "bound" where there is one."""
    found = {one.name: paired_ratio(result.ours.seconds, one.seconds) for one in result.peers}
    if result.bound_s:
        found["bound"] = estimate([seconds / result.bound_s for seconds in result.ours.seconds])
    return found


def table(result: BenchmarkResult) -> Table:
    """The case as a table of a row a contestant and one for the bound."""
    config = result.case.config
    title = (
        f"{result.case.name}: {result.case.num_stages} stages, "
        f"{config.num_microbatches} micro-batches, "
        f"{result.pairs} interleaved pair{'s' * (result.pairs > 1)} of "
        f"{result.steps} step{'s' * (result.steps > 1)}"
    )
    shown = Table(*COLUMNS, title=title, title_justify="left", box=None, header_style="bold")
    compared = ratios(result)
    shown.add_row(*_measured(result.ours), "", "")
    for one in result.peers:
        shown.add_row(*_measured(one), *_compared(compared[one.name]))
    if result.bound_s:
        milliseconds = f"{result.bound_s * 1e3:.1f}"
        shown.add_row("bound", "", milliseconds, "", *_compared(compared["bound"]))
    return shown


def lines(result: BenchmarkResult) -> Iterator[str]:
    """What stands below the table."""
    if (seconds := _driver_cpu(result)) is not None:
        a_microbatch = seconds / result.case.config.num_microbatches
        yield f"driver: {a_microbatch * 1e3:.2f} ms of CPU a micro-batch"
    yield from (f"note: {note}" for note in result.notes)


def _driver_cpu(result: BenchmarkResult) -> float | None:
    """Seconds a step, the median of all rounds."""
    measured = result.ours.driver_cpu_seconds
    return spread(measured).median if measured else None


def _measured(one: ContestantTimes) -> tuple[str, ...]:
    of = spread(one.seconds)
    return (
        one.name,
        ", ".join(f"{key} {value}" for key, value in one.settings.items()),
        f"{of.median * 1e3:.1f}",
        f"{of.lower_quartile * 1e3:.1f} to {of.upper_quartile * 1e3:.1f}",
    )


def _compared(ratio: Estimate) -> tuple[str, str]:
    interval = f"{ratio.low:.3f} to {ratio.high:.3f} ({ratio.confidence:.0%})"
    return f"{ratio.median:.3f}", interval
