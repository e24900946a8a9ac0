"""A driver and three stages on four hosts: mutual TLS on all that crosses the network."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rpcmp.examples import digits
from tests.support.lan import Host, driving, issue, lan, listening, serving
from tests.support.processes import JobFolder, Result, Server, poll_for, rpcmp, running
from tests.support.scraping import url_of
from tests.support.strikes import troubled

EXAMPLE = Path(digits.__file__).with_suffix(".toml")

PORT = 50051


@dataclass(frozen=True)
class Cluster:
    """Running stage servers on hosts.

    Attributes:
        driver: the host that drives.
        hosts: the ones that serve.
        servers: the processes on them.
        certs: of all hosts.
    """

    driver: Host
    hosts: list[Host]
    servers: list[Server]
    certs: Path

    @property
    def connect(self) -> tuple[str, ...]:
        """Options that connect `rpcmp drive` to the servers."""
        where = ",".join(server.address for server in self.servers)
        return ("--connect", where, "--set", "model.num_stages=3")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("lan")
    with lan(4, folder) as (driver, *hosts), contextlib.ExitStack() as started:
        certs = issue(folder / "certs", *(host.address for host in hosts))
        servers = [
            started.enter_context(serving(index, f"{host.address}:{PORT}", certs, host.inside))
            for index, host in enumerate(hosts)
        ]
        yield Cluster(driver, hosts, servers, certs)


@pytest.fixture(scope="module")
def parameters() -> str:
    """The hash after thirty steps of digits on one machine."""
    result = rpcmp("drive", EXAMPLE, "--json", "--set", "model.num_stages=3", "--steps", "30")
    return str(result.event("summary")["parameters_sha256"])


def test_verify_finds_the_bits_of_one_process(cluster: Cluster) -> None:
    options = ("--steps", "3", "--certs", str(cluster.certs / "driver"), *cluster.connect)
    with running("verify", EXAMPLE, *options, under=cluster.driver.inside) as run:
        result = run.wait()
    assert result.code == 0, result.err
    assert "identical" in result.out


def test_doctor_measures_every_link_and_names_the_missing_one(cluster: Cluster) -> None:
    """Stage 0's cable is slow; all stages answer the driver, but stage 1 does not find stage 2."""
    slow, lost, hidden = cluster.hosts
    options = ("--json", "--certs", str(cluster.certs / "driver"), *cluster.connect)
    assert lost.run("ip", "route", "add", "prohibit", hidden.address).returncode == 0
    try:
        with (
            slow.limited("40mbit"),
            running("doctor", EXAMPLE, *options, under=cluster.driver.inside) as run,
        ):
            result = run.wait()
    finally:
        assert lost.run("ip", "route", "del", "prohibit", hidden.address).returncode == 0
    assert result.code == 75
    failed = {where for where, status in links(result).items() if status == "failed"}
    assert failed == {"stage1 - stage2"}
    # MB/s: about 40 Mbit/s, compared with some hundreds.
    assert all(rate < 10 for rate in rates(result, "driver - stage0"))
    assert all(rate > 10 for rate in rates(result, "driver - stage2"))


def links(result: Result) -> dict[str, str]:
    """Return the status of each link."""
    found = json.loads(result.out)["findings"]
    return {one["where"]: one["status"] for one in found if one["check"] == "link"}


def rates(result: Result, where: str) -> list[float]:
    """Return a link's MB/s there and back."""
    found = json.loads(result.out)["findings"]
    (text,) = [one["text"] for one in found if one["where"] == where]
    return [float(rate) for rate in re.findall(r"(\d+) MB/s", text)]


IDLING = """
steps = 100000
[model]
layers = "zoo:jittery"
kwargs = { milliseconds = 20.0 }
balance = [2, 2, 1]
"""
"""A job that leaves the processor to its observers."""


def test_only_the_one_port_of_each_server_answers(cluster: Cluster, job: JobFolder) -> None:
    """While a job runs. The driver needs no port except for its metrics."""
    options = ("--metrics", "127.0.0.1:0", *cluster.connect[:2])
    with driving(job.config(IDLING), cluster.certs, *options, on=cluster.driver) as run:
        run.wait_for_line('"step": 5,')
        url = url_of(run)
        figures = ("127.0.0.1", int(re.findall(r":(\d+)/", url)[0]))
        for host in (cluster.driver, *cluster.hosts):
            expected = figures if host is cluster.driver else (host.address, PORT)
            assert listening(host) == {expected}
        poll_for(lambda: carried(cluster.driver, url) >= LINKS, "all links to have carried bytes")
        prober, target = cluster.hosts[0], cluster.hosts[1].address
        assert answering(prober, target) == [PORT]
        assert answering(prober, cluster.driver.address) == []


