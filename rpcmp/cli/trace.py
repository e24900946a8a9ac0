"""`rpcmp trace`: how a run spent its time."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rpcmp.cli import echo
from rpcmp.cli.options import require_writable
from rpcmp.errors import ConfigError

if TYPE_CHECKING:
    from rpcmp.observability.trace.analysis import Bottleneck, Shares
    from rpcmp.observability.trace.spans import Window

WIDTH = 140
"""Characters that a row may take."""


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--png",
    metavar="OUT",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the pipeline diagram of --steps, by default of the last two complete steps.",
)
@click.option(
    "--steps",
    metavar="A:B",
    help="Look at steps A to B, both included; either may be left out. [default: all but the "
    "first]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def trace(file: Path, png: Path | None, steps: str | None, as_json: bool) -> None:
    """Show how the run that wrote FILE spent its time.

    FILE is what `rpcmp drive --trace FILE` wrote; Perfetto (https://ui.perfetto.dev) shows it too.
    Lists for each stage what it computed, and why it idled. A bubble is time in which the stage had
    nothing to do. Network is time in which it waited for data in transit. Overhead is the rest:
    time before the stage started what it could do.

    \b
    Example:
      rpcmp trace run.json.gz --steps 10:12 --png pipeline.png
    """
    from rpcmp.observability.trace import chrome, plot, spans
    from rpcmp.observability.trace.analysis import bottleneck, measure

    first, last = _parse(steps)
    if png is not None:
        plot.require_matplotlib()
        require_writable(png)
    recorded = chrome.read(file, first, last)
    chosen = spans.choose_window(recorded, first, last)
    shares = measure(recorded, chosen)
    worst = bottleneck(recorded, chosen, shares)
    if as_json:
        echo(json.dumps(_object(chosen, shares, worst)))
    else:
        echo(f"{chosen}, {chosen.step_s * 1e3:,.1f} ms each")
        _print(shares)
        echo(worst)
    if png is not None:
        plot.write_png(recorded, chosen if steps else spans.last_complete(recorded), png)


def _parse(steps: str | None) -> tuple[int | None, int | None]:
    """Return the first and last step of "A:B", "A:", ":B" or "A"."""
    if steps is None:
        return None, None
    if not re.fullmatch(r"\d+|\d+:\d*|:\d+", steps):
        raise ConfigError(f"--steps {steps!r}: write A:B, such as 10:12, or A: or :B")
    first, colon, last = steps.partition(":")
    if not colon:
        last = first
    if first and last and int(first) > int(last):
        raise ConfigError(f"--steps {steps!r}: the first is after the last")
    return int(first) if first else None, int(last) if last else None


def _object(window: Window, shares: Sequence[Shares], bottleneck: Bottleneck) -> dict[str, Any]:
    stages = [
        {
            "stage": stage.stage,
            "host": stage.host,
            **{kind.name.lower(): share for kind, share in stage.busy.items()},
            **{loss.value: share for loss, share in stage.lost.items()},
        }
        for stage in shares
    ]
    return {
        "steps": [window.steps[0], window.steps[-1]],
        "step_s": window.step_s,
        "stages": stages,
        "bottleneck": asdict(bottleneck),
    }


def _print(shares: Sequence[Shares]) -> None:
    from rpcmp.cli.console import print_wide, table
    from rpcmp.observability.trace.critical_path import IdleReason
    from rpcmp.observability.trace.spans import Kind

    kinds = {kind: f"{kind} %" for kind in Kind} | {Kind.OPTIMIZER: "optimizer %"}
    heads = (*kinds.values(), *(f"{loss} %" for loss in IdleReason))
    rows = []
    for stage in shares:
        values = (*(stage.busy[kind] for kind in kinds), *(stage.lost[loss] for loss in IdleReason))
        rows.append((stage.stage, stage.host, *(f"{100 * value:.1f}" for value in values)))
    print_wide(table(("stage", "host", *heads), rows, right=heads), WIDTH)
