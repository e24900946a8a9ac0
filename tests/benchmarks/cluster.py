"""Runs of 2 to 64 stages next to `rpcmp plan --simulate`, and what it says of a thousand.

    python -m tests.benchmarks.cluster [STAGES ...]
    python -m tests.benchmarks.cluster --write      # the guide's tables and plot

Stages sleep instead of computing, longer the more there are, so that two cores have time for their
messages. What a message costs is fitted at 4 stages; the others show whether it holds. What a
recovery and the driver cost is fitted to the table of `tests.benchmarks.scale` in the guide.
"""

from __future__ import annotations

import asyncio
import re
import statistics
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from rpcmp.job.segments import Segments
from rpcmp.tools.bench import cases
from rpcmp.tools.cluster_simulation import HEADS, Cluster, Outlook, cells, outlook
from tests.benchmarks.scale import row, save, write
from tests.support.places import ROOT

PAGE, PLOT = ROOT / "rpcmp/guide/clusters.md", ROOT / ".github/assets/thousand-stages.svg"
SCALE = ROOT / "rpcmp/guide/benchmarks.md"

NUMBERS, FITTED = (2, 4, 8, 16, 32, 64), 4
DRAWN = (10, 20, 50, 100, 200, 500, 1000)
PER_STAGE = 2
"""Micro-batches of a step for each stage, up to MOST_MICROBATCHES."""

MOST_MICROBATCHES = 64
STEPS = 2

EXAMPLE = {
    "work": {"forward_ms": 20.0, "backward_ms": 40.0, "update_ms": 20.0, "state": "4 GB"},
    "hosts": {"speed_spread": 0.03, "jitter": 0.02, "mtbf_hours": 2000.0},
    "links": {"bandwidth": "1 GB", "latency_ms": 0.2},
}
"""The cluster of the guide's second table."""


class Compared(NamedTuple):
    """A number of stages; seconds of a step, and shares of it in which stages compute."""

    stages: int
    measured_s: float
    simulated_s: float
    measured: float
    simulated: float


def milliseconds(stages: int) -> float:
    """Return how long a forward sleeps; a backward takes twice as long."""
    return max(20.0, 2.0 * stages)


def microbatches(stages: int) -> int:
    return min(PER_STAGE * stages, MOST_MICROBATCHES)


def measured(stages: int) -> float:
    """Return the seconds of a step of a real run."""
    each = milliseconds(stages)
    times = ", ".join(
        f"{kind} = {each}" for kind in ("forward", "input_gradient", "weight_gradient")
    )
    keys = (f"model.kwargs.times_ms={{ {times} }}", "schedule=1f1b", "microbatches_per_message=1")
    case = cases.load("sleep", stages, microbatches(stages), keys)
    config = case.config.model_copy(update={"max_in_flight": None})

    async def run() -> float:
        segments = Segments(config)
        try:
            await segments.start()
            await segments.run(1)
            done = await segments.run(STEPS + 1)
        finally:
            await segments.close()
        return statistics.median(step.step_s for step in done.steps[1:])

    return asyncio.run(run())


