"""Connections without certificates, held open at every port, with few file descriptors."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rpcmp.net.connection_limits import ConnectionLimit
from rpcmp.observability.dashboard.page_server import Endpoint, LivePage
from tests.support.lan import issue, issue_to_driver
from tests.support.needs import needs
from tests.support.processes import (
    JobFolder,
    connect,
    rpcmp,
    running,
    running_server,
)
from tests.support.scraping import HERE, port_of, scrape, url_of, value
from tests.support.users import MALLORY, TRENT, acting_as

JOB = """
steps = 40
[model]
layers = "zoo:mlp"
balance = [2, 2]
"""


def limited(count: int) -> tuple[str, ...]:
    """Return a command that limits a program's file descriptors."""
    return (needs("prlimit"), f"--nofile={count}:{count}")


@contextlib.contextmanager
def silent(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Open silent connections as two other users of this machine."""
    with contextlib.ExitStack() as stack:
        found = []
        for number in range(count):
            with acting_as((MALLORY, TRENT)[number % 2]):
                connection = stack.enter_context(socket.socket())
            connection.setblocking(False)  # a full port may let them wait
            connection.connect_ex((HERE, port))
            found.append(connection)
        yield found


def descriptors(pid: int) -> int:
    return psutil.Process(pid).num_fds()


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    return issue_to_driver(tmp_path / "certs", HERE)


def test_connections_to_page_and_metrics_cannot_exhaust_a_run(job: JobFolder, certs: Path) -> None:
    """More connections than the driver's limit, while its group forms and until it ends."""
    options: list[str | Path] = [
        "--ui",
        "0.0.0.0:0",
        "--metrics",
        f"{HERE}:0",
        "--certs",
        certs,
        "--json",
    ]
    with running("drive", job.config(JOB), *options, under=limited(1024), shares=True) as run:
        metrics = url_of(run)
        page = int(run.wait_for_line(r'"url": "https://[^"]*:(\d+)/')[1])
        with silent(page, 1300), silent(port_of(metrics), 300):
            assert descriptors(run.pid) < 512
            result = run.wait()
    assert result.code == 0, result.err
    assert len(result.losses) == 40
    assert not [event for event in result.events if event["event"] in ("fault", "warning")]


@pytest.mark.parametrize("has_certs", [False, True], ids=["plain", "tls"])
def test_servers_with_few_file_descriptors_keep_serving(
    job: JobFolder, tmp_path: Path, has_certs: bool
) -> None:
    folder = issue(tmp_path / "certs", HERE, HERE) if has_certs else None
    with contextlib.ExitStack() as stack:
        servers = []
        for index in range(2):
            place = ["--stage", str(index), "--listen", f"{HERE}:0", "--metrics", f"{HERE}:0"]
            secured = [] if folder is None else ["--certs", str(folder / f"stage{index}")]
            started = running_server(*place, *secured, under=limited(256))
            servers.append(stack.enter_context(started))
        for server in servers:
            stack.enter_context(silent(int(server.address.rpartition(":")[2]), 400))
            stack.enter_context(silent(port_of(url_of(server.run)), 300))
        secured = [] if folder is None else ["--certs", str(folder / "driver")]
        result = rpcmp("drive", job.config(JOB), "--json", "--connect", connect(servers), *secured)
        assert result.code == 0, result.err
        assert "fault" not in {event["event"] for event in result.events}
        for server in servers:
            assert descriptors(server.pid) < 128
            found = scrape(url_of(server.run))
            assert value(found, "rpcmp_server_jobs_total") == 1
            assert "Traceback" not in "".join(server.run.err)


def test_silent_connections_to_the_page_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that stays silent is closed even if there is room."""

    monkeypatch.setattr(ConnectionLimit.__init__, "__defaults__", (None, 0.2))
    place = Endpoint.open(f"{HERE}:0", None)
    page = LivePage(place)
    try:
        with socket.create_connection((HERE, place.port), 30) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
            assert connection.recv(1) == b""
    finally:
        page.close()
