"""`rpcmp plan` as a command, with real servers: what it prints, writes and refuses."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rpcmp.cli.plan import _expanded
from rpcmp.config.loader import load_config
from rpcmp.errors import ConfigError
from rpcmp.job.segments import rehearse
from rpcmp.pipelining.calibration import MeasuredSteps
from rpcmp.tools import plan_rehearsals
from tests.support.alone import committed_alone
from tests.support.faults import committed
from tests.support.planning import shorten_rehearsals
from tests.support.processes import (
    JobFolder,
    Server,
    connect,
    rpcmp,
    running_server,
    running_servers,
)

LAYERS = """
    steps = 3
    [model]  # of five layers
    layers = "zoo:lopsided"
    kwargs = { milliseconds = 2 }
    num_stages = 2
"""

NOWHERE = "127.0.0.1:1"
"""An address at which nothing listens."""


@pytest.fixture(scope="module")
def spares() -> Iterator[list[Server]]:
    """Three running servers that take any stage."""
    with contextlib.ExitStack() as stack:
        options = ("--spare", "--listen", "127.0.0.1:0")
        yield [
            stack.enter_context(running_server(*options, owner=f"stage {index}"))
            for index in range(3)
        ]


def test_a_planned_run_has_the_bits_of_any_other(
    job: JobFolder, spares: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One plan is rehearsed for all; tests/unit/tools/test_plan_rehearsals.py has how many are."""
    shorten_rehearsals(monkeypatch)
    monkeypatch.setattr(plan_rehearsals, "MOST_REHEARSALS", 1)
    monkeypatch.setattr(plan_rehearsals, "MOST_AGAIN", 0)
    rehearsed = list[MeasuredSteps]()

    async def noted(*arguments: Any) -> MeasuredSteps:
        rehearsed.append(await rehearse(*arguments))
        return rehearsed[-1]

    monkeypatch.setattr(plan_rehearsals, "rehearse", noted)
    config, path = job.config(LAYERS), job.folder / "planned.toml"
    first, second, third = (server.address for server in spares)
    forced = ("--use", first, "--use", second, "--memory", f"{first}=1GiB")
    result = rpcmp("plan", config, "--connect", connect(spares), *forced, "-o", path, "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    best = report["plans"][0]
    assert {first, second} <= {stage["address"] for stage in best["stages"]}
    assert [len(steps.busy) > 1 and steps.step_s > 0 for steps in rehearsed] == [True]
    assert {one["from"] for one in report["links"]} == {first, second, third}
    assert all(link["bytes_per_s"] > 0 < link["latency_s"] for link in report["links"])
    for stage in best["stages"]:
        assert 0 < stage["memory_bytes"] < stage["limit_bytes"]
        assert stage["address"] != first or stage["limit_bytes"] == 2**30
    assert [loss["address"] for loss in best["losses"]] == [s["address"] for s in best["stages"]]

    planned = load_config(path)
    assert "# of five layers" in path.read_text()
    assert planned.addresses == [stage["address"] for stage in best["stages"]]
    assert planned.recovery.spares == best["spares"]
    assert planned.model is not None
    assert planned.model.balance == best["balance"]
    assert planned.name == "job"
    run = rpcmp("drive", path, "--json", "--fresh")
    assert committed(run) == committed_alone(
        config, f"model.num_stages={len(best['balance'])}", f"model.balance={best['balance']}"
    )


def test_the_plans_are_shown_as_tables(
    job: JobFolder, spares: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_rehearsals, "REHEARSING_SECONDS", -1.0)
    addresses = [server.address for server in spares[:2]]
    result = rpcmp("plan", job.config(LAYERS), "--connect", ",".join(addresses))
    assert result.code == 0, result.err
    assert result.out.startswith("plan 1: ")
    assert "plan 2: " in result.out
    assert all(address in result.out for address in addresses)
    assert "only predicted: those that were took" in result.out
    assert "are on one machine: each was measured while the others were idle" in result.out


def test_servers_that_cannot_be_planned_are_refused(job: JobFolder, spares: list[Server]) -> None:
    config, first = job.config(LAYERS), spares[0].address
    too_much = rpcmp("plan", config, "--connect", first, "--memory", f"{first}=900TiB")
    assert too_much.code == 2
    assert "by --memory or CONFIG, but its host has" in too_much.err
    too_small = rpcmp("plan", config, "--connect", first, "--memory", f"{first}=1MiB")
    assert too_small.code == 2
    assert "no plan fits into the memory of 1 hosts: each would need" in too_small.err
    away = rpcmp("plan", config, "--connect", f"{first},{NOWHERE}")
    assert away.code == 75
    assert NOWHERE in away.err
    assert away.err.endswith("try: rpcmp serve --help\n")  # doctor is for the config's servers
    with running_servers(1) as fixed:
        bound = rpcmp("plan", config, "--connect", f"{first},{connect(fixed)}")
    assert bound.code == 2
    assert f"{connect(fixed)} serves stage 0 and no other: start it with --spare" in bound.err


def test_a_plan_is_not_run_at_other_servers(job: JobFolder) -> None:
    planned = job.config(
        f'planned_for = ["{NOWHERE}"]\n[model]\nlayers = "zoo:mlp"\n'
        f'[[stages]]\naddresses = ["{NOWHERE}"]\n'
    )
    result = rpcmp("drive", planned, "--connect", "127.0.0.1:2")
    assert result.code == 2
    assert f"planned for {NOWHERE}, and 127.0.0.1:2 is none of them" in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "plan needs running servers"),
        (("--connect", "host-a"), "'host-a' is not HOST:PORT"),
        (("--connect", "a:1*0"), "write HOST:PORT*N for N servers"),
        (("--connect", "a:1,a:1"), "a:1 is given twice"),
        (("--connect", "host-a:1", "--use", "hots-a:1"), "did you mean 'host-a:1'"),
        (("--connect", "a:1", "--memory", "4GiB"), "write HOST:PORT=SIZE"),
        (("--connect", "a:1", "--memory", "a:1=4"), "'4' is not a size"),
        (("--connect", "a:1,b:1", "--link-budget", "a:1=1MB"), "write two servers and a size"),
        (("--connect", "a:1", "-o", "/elsewhere.toml"), "a job's files are looked for beside"),
        (("--connect", "a:1"), "a:1 is not a loopback address"),
    ],
)
def test_what_is_asked_for_wrongly_is_refused_before_anything_is_measured(
    job: JobFolder, options: tuple[str, ...], message: str
) -> None:
    result = rpcmp("plan", job.config(LAYERS), *options)
    assert result.code == 2
    assert message in result.err, result.err