def simulated(stages: int, message_ms: float) -> Outlook:
    """Return the outlook of the same run."""
    each = milliseconds(stages)
    work = {"forward_ms": each, "backward_ms": 2 * each, "activation": "1 kB"}
    given = {"work": work, "links": {"latency_ms": 0.0}, "overheads": {"message_ms": message_ms}}
    per_stage = {"microbatches_per_stage": max(1, microbatches(stages) // stages)}
    return outlook(Cluster.model_validate({**given, **per_stage}), stages)


def fitted(step_s: float) -> float:
    """Return the milliseconds of a message with which FITTED stages take that long."""
    least, most = 0.0, 50.0
    for _ in range(20):
        between = (least + most) / 2
        least, most = (
            (between, most) if simulated(FITTED, between).step_s < step_s else (least, between)
        )
    return least


def compare(numbers: tuple[int, ...]) -> tuple[float, list[Compared]]:
    seconds = {number: measured(number) for number in sorted({*numbers, FITTED})}
    message_ms = fitted(seconds[FITTED])
    found = []
    for number, step in seconds.items():
        ours = simulated(number, message_ms)
        work = ours.busy * ours.step_s
        found.append(Compared(number, step, ours.step_s, work / step, ours.busy))
    return message_ms, found


def overheads() -> dict[str, float]:
    """Fit lines to what recoveries and the driver cost in the guide's table."""
    text = SCALE.read_text(encoding="utf-8")
    rows = [
        [float(cell) for cell in line.strip("| ").split("|")]
        for line in re.findall(r"(?m)^\| \d+ \|.*\|$", text.partition("s until training")[2])
    ]
    stages, recovery, driver = (np.array([each[place] for each in rows]) for place in (0, 2, 6))
    slope, start = np.polyfit(stages, recovery, 1)
    driver_slope, driver_start = np.polyfit(stages, driver, 1)
    return {
        "recovery_s": max(0.0, float(start)),
        "recovery_s_per_stage": float(slope),
        "driver_ms": max(0.0, float(driver_start)),
        "driver_ms_per_stage": float(driver_slope),
    }


def tables(message_ms: float, found: list[Compared]) -> tuple[str, str]:
    """Return the comparison, and the cluster of EXAMPLE."""
    heads = ("stages", "s a step, run", "simulated", "computing, run", "simulated", "error")
    lines = [row(heads), row("---" for _ in heads)]
    for each in found:
        error = each.simulated / each.measured - 1
        shares = (f"{each.measured:.1%}", f"{each.simulated:.1%}", f"{error:+.1%}")
        lines.append(
            row([each.stages, f"{each.measured_s:.3f}", f"{each.simulated_s:.3f}", *shares])
        )
    example = Cluster.model_validate({**EXAMPLE, "overheads": {"message_ms": message_ms}})
    many = [row(HEADS), row("---" for _ in HEADS)]
    many += [row(cells(outlook(example, number))) for number in example.stages]
    return "\n".join(lines), "\n".join(many)


def plot(message_ms: float, path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    example = Cluster.model_validate({**EXAMPLE, "overheads": {"message_ms": message_ms}})
    found = [outlook(example, number) for number in DRAWN]
    drawn = Figure(figsize=(7, 4), layout="constrained")
    axes = drawn.add_subplot()
    for name in ("busy", "efficiency", "lost", "driver"):
        axes.plot(DRAWN, [getattr(each, name) for each in found], "o-", label=LABELS[name])
    axes.set_xscale("log")
    axes.set_xticks(DRAWN, [str(each) for each in DRAWN])
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    axes.set_xlabel("stages, each on a host of its own")
    axes.legend(fontsize=8)
    save(drawn, path)


LABELS = {
    "busy": "computing, of a step",
    "efficiency": "computing that counts, of all time",
    "lost": "lost to faults, of all time",
    "driver": "the driver's CPU, of a core",
}


@click.command()
@click.argument("stages", type=click.IntRange(min=1), nargs=-1)
@click.option("--write", "writes", is_flag=True, help="Write the guide's tables and plot.")
def main(stages: tuple[int, ...], writes: bool) -> None:
    """Compare runs with these numbers of STAGES, by default 2 to 64, with their simulation."""
    message_ms, found = compare(stages or NUMBERS)
    texts = tables(message_ms, found)
    fits = ", ".join(f"{key} = {value:.3g}" for key, value in overheads().items())
    print(f"message_ms = {message_ms:.2f} at {FITTED} stages; {fits}", *texts, sep="\n\n")
    if writes:
        for text in texts:
            write(f"{text}\n", PAGE, below="")
        plot(message_ms, PLOT)


if __name__ == "__main__":
    main()
