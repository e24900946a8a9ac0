"""`rpcmp plan` for hosts with a slow cable, and with a broken way; all have certificates."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.lan import Host, cli, issue, lan
from tests.support.processes import JobFolder, Server, running

WIDE = """
    steps = 2
    optimizer = { callable = "torch.optim:SGD", kwargs = { lr = 1e-9 } }
    [model]
    layers = "wide:layers"
"""

LAYERS = """
from torch import nn

from zoo import FEATURES, Sleeper

WIDTH = 100_000

def layers():
    return [
        ("first", lambda: nn.Linear(FEATURES, WIDTH)),
        *((f"sleeper{number}", lambda: Sleeper(40.0)) for number in range(4)),
        ("last", lambda: nn.Linear(WIDTH, 1)),
    ]
"""
"""A megabyte passes for each micro-batch, and the layers between leave the processor to others."""


@pytest.fixture
def spares(tmp_path: Path) -> Iterator[tuple[Host, list[Host], list[Server], Path]]:
    """A driver, and three hosts with servers that take any stage; the folder of certificates."""
    with lan(4, tmp_path) as (driver, *hosts), contextlib.ExitStack() as started:
        certs = issue(tmp_path / "certs", hosts[0].address)
        servers = []
        for host in hosts:
            cli(certs, "issue", "--spare", "--name", host.name, "--host", host.address)
            options = ("--spare", "--listen", f"{host.address}:50051")
            run = started.enter_context(
                running("serve", *options, "--certs", certs / host.name, under=host.inside)
            )
            servers.append(Server(run, run.wait_for_line(r"SERVING on (\S+)")[1]))
        yield driver, hosts, servers, certs


def test_no_stage_goes_behind_a_slow_cable_and_a_broken_way_is_named(
    job: JobFolder, spares: tuple[Host, list[Host], list[Server], Path]
) -> None:
    driver, hosts, servers, certs = spares
    (job.folder / "wide.py").write_text(LAYERS)
    config, planned = job.config(WIDE), job.folder / "planned.toml"
    first, second, slow = (server.address for server in servers)
    options = ("--certs", certs / "driver", "--connect", f"{slow},{first},{second}")
    with (
        hosts[2].limited("40mbit"),
        running("plan", config, *options, "-o", planned, "--json", under=driver.inside) as run,
    ):
        result = run.wait(120)
    assert result.code == 0, result.err
    report = json.loads(result.out)
    rates = {(one["from"], one["to"]): one["bytes_per_s"] for one in report["links"]}
    assert max(rates[first, slow], rates[slow, second]) < 1e7 < rates[first, second]
    best = report["plans"][0]
    assert {stage["address"] for stage in best["stages"]} == {first, second}
    assert best["spares"] == [slow]

    with running("drive", planned, "--json", *options[:2], under=driver.inside) as run:
        drive = run.wait(120)
    assert drive.code == 0, drive.err
    assert len(drive.losses) == 2

    assert hosts[0].run("ip", "route", "add", "prohibit", hosts[1].address).returncode == 0
    with running("plan", config, *options, under=driver.inside) as run:
        broken = run.wait(120)
    assert broken.code == 75
    assert f"the link from {first} to {second} is down: " in broken.err