def test_a_config_is_not_overwritten_by_its_plan(job: JobFolder) -> None:
    config = job.config(LAYERS)
    before = config.read_bytes()
    result = rpcmp("plan", config, "--connect", NOWHERE, "-o", config)
    assert result.code == 2
    assert "is CONFIG itself" in result.err
    assert config.read_bytes() == before


def test_one_server_by_two_names_is_refused(job: JobFolder, spares: list[Server]) -> None:
    port = spares[0].address.rpartition(":")[2]
    twice = f"{connect(spares)},localhost:{port}"
    result = rpcmp("plan", job.config(LAYERS), "--connect", twice)
    assert result.code == 2
    assert f"{spares[0].address} and localhost:{port} are the same server" in result.err


def test_a_host_of_several_servers_has_consecutive_ports() -> None:
    assert list(_expanded("a:50051*3")) == ["a:50051", "a:50052", "a:50053"]
    assert list(_expanded("[::1]:7")) == ["[::1]:7"]
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        list(_expanded("a*3"))


def test_a_config_that_is_not_written_leaves_no_file(job: JobFolder) -> None:
    path: Path = job.folder / "planned.toml"
    result = rpcmp("plan", job.config(LAYERS), "--connect", NOWHERE, "-o", path)
    assert result.code == 75
    assert not path.exists()


CLUSTER = """
    stages = [4, 8]
    [work]
    forward_ms = 10.0
    backward_ms = 20.0
    state = "100 GB"
"""


def test_a_cluster_is_simulated_without_servers(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    shown = rpcmp("plan", path, "--simulate")
    assert shown.code == 0, shown.err
    heads, *lines = shown.out.splitlines()
    assert heads.split()[:4] == ["stages", "s", "a", "step"]
    assert [line.split()[0] for line in lines] == ["4", "8", "4", "8"]
    assert lines[2].startswith("4 stages: copies of 93.1 GiB after each step take")
    report = json.loads(rpcmp("plan", path, "--simulate", "--json").out)
    assert [each["stages"] for each in report] == [4, 8]


def test_a_simulation_takes_no_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    monkeypatch.setenv("RPCMP_CERTS", str(tmp_path))
    assert rpcmp("plan", path, "--simulate").code == 0
    path.write_text(CLUSTER.replace("forward_ms", "forwards_ms"))
    refused = rpcmp("plan", path, "--simulate", "--connect", NOWHERE)
    assert (refused.code, refused.out) == (2, "")
    assert "--simulate goes with no other option" in refused.err
    misspelt = rpcmp("plan", path, "--simulate")
    assert misspelt.code == 2
    assert "did you mean 'forward_ms'?" in misspelt.err
