"""Settings that a run finds by itself, next to the best of all that it may choose from.

    python -m tests.benchmarks.defaults [--steps N] [--seconds S] [--rounds N] [CASE or CONFIG ...]

For each, a run trains with "auto" for all of it: a case --steps, a config as many as it has. Then
all options that it might have chosen are measured on one group of processes, as `rpcmp tune` does,
and dropped by halves: the best of them is what a patient user would set by hand. At last four
settings have turns on these processes: what the run has chosen, the best by hand, what the case
gives, and the former defaults. Runs one after the other would not tell: a machine's speed changes
by more than these differ.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from rpcmp.config.loader import load_config
from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from rpcmp.job.autobalance import balanced
from rpcmp.job.segments import Segments
from rpcmp.job.server_pool import forks_for
from rpcmp.job.training_run import drive
from rpcmp.observability.events import Event, ScheduleEvent
from rpcmp.pipelining.setting_grid import Grid, options_to_try
from rpcmp.tools import tuning
from rpcmp.tools.measurement import TimeLimits, paired_ratio, rotated
from tests.benchmarks.predictions import CASES, case_of

AUTO = {"schedule": "auto", "max_in_flight": "auto", "microbatches_per_message": "auto"}
FORMER = {"schedule": "1f1b", "max_in_flight": None, "microbatches_per_message": 1}
"""The defaults before there was "auto"."""

CHOSEN, BEST, GIVEN, BEFORE = "chosen", "best by hand", "the case's own", "former defaults"

SWEEP_ROUNDS = 4

TURN_SECONDS = 1.5
"""Of one turn, which has 3 to 50 steps."""


async def found(config: Config) -> tuple[ScheduleOptions, str]:
    """Return the options that a run ends with, and what it has measured, in words."""
    options, words = config.options, "it has tried nothing"

    def report(event: Event) -> None:
        nonlocal options, words
        if isinstance(event, ScheduleEvent):
            options = config.options.model_copy(update=event.options)
            tried = (f"{name}: {seconds * 1e3:.1f} ms" for name, seconds in event.measured.items())
            words = f"by step {event.step} it has tried {'; '.join(tried) or 'nothing'}"

    plain = {"ui": None, "checkpoint": None}
    await drive(config.model_copy(update=plain), report, evaluate=False)
    return options, words


async def turns(
    config: Config, settings: Mapping[str, ScheduleOptions], seconds: float, rounds: int
) -> tuple[ScheduleOptions, dict[ScheduleOptions, list[float]]]:
    """Return the best of all options, and the seconds of a step of it and `settings`, in turn."""
    grid = Grid(settings[CHOSEN], options_to_try(config), [])
    everything = list(dict.fromkeys((*grid.settings, *settings.values())))
    segments = Segments(
        tuning.plain_training(config),
        settings=everything,
        takes_snapshots=config.takes_snapshots,
    )
    try:
        await segments.start()
        measure = partial(tuning.measure, segments)
        limits = TimeLimits(seconds)
        sweep = tuning.Sweep(grid, measure, SWEEP_ROUNDS, None, lambda *_: None, limits)
        tuned = await sweep.run(config)
        best, count = tuned.best, f"{len(tuned.series)} of {len(grid.settings)}"
        print(f"by hand, {count} options were measured: {tuned.basis}")
        steps = max(3, min(50, int(TURN_SECONDS / best.median_s)))
        compared = list(dict.fromkeys((*settings.values(), best.setting)))
        times: dict[ScheduleOptions, list[float]] = {one: [] for one in compared}
        for number in range(rounds):
            for one in rotated(compared, number):
                times[one].append((await measure(one, steps)).step)
        return best.setting, times
    finally:
        await segments.close()


async def compare(name: str, given: Config, arguments: argparse.Namespace) -> None:
    async with forks_for(given, None) as forks:
        config, _ = await balanced(given.model_copy(update=AUTO), None, forks)
    chosen, tried = await found(config)
    former = config.options.model_copy(update=FORMER)
    settings = {CHOSEN: chosen, GIVEN: given.options, BEFORE: former}
    best, times = await turns(config, settings, arguments.seconds, arguments.rounds)
    settings[BEST] = best
    print(f"{name}: chosen: {chosen}; best by hand: {best}\n  {tried}")
    for words in (BEST, GIVEN, BEFORE):
        ratio = paired_ratio(times[chosen], times[settings[words]])
        interval = f"({ratio.low:.3f} to {ratio.high:.3f})"
        print(f"  chosen / {words}: {ratio.median:.3f} {interval}", flush=True)


def job_of(name: str, steps: int) -> Config:
    """Return the job of a case, with so many steps, or of a config."""
    if name.endswith(".toml"):
        return load_config(Path(name), [])
    return case_of(name).model_copy(update={"steps": steps, "epochs": None})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=CASES)
    parser.add_argument("--steps", type=int, default=120, help="of a case's run")
    parser.add_argument("--seconds", type=float, default=90.0, help="for the search by hand")
    parser.add_argument("--rounds", type=int, default=8, help="in which settings have turns")
    arguments = parser.parse_args()
    for name in arguments.names:
        asyncio.run(compare(name, job_of(name, arguments.steps), arguments))


if __name__ == "__main__":
    main()