LINKS = {("stage0", "stage1"), ("stage2", "stage1"), ("driver", "stage2"), ("stage0", "driver")}
"""Some of the links of a pipeline of three stages."""

SCRAPE = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())"


def carried(host: Host, url: str) -> set[tuple[str, str]]:
    """Return the links that carried bytes, if their round trip is known."""
    text = host.run("python3", "-c", SCRAPE, url).stdout
    found = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def positive(name: str) -> set[tuple[str, str]]:
        of_name = (sample for sample in found if sample.name == name and sample.value > 0)
        return {(sample.labels["source"], sample.labels["target"]) for sample in of_name}

    return positive("rpcmp_link_bytes_total") & positive("rpcmp_link_round_trip_seconds")


PROBE = """
import socket, sys
for port in range(1, 65536):
    with socket.socket() as probe:
        if probe.connect_ex((sys.argv[1], port)) == 0:
            print(port)
"""


def answering(prober: Host, address: str) -> list[int]:
    """Return all ports of an address that answer."""
    return [int(port) for port in prober.run("python3", "-c", PROBE, address).stdout.split()]


def test_a_link_cut_and_restored_changes_no_bit(cluster: Cluster, parameters: str) -> None:
    options = ("--steps", "30", *cluster.connect)
    with driving(EXAMPLE, cluster.certs, *options, on=cluster.driver) as run:
        run.wait_for_line('"step": 8,')
        cluster.hosts[1].unplug()
        try:
            run.wait_for_line('"fault"')
            run.wait_for_line('"waiting"')
        finally:
            cluster.hosts[1].plug()
        result = run.wait()
    assert result.event("recovered")["generation"] >= 2
    assert result.event("summary")["parameters_sha256"] == parameters


@pytest.mark.parametrize("how", ["cut one way", "resets", "lossy"])
def test_a_troubled_link_changes_no_bit(cluster: Cluster, parameters: str, how: str) -> None:
    """One that loses some packets is not lost: the run does not restart."""
    options = ("--steps", "30", *cluster.connect)
    with driving(EXAMPLE, cluster.certs, *options, on=cluster.driver) as run:
        run.wait_for_line('"step": 8,')
        with troubled(how, cluster.hosts[1]):
            run.wait_for_line('"step": 20,' if how == "lossy" else '"fault"')
        result = run.wait()
    assert result.event("summary")["parameters_sha256"] == parameters
    assert ([e["event"] for e in result.events].count("fault") == 0) is (how == "lossy")


@pytest.mark.long
def test_a_slow_link_changes_no_bit(cluster: Cluster, parameters: str) -> None:
    with contextlib.ExitStack() as limits:
        for host in (cluster.driver, *cluster.hosts):
            limits.enter_context(host.limited("1gbit"))
        result = finished(cluster, "--steps", "30")
    assert result["parameters_sha256"] == parameters


@pytest.mark.long
def test_stages_share_a_host_beside_others_elsewhere(tmp_path: Path) -> None:
    """Stages 0 and 2 on one host, stage 1 and the driver on another."""
    with lan(2, tmp_path) as (one, other), contextlib.ExitStack() as started:
        places = [one, other, one]
        certs = issue(tmp_path / "certs", *(host.address for host in places))
        servers = [
            started.enter_context(serving(i, f"{host.address}:{PORT + i}", certs, host.inside))
            for i, host in enumerate(places)
        ]
        cluster = Cluster(other, places, servers, certs)
        options = ("--steps", "3", "--certs", str(certs / "driver"), *cluster.connect)
        with running("verify", EXAMPLE, *options, under=other.inside) as run:
            result = run.wait()
    assert result.code == 0, result.err


def finished(cluster: Cluster, *options: str) -> dict[str, object]:
    with driving(EXAMPLE, cluster.certs, *options, *cluster.connect, on=cluster.driver) as run:
        result = run.wait()
    assert result.code == 0, result.err
    return result.event("summary")
