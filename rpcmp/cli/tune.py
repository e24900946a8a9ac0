"""`rpcmp tune`: find the fastest number of micro-batches, schedule and in-flight limit."""

from __future__ import annotations

import asyncio
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rpcmp.cli import echo
from rpcmp.cli.options import (
    addresses_of,
    budget_option,
    config_argument,
    connect_option,
    require_writable,
)
from rpcmp.config import loader
from rpcmp.errors import ConfigError

if TYPE_CHECKING:
    from rpcmp.config.schema import Config
    from rpcmp.pipelining.setting_grid import Grid
    from rpcmp.tools.tuning import Tuned

WIDTH = 160
"""Characters that a row of the table may take."""

DEFAULT = "default"

STARTING = "starting (usually 5 to 10 s)"


@click.command()
@config_argument
@connect_option
@click.option(
    "--microbatches",
    metavar="N,...",
    help="Numbers of micro-batches. [default: powers of two, with at least two samples each]",
)
@click.option("--schedules", metavar="NAME,...", help="[default: 1f1b,zero-bubble]")
@click.option(
    "--max-in-flight",
    metavar="N,...",
    help='Numbers, and "default" for the schedule\'s own. [default: "default", and for zero-bubble '
    "also twice the stages, times the micro-batches per message]",
)
@click.option("--microbatches-per-message", metavar="N,...", help="Numbers. [default: CONFIG's]")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    show_default="5, or as many as the budget allows",
    help="Steps per round.",
)
@budget_option
@click.option(
    "--png",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the curve: step time over micro-batches, with quartiles.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def tune(
    config: Path,
    overrides: tuple[str, ...],
    connect: str | None,
    microbatches: str | None,
    schedules: str | None,
    max_in_flight: str | None,
    microbatches_per_message: str | None,
    rounds: int,
    steps: int | None,
    budget: float,
    png: Path | None,
    as_json: bool,
) -> None:
    """Find the setting under which CONFIG trains fastest.

    Measures every combination and CONFIG's own setting in interleaved rounds on one group of
    workers, drops in each round those that cannot win, and then measures the best one against
    CONFIG's own again. The budget includes the start; if it is too small, settings are left
    unmeasured. A Ctrl-C shows the results so far. Five rounds are the fewest that can tell two
    settings apart; keep the machine quiet. "busiest stage" is how long that stage computes in a
    step, which is what a step would take without any bubble.

    Only the number of micro-batches changes the bits of a run: batch normalization computes its
    statistics per micro-batch, and dropout draws per micro-batch.

    \b
    Example:
      rpcmp tune config.toml --microbatches 4,8,16 --png curve.png
    """
    from rpcmp.observability.trace.plot import require_matplotlib
    from rpcmp.pipelining.setting_grid import Axes, grid

    job = loader.load_config(config, overrides)
    swept = grid(
        job,
        Axes(
            _numbers("--microbatches", microbatches),
            _values("--schedules", schedules),
            _limits(max_in_flight),
            _numbers("--microbatches-per-message", microbatches_per_message),
        ),
    )
    if png is not None:
        require_matplotlib()
        require_writable(png)
    where = addresses_of(connect, job)
    tuned, code = asyncio.run(_tune(job, swept, where, rounds, steps, budget))
    if tuned is None:
        echo(f"{job.name}: stopped before anything was measured", err=True)
        raise click.exceptions.Exit(code)
    _show(tuned, as_json)
    if png is not None:
        from rpcmp.tools.tuning_report import write_png

        write_png(tuned, png)
    if code:
        raise click.exceptions.Exit(code)


async def _tune(
    config: Config,
    swept: Grid,
    connect: list[str] | None,
    rounds: int,
    steps: int | None,
    budget: float,
) -> tuple[Tuned | None, int]:
    from rpcmp.cli.progress_output import measuring
    from rpcmp.job.autobalance import balanced
    from rpcmp.job.segments import Segments
    from rpcmp.job.server_pool import forks_for
    from rpcmp.tools import tuning
    from rpcmp.tools.measurement import StoppedError, TimeLimits

    async with forks_for(config, connect) as forks:  # what it leaves open is not tuned
        config, _ = await balanced(config, connect, forks)
    segments = Segments(tuning.plain_training(config), connect, swept.settings)
    measure, tuned = functools.partial(tuning.measure, segments), None
    with measuring(config.name) as now:
        try:
            limits = TimeLimits(budget, now.stop)
            what = f"{STARTING}, then measuring {len(swept.settings)} settings within the budget"
            now.progress(what, limits.left)
            await limits.run(segments.start(), is_needed=True)
            sweep = tuning.Sweep(swept, measure, rounds, steps, now.progress, limits)
            tuned = await sweep.run(config)
        except StoppedError:
            pass
        finally:
            await segments.close()
    return tuned, now.exit_code


def _show(tuned: Tuned, as_json: bool) -> None:
    from rpcmp.cli.console import print_wide
    from rpcmp.tools import tuning_report

    if as_json:
        echo(json.dumps(tuning_report.as_json(tuned)))
        return
    print_wide(tuning_report.table(tuned), WIDTH)
    for line in tuning_report.lines(tuned):
        echo(line)


def _values(option: str, text: str | None) -> list[str] | None:
    if text is None:
        return None
    values = [part.strip() for part in text.split(",") if part.strip()]
    if not values:
        raise ConfigError(f"{option} {text!r}: give at least one value, or leave it out")
    return values


def _numbers(option: str, text: str | None) -> list[int] | None:
    values = _values(option, text)
    return None if values is None else [_number(option, value) for value in values]


def _limits(text: str | None) -> list[int | None] | None:
    option = "--max-in-flight"
    values = _values(option, text)
    if values is None:
        return None
    return [None if value == DEFAULT else _number(option, value) for value in values]


def _number(option: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{option}: {value!r} is not a positive whole number")
    return int(value)
