"""Results of `rpcmp tune`: a table and lines to paste, one JSON object, or a picture.

The picture has step time over the number of micro-batches, with a line per combination of the other
options. matplotlib is imported late, since a sweep without a picture does not need it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from rpcmp.config.schema import ScheduleOptions
from rpcmp.errors import ConfigError
from rpcmp.observability.trace.plot import require_matplotlib
from rpcmp.tools.measurement import Estimate, is_conclusive, spread
from rpcmp.tools.tune.setting_times import SettingTimes, Tuned, is_more

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
        "settings": [_object(tuned, one) for one in tuned.series],
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
    for one in tuned.series:
        rows.add_row(*_row(tuned, one), style="bold" if one is tuned.best else None)
    return rows


def lines(tuned: Tuned) -> Iterator[str]:
    """Yield the lines below the table: what was left out, the verdict, and lines to paste."""
    yield from tuned.left_out
    yield from _unmeasured(tuned)
    if tuned.is_cut_short:
        yield "stopped: these are the results so far"
    best, own = tuned.best.setting, tuned.own.setting
    if best == own and tuned.unmeasured and len(tuned.series) == 1:
        yield f"only your {own} was measured: nothing to compare it with"
        return
    if best == own:
        yield f"best: {own}, as your config has it"
        return
    yield f"best: {best}"
    if tuned.confirmed is not None:
        yield f"its step / that of your {own}: {_ratio(tuned.confirmed)}, measured after the choice"
    if not tuned.is_faster:
        yield f"{_doubt(tuned.confirmed)}: leave your config as it is{_hint(tuned)}"
        return
    yield from paste(own, best)


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


def _unmeasured(tuned: Tuned) -> Iterator[str]:
    why = "stopped before" if tuned.is_cut_short else "no time left"
    for way, group in groupby(tuned.unmeasured, key=lambda setting: setting.way):
        numbers = ", ".join(str(setting.num_microbatches) for setting in group)
        yield f"not measured: {why}: num_microbatches {numbers}, {way}"


def _object(tuned: Tuned, one: SettingTimes) -> dict[str, Any]:
    return {
        **one.setting.model_dump(),
        "rounds": len(one.measured),
        "step_s": one.median_s,
        "spread": asdict(spread(one.seconds)),
        "samples_per_s": _samples_per_s(tuned, one),
        "busiest_stage_s": one.busiest_stage_s,
        "is_dropped": one.setting in tuned.dropped,
        "ratio_to_best": asdict(tuned.against_best(one)),
        "is_slower_than_best": is_more(tuned.against_best(one)),
    }


def _row(tuned: Tuned, one: SettingTimes) -> list[str]:
    times, ratio = spread(one.seconds), tuned.against_best(one)
    compared = (f"{ratio.median:.3f}", _interval(ratio))
    return [
        one.setting.schedule,
        str(one.setting.microbatches_per_message),
        str(one.setting.max_in_flight or "default"),
        str(one.setting.num_microbatches),
        f"{times.median * 1e3:,.1f}",
        f"{times.lower_quartile * 1e3:,.1f} to {times.upper_quartile * 1e3:,.1f}",
        f"{_samples_per_s(tuned, one):,.0f}",
        f"{one.busiest_stage_s * 1e3:,.1f}",
        *(("", "") if one is tuned.best else compared),
        _remark(tuned, one),
    ]


def _remark(tuned: Tuned, one: SettingTimes) -> str:
    ratio = tuned.against_best(one)
    remarks = ["yours"] if one is tuned.own else []
    if one is tuned.best:
        remarks.append("best")
    elif one.setting in tuned.dropped:
        remarks.append("dropped")
    elif not is_conclusive(ratio):
        remarks.append("too few rounds")
    elif not is_more(ratio):
        remarks.append("within noise")
    return ", ".join(remarks)


def _samples_per_s(tuned: Tuned, one: SettingTimes) -> float:
    data = tuned.config.data
    return data.batch_size / one.median_s if data else 0.0


def _ratio(ratio: Estimate) -> str:
    return f"{ratio.median:.3f} ({_interval(ratio)})"


def _interval(ratio: Estimate) -> str:
    return f"{ratio.low:.3f} to {ratio.high:.3f}, {ratio.confidence:.0%}"


def _doubt(confirmed: Estimate | None) -> str:
    """Return why the best setting is not recommended."""
    if confirmed is None:
        return "not measured once more"
    return (
        "the difference is within noise" if is_conclusive(confirmed) else "too few rounds to tell"
    )


def _hint(tuned: Tuned) -> str:
    if tuned.confirmed is not None and is_conclusive(tuned.confirmed):
        return ""
    return " (more --rounds, or a larger --budget, could tell)"


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
    _draw_lines(axes, tuned)
    _draw_bound(axes, tuned)
    _mark(axes, tuned.best, "*", 18, f"best: {tuned.best.setting}")
    _mark(axes, tuned.own, "o", 14, f"yours: {tuned.own.setting}")
    _label(axes, tuned)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def _draw_lines(axes: Axes, tuned: Tuned) -> None:
    for way, group in groupby(tuned.series, key=lambda one: one.setting.way):
        line = list(group)
        spreads = [spread(one.seconds) for one in line]
        medians = [each.median * 1e3 for each in spreads]
        below = [(each.median - each.lower_quartile) * 1e3 for each in spreads]
        above = [(each.upper_quartile - each.median) * 1e3 for each in spreads]
        axes.errorbar(
            _numbers(line), medians, yerr=(below, above), label=way, marker=".", capsize=3
        )


def _draw_bound(axes: Axes, tuned: Tuned) -> None:
    """Draw the busiest stage's own work: the time of a step without any bubble."""
    least: dict[int, float] = {}
    for one in tuned.series:
        number = one.setting.num_microbatches
        least[number] = min(one.busiest_stage_s * 1e3, least.get(number, float("inf")))
    numbers = sorted(least)
    label = "busiest stage's own work: no bubble"
    axes.plot(numbers, [least[n] for n in numbers], color="grey", linestyle="--", label=label)


def _mark(axes: Axes, one: SettingTimes, marker: str, size: float, label: str) -> None:
    axes.plot(
        _numbers([one]),
        [one.median_s * 1e3],
        marker,
        markersize=size,
        markerfacecolor="none",
        markeredgecolor="black",
        label=label,
    )


def _label(axes: Axes, tuned: Tuned) -> None:
    ticks = sorted(set(_numbers(tuned.series)))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("micro-batches a step")
    axes.set_ylabel("ms a step")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.set_title(
        f"{tuned.config.name}: {tuned.config.num_stages} stages; medians and quartiles; "
        f"{tuned.basis}"
    )


def _numbers(line: list[SettingTimes]) -> list[int]:
    return [one.setting.num_microbatches for one in line]
