"""Results of `rpcmp tune`: a table and lines to paste, one JSON object, or a picture.

The picture has step time over the number of micro-batches, with a line per combination of the other
options. matplotlib is imported late, since a sweep without a picture does not need it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.errors import ConfigError
from rpcmp.observability.trace.plot import require_matplotlib
from rpcmp.tools.measurement import Estimate, is_conclusive, spread
from rpcmp.tools.tuning import SettingTimes, Tuned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLUMNS = (
    *("schedule", "per message", "max_in_flight", "micro-batches", "ms a step", "quartiles"),
    *("samples/s", "busiest stage", "it / best", "interval", ""),
)


def as_json(tuned: Tuned) -> dict[str, Any]:
    """Return the sweep as plain data; times in seconds per step."""
    return {
        "name": tuned.config.name,
        "num_stages": tuned.config.num_stages,
        "rounds": tuned.rounds,
        "steps": tuned.steps,
        "settings": [_object(tuned, times) for times in tuned.series],
        "best": tuned.best.setting.model_dump(),
        "own": tuned.own.setting.model_dump(),
        "confirmed": None if tuned.confirmed is None else asdict(tuned.confirmed),
        "is_faster": tuned.is_faster,
        "recommended": tuned.recommended.model_dump(),
        "not_measured": [setting.model_dump() for setting in tuned.unmeasured],
        "left_out": tuned.left_out,
        "is_cut_short": tuned.is_cut_short,
    }


def table(tuned: Tuned) -> Table:
    title = f"{tuned.config.name}: {tuned.config.num_stages} stages, {tuned.basis}"
    rows = Table(title=title, title_justify="left", box=None, header_style="bold")
    for head in COLUMNS:
        rows.add_column(head, justify="left" if head in ("schedule", "") else "right", no_wrap=True)
    for times in tuned.series:
        rows.add_row(*_row(tuned, times), style="bold" if times is tuned.best else None)
    return rows


def lines(tuned: Tuned) -> Iterator[str]:
    """Yield the lines below the table: what was left out, the verdict, and lines to paste."""
    yield from tuned.left_out
    reason = "stopped before" if tuned.is_cut_short else "no time left"
    for way, group in groupby(tuned.unmeasured, key=lambda setting: setting.without_count):
        numbers = ", ".join(str(setting.num_microbatches) for setting in group)
        yield f"not measured: {reason}: num_microbatches {numbers}, {way}"
    if tuned.is_cut_short:
        yield "stopped: these are the results so far"
    best, own, ratio = tuned.best.setting, tuned.own.setting, tuned.confirmed
    if best == own:
        if tuned.unmeasured and len(tuned.series) == 1:
            yield f"only your {own} was measured: nothing to compare it with"
        else:
            yield f"best: {own}, as your config has it"
        return
    yield f"best: {best}"
    if ratio is not None:
        interval = f"{ratio.median:.3f} ({_interval(ratio)})"
        yield f"its step / that of your {own}: {interval}, measured after the choice"
    if tuned.is_faster:
        yield from paste(own, best)
    elif ratio is not None and is_conclusive(ratio):
        yield "the difference is within noise: leave your config as it is"
    else:
        doubt = "not measured once more" if ratio is None else "too few rounds to tell"
        hint = "(more --rounds, or a larger --budget, could tell)"
        yield f"{doubt}: leave your config as it is {hint}"


def paste(own: ScheduleOptions, best: ScheduleOptions) -> Iterator[str]:
    """Yield lines that change a config from one setting to the other."""
    changed = {k: v for k, v in best.model_dump().items() if v != getattr(own, k)}
    toml = {key: json.dumps(value) for key, value in changed.items() if value is not None}
    if len(toml) == len(changed):
        yield " ".join(f"--set {key}={changed[key]}" for key in changed)
    yield from (f"{key} = {value}" for key, value in toml.items())
    yield from (f"(without {key})" for key in changed if key not in toml)
    if "num_microbatches" in changed:
        yield "note: other micro-batches, other batch-normalization statistics and dropout draws"


def _object(tuned: Tuned, times: SettingTimes) -> dict[str, Any]:
    ratio = tuned.ratio_to_best(times)
    return {
        **times.setting.model_dump(),
        "rounds": len(times.measured),
        "step_s": times.median_s,
        "spread": asdict(spread(times.seconds)),
        "samples_per_s": _samples_per_s(tuned, times),
        "busiest_stage_s": times.busiest_stage_s,
        "is_dropped": times.setting in tuned.dropped,
        "ratio_to_best": asdict(ratio),
        "is_slower_than_best": _is_slower(ratio),
    }


def _row(tuned: Tuned, times: SettingTimes) -> list[str]:
    ratio, step = tuned.ratio_to_best(times), spread(times.seconds)
    compared = (f"{ratio.median:.3f}", _interval(ratio))
    return [
        times.setting.schedule,
        str(times.setting.microbatches_per_message),
        str(times.setting.max_in_flight or "default"),
        str(times.setting.num_microbatches),
        f"{step.median * 1e3:,.1f}",
        f"{step.lower_quartile * 1e3:,.1f} to {step.upper_quartile * 1e3:,.1f}",
        f"{_samples_per_s(tuned, times):,.0f}",
        f"{times.busiest_stage_s * 1e3:,.1f}",
        *(("", "") if times is tuned.best else compared),
        _remark(tuned, times, ratio),
    ]


def _remark(tuned: Tuned, times: SettingTimes, ratio: Estimate) -> str:
    remarks = ["yours"] if times is tuned.own else []
    if times is tuned.best:
        remarks.append("best")
    elif times.setting in tuned.dropped:
        remarks.append("dropped")
    elif not is_conclusive(ratio):
        remarks.append("too few rounds")
    elif not _is_slower(ratio):
        remarks.append("within noise")
    return ", ".join(remarks)


def _is_slower(ratio: Estimate) -> bool:
    return ratio.low > 1 and is_conclusive(ratio)


def _samples_per_s(tuned: Tuned, times: SettingTimes) -> float:
    return tuned.config.require_data("tuning").batch_size / times.median_s


def _interval(ratio: Estimate) -> str:
    return f"{ratio.low:.3f} to {ratio.high:.3f}, {ratio.confidence:.0%}"


SIZE, DPI = (9.0, 5.5), 120
"""Inches, and pixels an inch."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""From Okabe and Ito (2008): distinct with any colour vision."""


