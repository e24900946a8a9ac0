"""`rpcmp doctor` with real servers, with and without problems."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rpcmp.cli.console import Console
from rpcmp.cli.doctor import print_by_place
from rpcmp.net import authority, identity
from rpcmp.server.client import StageClient
from rpcmp.tools import diagnosis
from rpcmp.tools.diagnosis import Finding, Status
from tests.support.findings import failed
from tests.support.lan import cli
from tests.support.processes import (
    NO_NETWORKS,
    JobFolder,
    Result,
    Server,
    connect,
    makes_networks,
    rpcmp,
    running,
    running_server,
)
from tests.support.sharedforks import DRIVE

MODEL = '[model]\nlayers = "zoo:mlp"\nbalance = [2, 2]\n'

SLEEPING = """
[model]
layers = "zoo:lopsided"
kwargs = { milliseconds = 50 }
balance = [5]
"""

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Cluster:
    """Two stage servers and a spare, which accept only peers with certificates.

    The first is in a network of its own; the others share the drivers' network.
    """

    certs: Path
    stages: list[Server]
    spare: str

    @property
    def options(self) -> tuple[str | Path, ...]:
        """Options that connect a driver to the servers."""
        return ("--connect", connect(self.stages), "--certs", self.certs / "driver")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    certs = tmp_path_factory.mktemp("certs")
    cli(certs, "init")
    authority.issue(certs, "driver", identity.DRIVER, [], days=5)
    authority.issue(certs, "spare", identity.SPARE, [HOST], days=90)
    for index in range(2):
        authority.issue(certs, f"stage{index}", identity.stage(index), [HOST], days=90)
    with contextlib.ExitStack() as started:

        def serve(name: str, *options: str, owner: str = DRIVE) -> Server:
            place = ("--listen", f"{HOST}:0", "--certs", certs / name)
            return started.enter_context(running_server(*options, *place, owner=owner))

        # The second as the guide has it, for Prometheus on another machine.
        metrics = ("--metrics", "0.0.0.0:0")
        stages = [serve("stage0", "--stage", "0", owner="stage 0")]
        stages += [serve("stage1", "--stage", "1", *metrics)]
        yield Cluster(certs, stages, serve("spare", "--spare").address)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure links only briefly, and give up absent servers soon."""
    monkeypatch.setattr(diagnosis, "PROBE_SECONDS", 0.01)
    monkeypatch.setattr(StageClient.connect, "__defaults__", (2.0,))


def doctor(config: Path, *options: str | Path) -> tuple[Result, list[dict[str, Any]]]:
    """Run the command; returns its result and its findings."""
    result = rpcmp("doctor", config, "--json", *options)
    report = json.loads(result.out)
    assert report["exit_code"] == result.code
    found: list[dict[str, Any]] = report["findings"]
    return result, found


def test_a_job_that_starts_its_own_servers_is_in_order(job: JobFolder) -> None:
    result = rpcmp("doctor", job.config(MODEL))
    assert (result.code, result.err) == (0, "")
    lines = [line.rstrip() for line in result.out.splitlines()]
    warnings = 0 if makes_networks() else 3
    assert lines[-1] == f"0 failed, {warnings} warnings, {len(lines) - 2} checks"
    assert any(line.split()[:3] == ["stage1", "software", "ok"] for line in lines)
    assert sum(line.endswith("within one network") for line in lines) == 3


def test_findings_fit_a_narrow_terminal() -> None:
    findings = [
        Finding("driver", "software", Status.OK, "rpcmp 0.1.0, torch 2.13.0+cpu, numpy 2.4.6"),
        Finding("driver", "code", Status.FAILED, "word " * 20),
        Finding("driver - stage0", "link", Status.WARNING, "slow"),
    ]
    output = io.StringIO()
    print_by_place(Console(file=output, force_terminal=True, color_system=None, width=80), findings)
    line, rest = (" ".join(["word"] * count) for count in (12, 8))
    assert [line.rstrip() for line in output.getvalue().splitlines()] == [
        "driver",
        "  software  ok       rpcmp 0.1.0, torch 2.13.0+cpu, numpy 2.4.6",
        f"  code      failed   {line}",
        f"                     {rest}",
        "driver - stage0",
        "  link      warning  slow",
    ]


