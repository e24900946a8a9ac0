"""`rpcmp bench`: step time in comparison with other implementations."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from rpcmp.cli import completion, echo
from rpcmp.cli.options import budget_option, set_option

if TYPE_CHECKING:
    from rich.table import Table

    from rpcmp.tools.bench.benchmark import BenchmarkResult, ContestantTimes
    from rpcmp.tools.bench.cases import Case
    from rpcmp.tools.bench.contestants import Contestant
    from rpcmp.tools.measurement import Estimate

WIDTH = 140
"""Characters that a row of the table may take."""


@click.command()
@click.argument(
    "names", metavar="CASE...", nargs=-1, required=True, shell_complete=completion.cases
)
@click.option("--stages", type=click.IntRange(min=1), help="Number of stages.")
@click.option("--microbatches", type=click.IntRange(min=1), help="Micro-batches per step.")
@click.option(
    "--pairs",
    type=click.IntRange(min=1),
    default=9,
    show_default=True,
    help="Rounds, in each of which every contestant is measured once.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    show_default="as many as take 2 s, at least 5",
    help="Steps per round.",
)
@budget_option
@click.option("--peers", metavar="NAME,...", help="Compare with these peers only.")
@set_option("a key of the case's job, such as schedule=1f1b")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per case.")
def bench(
    names: tuple[str, ...],
    stages: int | None,
    microbatches: int | None,
    pairs: int,
    steps: int | None,
    budget: float,
    peers: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Compare the step time of CASE with peers.

    CASE is sleep, overhead, transformer, activations, or your own config.toml. Trains the same job
    with rpcmp, with torch.distributed.pipelining and in one process, in turns, and prints how long
    a step takes, how the times compare, how short a step could be at best, and the CPU time of all
    processes of each. Nine pairs are the fewest whose 95 % interval leaves out the extremes, five
    the fewest with any significance. Each CASE has its own budget, which includes the start, and
    gets as many pairs as fit, at least one. A Ctrl-C shows the results so far. All contestants stay
    in memory; keep the machine quiet: a note says if it was not.

    \b
    Example:
      rpcmp bench sleep --stages 8 --microbatches 16 --json
    """
    from rpcmp.cli.console import print_wide
    from rpcmp.tools.bench import cases
    from rpcmp.tools.bench.contestants import contestants

    chosen = None if peers is None else [name.strip() for name in peers.split(",") if name.strip()]
    loaded = [cases.load(name, stages, microbatches, overrides) for name in names]
    prepared = [(case, contestants(case, chosen)) for case in loaded]
    for case, participants in prepared:
        result, code = asyncio.run(_measure(case, participants, pairs, steps, budget))
        if result is None:
            echo(f"{case.name}: stopped before anything was measured", err=True)
        elif as_json:
            echo(json.dumps(result.as_json()))
        else:
            print_wide(table(result), WIDTH)
            for line in _lines(result):
                echo(line)
        if code:
            raise click.exceptions.Exit(code)


async def _measure(
    case: Case, contestants: Sequence[Contestant], pairs: int, steps: int | None, budget: float
) -> tuple[BenchmarkResult | None, int]:
    from rpcmp.cli.progress_output import measuring
    from rpcmp.tools.bench.benchmark import benchmark
    from rpcmp.tools.measurement import StoppedError, TimeLimits

    with measuring(case.name) as now:
        try:
            limits = TimeLimits(budget, now.stop)
            result = await benchmark(case, contestants, pairs, steps, now.progress, limits)
        except StoppedError:
            return None, now.exit_code
    return result, now.exit_code


def table(result: BenchmarkResult) -> Table:
    """Return a table with a row per contestant and one for the bound."""
    from rpcmp.cli import console

    title = (
        f"{result.case.name}: {result.case.config.num_stages} stages, "
        f"{result.case.config.num_microbatches} micro-batches, "
        f"{result.pairs} interleaved pair{'s' * (result.pairs > 1)} of "
        f"{result.steps} step{'s' * (result.steps > 1)}"
    )
    ratios = result.ratios
    rows = [(*_times(result.ours), "", "")]
    rows += [(*_times(one), *_ratio(ratios[one.name])) for one in result.peers]
    if result.bound_s:
        bound = f"{result.bound_s * 1e3:.1f}"
        rows.append(("bound", "", bound, "", "", *_ratio(ratios["bound"])))
    heads = (
        *("contestant", "settings", "ms a step", "quartiles", "CPU ms a step"),
        *("ours / it", "interval"),
    )
    made = console.table(heads, rows)
    made.title, made.title_justify = title, "left"
    return made


def _times(one: ContestantTimes) -> tuple[str, ...]:
    from rpcmp.tools.measurement import spread

    times = spread(one.seconds)
    return (
        one.name,
        ", ".join(f"{key} {value}" for key, value in one.settings.items()),
        f"{times.median * 1e3:.1f}",
        f"{times.lower_quartile * 1e3:.1f} to {times.upper_quartile * 1e3:.1f}",
        f"{spread(one.cpu_seconds).median * 1e3:.1f}",
    )


def _ratio(ratio: Estimate) -> tuple[str, str]:
    interval = f"{ratio.low:.3f} to {ratio.high:.3f} ({ratio.confidence:.0%})"
    return f"{ratio.median:.3f}", interval


def _lines(result: BenchmarkResult) -> Iterator[str]:
    if (seconds := result.driver_cpu_s) is not None:
        per_microbatch = seconds / result.case.config.num_microbatches
        yield f"driver: {per_microbatch * 1e3:.2f} ms of CPU a micro-batch"
    yield from (f"note: {note}" for note in result.notes)