def write_png(tuned: Tuned, path: Path) -> None:
    require_matplotlib()
    try:
        draw(tuned).savefig(path, format="png", dpi=DPI)
    except OSError as error:
        raise ConfigError(f"cannot write the curve {path}: {error.strerror or error}") from error


def draw(tuned: Tuned) -> Figure:
    """Return the picture, made without pyplot, which needs a display and keeps every figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_prop_cycle(color=COLOURS)
    for way, group in groupby(tuned.series, key=lambda times: times.setting.without_count):
        _draw_line(axes, way, list(group))
    _draw_bound(axes, tuned)
    for name, times, marker, size in (
        ("best", tuned.best, "*", 18),
        ("yours", tuned.own, "o", 14),
    ):
        axes.plot(
            [times.setting.num_microbatches],
            [times.median_s * 1e3],
            marker,
            markersize=size,
            markerfacecolor="none",
            markeredgecolor="black",
            label=f"{name}: {times.setting}",
        )
    ticks = sorted({times.setting.num_microbatches for times in tuned.series})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("micro-batches a step")
    axes.set_ylabel("ms a step")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    name, count = tuned.config.name, tuned.config.num_stages
    axes.set_title(f"{name}: {count} stages; medians and quartiles; {tuned.basis}")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def _draw_line(axes: Axes, label: str, line: list[SettingTimes]) -> None:
    numbers = [times.setting.num_microbatches for times in line]
    spreads = [spread(times.seconds) for times in line]
    medians = [each.median * 1e3 for each in spreads]
    below = [(each.median - each.lower_quartile) * 1e3 for each in spreads]
    above = [(each.upper_quartile - each.median) * 1e3 for each in spreads]
    axes.errorbar(numbers, medians, yerr=(below, above), label=label, marker=".", capsize=3)


def _draw_bound(axes: Axes, tuned: Tuned) -> None:
    """Draw the busiest stage's own work: the time of a step without any bubble."""
    least: dict[int, float] = {}
    for times in tuned.series:
        number = times.setting.num_microbatches
        least[number] = min(times.busiest_stage_s * 1e3, least.get(number, math.inf))
    numbers = sorted(least)
    label = "busiest stage's own work: no bubble"
    axes.plot(numbers, [least[n] for n in numbers], color="grey", linestyle="--", label=label)
