"""`rpcmp doctor`: what would go wrong in a run, before it begins."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path

import click

from rpcmp.cli.options import addresses_of, config_argument, connect_option
from rpcmp.cli.terminal import echo
from rpcmp.config import loader


@click.command()
@config_argument
@connect_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def doctor(config: Path, overrides: tuple[str, ...], connect: str | None, as_json: bool) -> None:
    """Look at everything that a run of CONFIG needs.

    At each stage's host: reachable, certificate, clock, versions, the model's code, device,
    checkpoint folder, listening sockets. Of each link that the model uses: latency, bandwidth.
    Exits 1 where something has to be mended, and 75 where servers are only away or busy.

    \b
    Example:
      rpcmp doctor config.toml --connect host-a,host-b --certs certs/driver
    """
    from rpcmp.cli.findingtable import finding_table
    from rpcmp.tools.doctor.checkup import check_up
    from rpcmp.tools.doctor.diagnosis import exit_code

    job = loader.load_config(config, overrides)
    findings = asyncio.run(check_up(job, addresses_of(connect, job)))
    code = exit_code(findings)
    if as_json:
        echo(json.dumps({"findings": [asdict(one) for one in findings], "exit_code": code}))
    else:
        finding_table(findings)
    if code:
        raise click.exceptions.Exit(code)
