"""The table of `rpcmp doctor`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from rpcmp.cli.console import Console
from rpcmp.tools.doctor.diagnosis import Finding, Status

WIDTH = 250
"""Characters of a line that nobody looks at on a terminal."""

STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "bold red"}


def finding_table(findings: Sequence[Finding]) -> None:
    """Print a row a finding, and how many are not as they should be."""
    console = Console()
    if not console.is_terminal:  # a row a line, for grep
        console = Console(width=WIDTH)
    table = Table("where", "check", "", "found", box=None, header_style="bold")
    before = ""
    for finding in findings:
        is_next = finding.where == before and console.is_terminal
        table.add_row(
            Text("" if is_next else finding.where),
            finding.check,
            Text(finding.status, STYLES[finding.status]),
            Text(finding.text, overflow="fold"),
        )
        before = finding.where
    console.print(table)
    failed, warned = (
        sum(finding.status is status for finding in findings)
        for status in (Status.FAILED, Status.WARNING)
    )
    console.print(f"{failed} failed, {warned} warnings, {len(findings)} checks")
