"""`rpcmp bench`: step time in comparison with other implementations."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from rpcmp.cli import completion, echo
from rpcmp.cli.options import budget_option, set_option

if TYPE_CHECKING:
    from rpcmp.tools.bench.benchmark import BenchmarkResult
    from rpcmp.tools.bench.cases import Case
    from rpcmp.tools.bench.comparison import Contestant

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
    a step takes, how the times compare, and how short a step could be at best. Nine pairs are the
    fewest whose 95 % interval leaves out the extremes, five the fewest with any significance. Each
    CASE has its own budget, which includes the start, and gets as many pairs as fit, at least one.
    A Ctrl-C shows the results so far. All contestants stay in memory; keep the machine quiet.

    \b
    Example:
      rpcmp bench sleep --stages 8 --microbatches 16 --json
    """
    from rpcmp.cli.console import print_wide
    from rpcmp.tools.bench import benchmark, cases

    chosen = None if peers is None else [name.strip() for name in peers.split(",") if name.strip()]
    loaded = [cases.load(name, stages, microbatches, overrides) for name in names]
    prepared = [(case, benchmark.contestants(case, chosen)) for case in loaded]
    for case, contestants in prepared:
        result, code = asyncio.run(_measure(case, contestants, pairs, steps, budget))
        if result is None:
            echo(f"{case.name}: stopped before anything was measured", err=True)
        elif as_json:
            echo(json.dumps(benchmark.as_json(result)))
        else:
            print_wide(benchmark.table(result), WIDTH)
            for line in benchmark.lines(result):
                echo(line)
        if code:
            raise click.exceptions.Exit(code)


async def _measure(
    case: Case, contestants: Sequence[Contestant], pairs: int, steps: int | None, budget: float
) -> tuple[BenchmarkResult | None, int]:
    from rpcmp.cli.progress_bar import measuring
    from rpcmp.tools.bench.benchmark import benchmark
    from rpcmp.tools.bench.comparison import StoppedError, TimeLimits
    from rpcmp.tools.bench.statistics import fill_then_no_bubble

    with measuring(case.name) as now:
        try:
            result = await benchmark(
                *(case, contestants, pairs, steps, fill_then_no_bubble, now.progress),
                limits=TimeLimits(budget, now.stop),
            )
        except StoppedError:
            return None, now.exit_code
    return result, now.exit_code
