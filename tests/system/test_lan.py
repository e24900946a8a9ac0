"""A driver and three stages on four hosts: mutual TLS on all that crosses the network."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rpcmp.examples import digits
from tests.support.lan import PORT, Host, Hosts, hosts_of, lan, listening
from tests.support.longjob import IDLING
from tests.support.processes import JobFolder, Result, Running, poll_for, rpcmp
from tests.support.scraping import url_of
from tests.support.strikes import troubled

EXAMPLE = Path(digits.__file__).with_suffix(".toml")

THREE = ("--set", "model.num_stages=3")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("lan")
    with lan(4, folder) as (driver, *hosts), hosts_of(driver, hosts, folder) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def parameters() -> str:
    """The hash after thirty steps of digits on one machine."""
    result = rpcmp("drive", EXAMPLE, "--json", *THREE, "--steps", "30")
    return str(result.event("summary")["parameters_sha256"])


def test_verify_finds_the_bits_of_one_process(cluster: Hosts) -> None:
    result = cluster.run("verify", EXAMPLE, "--steps", "3", *THREE, *cluster.connect)
    assert result.code == 0, result.err
    assert "identical" in result.out


def test_doctor_measures_every_link_and_names_the_missing_one(cluster: Hosts) -> None:
    """Stage 0's cable is slow; all stages answer the driver, but stage 1 does not find stage 2."""
    slow, lost, hidden = cluster.hosts
    assert lost.run("ip", "route", "add", "prohibit", hidden.address).returncode == 0
    try:
        with slow.limited("40mbit"):
            result = cluster.run("doctor", EXAMPLE, "--json", *THREE, *cluster.connect)
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


def test_only_the_one_port_of_each_server_answers(cluster: Hosts, job: JobFolder) -> None:
    """While a job runs. The driver needs no port except for its metrics."""
    options = ("--json", "--metrics", "127.0.0.1:0", *cluster.connect)
    with cluster.running(
        "drive", job.config(IDLING.replace("[3, 2]", "[2, 2, 1]")), *options
    ) as run:
        run.wait_for_line('"step": 5,')
        url = url_of(run)
        figures = ("127.0.0.1", int(re.findall(r":(\d+)/", url)[0]))
        assert listening(cluster.driver) == {figures}
        for stage, host in enumerate(cluster.hosts):
            assert listening(host) == {(host.address, PORT + stage)}
        poll_for(lambda: carried(cluster.driver, url) >= LINKS, "all links to have carried bytes")
        prober, target = cluster.hosts[0], cluster.hosts[1].address
        assert answering(prober, target) == [PORT + 1]
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


def thirty_steps(cluster: Hosts) -> contextlib.AbstractContextManager[Running]:
    """Start to train, see `parameters`."""
    return cluster.running("drive", EXAMPLE, "--json", "--steps", "30", *THREE, *cluster.connect)


def test_a_link_cut_and_restored_changes_no_bit(cluster: Hosts, parameters: str) -> None:
    with thirty_steps(cluster) as run:
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
def test_a_troubled_link_changes_no_bit(cluster: Hosts, parameters: str, how: str) -> None:
    """One that loses some packets is not lost: the run does not restart."""
    with thirty_steps(cluster) as run:
        run.wait_for_line('"step": 8,')
        with troubled(how, cluster.hosts[1]):
            run.wait_for_line('"step": 20,' if how == "lossy" else '"fault"')
        result = run.wait()
    assert result.event("summary")["parameters_sha256"] == parameters
    assert ([e["event"] for e in result.events].count("fault") == 0) is (how == "lossy")


@pytest.mark.long
def test_a_slow_link_changes_no_bit(cluster: Hosts, parameters: str) -> None:
    with contextlib.ExitStack() as limits:
        for host in (cluster.driver, *cluster.hosts):
            limits.enter_context(host.limited("1gbit"))
        with thirty_steps(cluster) as run:
            result = run.wait()
    assert result.event("summary")["parameters_sha256"] == parameters


@pytest.mark.long
def test_stages_share_a_host_beside_others_elsewhere(tmp_path: Path) -> None:
    """Stages 0 and 2 on one host, stage 1 and the driver on another."""
    with lan(2, tmp_path) as (one, other), hosts_of(other, [one, other, one], tmp_path) as both:
        result = both.run("verify", EXAMPLE, "--steps", "3", *THREE, *both.connect)
    assert result.code == 0, result.err