def test_doctor_checks_servers_with_certificates_and_their_links(
    job: JobFolder, cluster: Cluster
) -> None:
    config = job.config(
        f'{MODEL}\n[checkpoint]\ndir = "kept"\nshared = true\n'
        f'[recovery]\nspares = ["{cluster.spare}"]\n'
    )
    result, found = doctor(config, *cluster.options)
    assert (result.code, result.err) == (0, "")
    assert not (job.folder / "kept").exists()
    doors = {one["where"]: one["text"] for one in found if one["check"] == "listeners"}
    alone = "alone, its figures at port" if makes_networks() else NO_NETWORKS
    assert alone in doors["stage1"]
    papers = {one["where"]: one for one in found if one["check"] == "certificate"}
    assert papers["stage1"]["text"].startswith(f"stage 1 at {HOST}, until ")
    assert papers[f"spare {cluster.spare}"]["text"].startswith("spare at")
    assert papers["driver"]["status"] == "warning"
    assert "(5 days): `rpcmp certs renew DIR`" in papers["driver"]["text"]
    links = {one["where"]: one["text"] for one in found if one["check"] == "link"}
    assert set(links) == {"driver - stage0", "driver - stage1", "stage0 - stage1"}
    measured = [name for name, text in links.items() if "MB/s there" in text]
    assert measured == (["driver - stage0", "stage0 - stage1"] if makes_networks() else [])
    assert links["driver - stage1"].endswith("within one network")


def test_doctor_reports_problems_of_a_job_by_host(job: JobFolder, cluster: Cluster) -> None:
    """All problems at once, each reported for its host alone."""
    (job.folder / "kept").write_text("a file in the way")
    (job.folder / "broken.py").write_text("raise SystemExit('I only run on Tuesdays')\n")
    text = f"""
loss = "torch.nn:MSELos"
{MODEL}
[metrics]
odd = "broken:metric"
[[stages]]
device = "cuda:0"
[[stages]]
threads = 1000
[checkpoint]
dir = "kept"
"""
    result, found = doctor(job.config(text), *cluster.options)
    assert result.code == 1
    assert failed(found) == [
        ("driver", "checkpoints"),
        ("stage0", "device"),
        ("stage0", "checkpoints"),
        ("stage1", "code"),
        ("stage1", "code"),
        ("stage1", "checkpoints"),
    ]
    texts = "\n".join(one["text"] for one in found)
    assert "loss = 'torch.nn:MSELos' does not import" in texts
    assert "I only run on Tuesdays" in texts
    assert "1000 of" in texts


def test_doctor_reports_peers_that_cannot_be_trusted(
    job: JobFolder, cluster: Cluster, tmp_path: Path
) -> None:
    """Stage 1's certificate has expired; stage 1's server runs at the address of stage 0."""
    old = tmp_path / "old"
    shutil.copytree(cluster.certs, old)
    begin = datetime.now(UTC) - timedelta(days=5)
    place = ("--stage", "1", "--listen", f"{HOST}:0", "--certs", old / "stage1")
    with running_server(*place) as expired:
        authority.issue(old, "stage1", identity.stage(1), [HOST], days=1, begin=begin)
        where = ("--connect", f"{cluster.stages[1].address},{expired.address}")
        result, found = doctor(job.config(MODEL), *where, "--certs", cluster.certs / "driver")
    assert result.code == 1
    assert failed(found) == [("stage0", "certificate"), ("stage1", "certificate")]
    texts = {one["where"]: one["text"] for one in found if one["check"] == "certificate"}
    assert "has a certificate for stage 1, not for stage 0" in texts["stage0"]
    assert "certificate has expired" in texts["stage1"]


def test_servers_that_are_away_or_busy_may_come_back(job: JobFolder, cluster: Cluster) -> None:
    slow = job.config(f"steps = 1000000\n{SLEEPING}", "slow.toml")
    busy, certs = cluster.stages[0].address, ("--certs", cluster.certs / "driver")
    with running("drive", slow, "--json", "--connect", busy, *certs) as run:
        run.wait_for_line('"step": 1,')
        with socket.create_server((HOST, 0)) as closed:
            away = f"{HOST}:{closed.getsockname()[1]}"
        result, found = doctor(job.config(MODEL), "--connect", f"{busy},{away}", *certs)
        assert result.code == 75
        assert failed(found) == [("stage0", "free"), ("stage1", "reach")]
        assert run.process.poll() is None
