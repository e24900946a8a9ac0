"""`rpcmp trace`: where the time of a run went."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rpcmp.cli.options import require_writable
from rpcmp.cli.terminal import echo
from rpcmp.errors import ConfigError

if TYPE_CHECKING:
    from rpcmp.observability.trace.analysis import Bottleneck, Shares
    from rpcmp.observability.trace.spans import Window


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--png",
    metavar="OUT",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the pipeline diagram; of the last two complete steps without --steps.",
)
@click.option(
    "--steps",
    metavar="A:B",
    help="Look at steps A to B, both included; either may be left out. [default: all but the "
    "first]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def trace(file: Path, png: Path | None, steps: str | None, as_json: bool) -> None:
    """Show where the time of the run that wrote FILE went.

    FILE is what `rpcmp drive --trace FILE` wrote; Perfetto (https://ui.perfetto.dev) shows it too.
    Of each stage's time: what it computed, and why it idled. A bubble is time in which nothing
    could be done at the stage, network time is waiting for what was on its way, overhead is all
    that passes before the stage begins what it could.

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
    found = chrome.read(file, first, last)
    seen = spans.choose_window(found, first, last)
    shares = measure(found, seen)
    _show(seen, shares, bottleneck(found, seen, shares), as_json)
    if png is not None:
        plot.write_png(found, seen if steps else spans.last_complete(found), png)


def _parse(steps: str | None) -> tuple[int | None, int | None]:
    """First and last step of "A:B", "A:", ":B" or "A"."""
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


def _show(
    window: Window, shares: tuple[Shares, ...], bottleneck: Bottleneck, as_json: bool
) -> None:
    # Imported late: `rpcmp --help` needs no rich.
    from rpcmp.cli.sharetable import share_object, share_table

    if as_json:
        echo(json.dumps(share_object(window, shares, bottleneck)))
        return
    echo(f"{window}, {window.step_s * 1e3:,.1f} ms each")
    share_table(shares)
    echo(bottleneck)
