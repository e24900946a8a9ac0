"""`rpcmp doctor`: check everything that a run needs."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rpcmp.cli import echo
from rpcmp.cli.options import addresses_of, config_argument, connect_option
from rpcmp.config import loader

if TYPE_CHECKING:
    from rpcmp.cli.console import Console
    from rpcmp.tools.diagnosis import Finding


WIDTH = 250
"""Characters of a line when the output is not a terminal."""


@click.command()
@config_argument
@connect_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(config: Path, overrides: tuple[str, ...], connect: str | None, as_json: bool) -> None:
    """Check everything that a run of CONFIG needs.

    At each stage's host: whether it is reachable, certificate, clock, versions, the model's code,
    device, checkpoint folder, listening sockets. For each link that the model uses: latency and
    bandwidth. Exits 1 if something has to be fixed, and 75 if servers are only away or busy.

    \b
    Example:
      rpcmp doctor config.toml --connect host-a,host-b --certs certs/driver
    """
    from rpcmp.tools.diagnosis import check_up, exit_code

    job = loader.load_config(config, overrides)
    findings = asyncio.run(check_up(job, addresses_of(connect, job)))
    code = exit_code(findings)
    if as_json:
        echo(json.dumps({"findings": [asdict(one) for one in findings], "exit_code": code}))
    else:
        _print_findings(findings)
    if code:
        raise click.exceptions.Exit(code)


def _print_findings(findings: Sequence[Finding]) -> None:
    from rpcmp.cli.console import Console, table
    from rpcmp.tools.diagnosis import Status

    console = Console()
    if console.is_terminal:
        print_by_place(console, findings)
    else:  # one line per row, for grep
        console = Console(width=WIDTH)
        rows = [(one.where, one.check, str(one.status), one.text) for one in findings]
        console.print(table(("where", "check", "", "found"), rows))
    failed, warned = (
        sum(finding.status is status for finding in findings)
        for status in (Status.FAILED, Status.WARNING)
    )
    console.print(f"{failed} failed, {warned} warnings, {len(findings)} checks")


def print_by_place(console: Console, findings: Sequence[Finding]) -> None:
    """Print the findings of each place below its name, which leaves texts most of the width."""
    from rpcmp.cli.console import table
    from rpcmp.tools.diagnosis import Status

    styles = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "bold red"}
    width = max(len(finding.check) for finding in findings)
    for where, group in itertools.groupby(findings, lambda finding: finding.where):
        console.print(where, style="bold")
        rows = [
            (f"  {one.check:{width}}", (f"{one.status!s:7}", styles[one.status]), one.text)
            for one in group
        ]
        console.print(table(("", "", ""), rows, pad_edge=False))
