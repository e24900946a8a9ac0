"""`rpcmp plan` for hosts with a slow cable, and with a broken way; all have certificates."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.lan import hosts_of, lan
from tests.support.processes import JobFolder

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


def test_no_stage_goes_behind_a_slow_cable_and_a_broken_way_is_named(
    job: JobFolder, tmp_path: Path
) -> None:
    (job.folder / "wide.py").write_text(LAYERS)
    config, planned = job.config(WIDE), job.folder / "planned.toml"
    with (
        lan(4, tmp_path) as (driver, *hosts),
        hosts_of(driver, hosts, tmp_path, is_spare=True) as spares,
    ):
        first, second, slow = (server.address for server in spares.servers)
        options = (*spares.certs, "--connect", f"{slow},{first},{second}")
        with hosts[2].limited("40mbit"):
            result = spares.run("plan", config, *options, "-o", planned, "--json", timeout=120)
        assert result.code == 0, result.err
        report = json.loads(result.out)
        rates = {(one["from"], one["to"]): one["bytes_per_s"] for one in report["links"]}
        assert max(rates[first, slow], rates[slow, second]) < 1e7 < rates[first, second]
        best = report["plans"][0]
        assert {stage["address"] for stage in best["stages"]} == {first, second}
        assert best["spares"] == [slow]

        drive = spares.run("drive", planned, "--json", *spares.certs, timeout=120)
        assert drive.code == 0, drive.err
        assert len(drive.losses) == 2

        assert hosts[0].run("ip", "route", "add", "prohibit", hosts[1].address).returncode == 0
        broken = spares.run("plan", config, *options, timeout=120)
    assert broken.code == 75
    assert f"the link from {first} to {second} is down: " in broken.err
