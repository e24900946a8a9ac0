"""The curve: step time over the number of micro-batches, a line for each way to work on them.

matplotlib is imported late: a sweep without a picture does not need it.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rpcmp.bench.statistics import spread
from rpcmp.errors import ConfigError
from rpcmp.trace.diagram import require_matplotlib
from rpcmp.tune.series import Series, Tuned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE, DPI = (9.0, 5.5), 120
"""Inches, and pixels an inch."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Of Okabe and Ito (2008): told apart with any colour vision."""


def write_png(tuned: Tuned, path: Path) -> None:
    """Draw the curve into `path`.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    require_matplotlib()
    try:
        figure(tuned).savefig(path, format="png", dpi=DPI)
    except OSError as error:
        raise ConfigError(f"cannot write the curve {path}: {error.strerror or error}") from error


def figure(tuned: Tuned) -> Figure:
    """The curve; without pyplot, which would need a display and keep every figure."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=SIZE, layout="constrained")
    axes = drawn.add_subplot()
    axes.set_prop_cycle(color=COLOURS)
    _draw_lines(axes, tuned)
    _draw_bound(axes, tuned)
    _mark(axes, tuned.best, "*", 18, f"best: {tuned.best.setting}")
    _mark(axes, tuned.own, "o", 14, f"yours: {tuned.own.setting}")
    _label(axes, tuned)
    drawn.legend(loc="outside lower center", ncols=2, frameon=False)
    return drawn


def _draw_lines(axes: Axes, tuned: Tuned) -> None:
    for way, group in groupby(tuned.series, key=lambda one: one.setting.way):
        line = list(group)
        spreads = [spread(one.seconds) for one in line]
        medians = [of.median * 1e3 for of in spreads]
        below = [(of.median - of.lower_quartile) * 1e3 for of in spreads]
        above = [(of.upper_quartile - of.median) * 1e3 for of in spreads]
        axes.errorbar(
            _numbers(line), medians, yerr=(below, above), label=way, marker=".", capsize=3
        )


def _draw_bound(axes: Axes, tuned: Tuned) -> None:
    """The busiest stage's own work: what the same cuts would take without any bubble."""
    least: dict[int, float] = {}
    for one in tuned.series:
        number = one.setting.num_microbatches
        least[number] = min(one.busiest_stage_s * 1e3, least.get(number, float("inf")))
    numbers = sorted(least)
    label = "busiest stage's own work: no bubble"
    axes.plot(numbers, [least[n] for n in numbers], color="grey", linestyle="--", label=label)


def _mark(axes: Axes, one: Series, marker: str, size: float, label: str) -> None:
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


def _numbers(line: list[Series]) -> list[int]:
    return [one.setting.num_microbatches for one in line]
