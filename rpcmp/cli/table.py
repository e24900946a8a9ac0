"""The table of `rpcmp status`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from rpcmp.cli.console import Console

COLUMNS = (
    *("stage", "address", "health", "job", "generation", "step", "parameters", "memory"),
    *("torch", "supervisor", "worker"),
)

WIDTH = 140
"""Characters that a row may take."""


def stage_table(stages: Iterable[dict[str, Any]]) -> None:
    """Print a row a stage."""
    table = Table(*COLUMNS, box=None, header_style="bold")
    for stage in stages:
        table.add_row(
            f"{stage['index']} {stage['name']}",
            stage["address"],
            stage["health"],
            stage["job"] or "-",
            _or_dash(stage["generation"]),
            _or_dash(stage["step"]),
            _or_dash(stage["parameters"]),
            f"{stage['memory'] / 2**20:,.0f} MiB" if stage["memory"] else "-",
            stage["torch"] or "-",
            str(stage["supervisor_pid"] or "-"),
            str(stage["worker_pid"] or "-"),
        )
    # Never narrower than the table: a terminal wraps lines more legibly than rich truncates cells.
    Console(width=max(Console().width, WIDTH)).print(table)


def _or_dash(number: int) -> str:
    return f"{number:,}" if number else "-"
