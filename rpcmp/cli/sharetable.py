"""What `rpcmp trace` shows: a table for people, an object for programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.table import Table

from rpcmp.cli.console import Console
from rpcmp.cli.table import WIDTH
from rpcmp.observability.trace.analysis import Bottleneck, Shares
from rpcmp.observability.trace.critical_path import Loss
from rpcmp.observability.trace.spans import Kind, Window

HEADS = {kind: f"{kind} %" for kind in Kind} | {Kind.OPTIMIZER: "optimizer %"}


def share_table(shares: Iterable[Shares]) -> None:
    """Print a row a stage, in per cent of its time."""
    table = Table("stage", "host", box=None, header_style="bold")
    for head in (*HEADS.values(), *(f"{loss} %" for loss in Loss)):
        table.add_column(head, justify="right")
    for stage in shares:
        values = (*(stage.busy[kind] for kind in HEADS), *(stage.lost[loss] for loss in Loss))
        table.add_row(stage.stage, stage.host, *(f"{100 * value:.1f}" for value in values))
    Console(width=max(Console().width, WIDTH)).print(table)


def share_object(
    window: Window, shares: Iterable[Shares], bottleneck: Bottleneck
) -> dict[str, Any]:
    """The same and more as JSON has it; shares are between 0 and 1."""
    stages = [
        {
            "stage": stage.stage,
            "host": stage.host,
            **{kind.name.lower(): share for kind, share in stage.busy.items()},
            **{loss.value: share for loss, share in stage.lost.items()},
        }
        for stage in shares
    ]
    steps = [window.steps[0], window.steps[-1]]
    return {
        "steps": steps,
        "step_s": window.step_s,
        "stages": stages,
        "bottleneck": asdict(bottleneck),
    }
