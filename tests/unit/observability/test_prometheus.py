"""The endpoint for Prometheus: its access, certificates and connections."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
import ssl
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rpcmp.errors import ConfigError
from rpcmp.net.security import Security
from rpcmp.observability.prometheus import MOST, SCRAPE_SECONDS, serving
from rpcmp.observability.run_metrics import RunMetrics
from rpcmp.observability.web_server import listen
from tests.support.lan import issue, issue_to_driver
from tests.support.runevents import typed
from tests.support.scraping import HERE, port_of, scrape, value

ELSEWHERE = "0.0.0.0"


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return issue_to_driver(tmp_path_factory.mktemp("certs"), HERE).parent


def trusting(authority: Path, holder: Path | None) -> ssl.SSLContext:
    """Return a TLS context from the `ca_file`, `cert_file` and `key_file` of a `tls_config`."""
    context = ssl.create_default_context(cafile=str(authority / "ca.crt"))
    if holder is not None:
        context.load_cert_chain(holder / "tls.crt", holder / "tls.key")
    return context


@contextlib.contextmanager
def door(address: str, security: Security) -> Iterator[str]:
    metrics = RunMetrics()
    saved = {"step": 3, "seconds": 0.5, "bytes": 4096, "path": "somewhere"}
    metrics.handle(typed({"event": "checkpoint", "time": 1000.0, "generation": 1, **saved}))
    with serving(metrics.store, address, security) as url:
        yield url


def test_endpoint_serves_every_client_on_loopback() -> None:
    with door(f"{HERE}:0", Security()) as url:
        assert url.startswith(f"http://{HERE}:")
        assert value(scrape(url), "rpcmp_checkpoint_step") == 3
        assert "process_resident_memory_bytes" in {name for name, _ in scrape(url)}
    with pytest.raises(urllib.error.URLError):
        scrape(url)  # it is closed


def test_endpoint_refuses_another_host_name_on_loopback() -> None:
    with door(f"{HERE}:0", Security()) as url:
        for name in ("127.0.0.1", "localhost:9464", "[::1]:1"):
            assert status(url, name) == 200
        for name in (f"evil.example:{port_of(url)}", "evil.example", "[::1", ""):
            assert status(url, name) == 403


def status(url: str, host: str, method: str = "GET") -> int:
    with contextlib.closing(http.client.HTTPConnection(HERE, port_of(url), timeout=20)) as line:
        line.request(method, "/metrics", headers={"Host": host})
        response = line.getresponse()
        assert response.headers["Connection"] == "close" or response.status in (403, 500)
        return response.status


def test_endpoint_answers_only_requests_that_read() -> None:
    with door(f"{HERE}:0", Security()) as url:
        expected = {"GET": 200, "HEAD": 200, "POST": 405, "DELETE": 405, "OPTIONS": 405}
        assert {method: status(url, HERE, method) for method in expected} == expected


def test_a_name_of_both_families_means_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    four = (socket.AF_INET, socket.SOCK_STREAM, 6, "", (HERE, 0))
    six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: [six, four])
    with listen("localhost", 0) as listener:
        assert listener.getsockname()[0] == HERE


class Broken(Collector):
    def collect(self) -> Iterator[Metric]:
        raise ValueError("no metrics today")


def test_failed_scrape_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with serving(Broken(), f"{HERE}:0", Security()) as url:
        assert status(url, HERE) == 500
    assert "a scrape failed: ValueError: no metrics today" in caplog.text


def test_endpoint_limits_and_closes_silent_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpcmp.observability.prometheus.SCRAPE_SECONDS", 0.5)
    monkeypatch.setattr("rpcmp.net.connection_limits.FIRST_BYTE_SECONDS", 1)
    before = threading.active_count()
    with door(f"{HERE}:0", Security()) as url, contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((HERE, port_of(url))))
            for _ in range(3 * MOST)
        ]
        assert value(scrape(url), "rpcmp_checkpoint_step") == 3
        assert threading.active_count() - before < 20
        for connection in silent:
            connection.settimeout(20)
            assert connection.recv(1) == b""


@pytest.mark.parametrize("address", [f"{ELSEWHERE}:0", "[::]:0", "host-a:9464"])
def test_endpoint_refuses_other_addresses_without_certificates(address: str) -> None:
    refused = pytest.raises(ConfigError, match=r"not a loopback address.*--certs DIR")
    with refused, door(address, Security()):
        raise AssertionError("it is open")


def test_endpoint_serves_http_elsewhere_if_insecure() -> None:
    with door(f"{ELSEWHERE}:0", Security(insecure=True)) as url:
        assert value(scrape(f"http://{HERE}:{port_of(url)}/metrics"), "rpcmp_checkpoint_step") == 3


def test_endpoint_and_client_need_certificates_of_one_authority_elsewhere(
    certs: Path, tmp_path: Path
) -> None:
    other = issue(tmp_path / "other", HERE)
    with door(f"{ELSEWHERE}:0", Security(certs / "driver-here")) as bound:
        assert bound.startswith("https://")
        url = f"https://{HERE}:{port_of(bound)}/metrics"
        found = scrape(url, trusting(certs, certs / "stage0"))
        assert value(found, "rpcmp_checkpoint_step") == 3
        for holder, alert in ((None, "CERTIFICATE_REQUIRED"), (other / "stage0", "UNKNOWN_CA")):
            with pytest.raises((urllib.error.URLError, OSError), match=alert):
                scrape(url, trusting(certs, holder))
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            scrape(url, trusting(other, certs / "stage0"))
        with pytest.raises((urllib.error.URLError, OSError)):
            scrape(url.replace("https", "http"))
        with socket.create_connection((HERE, port_of(bound))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            stranger.settimeout(SCRAPE_SECONDS / 2)  # before the limit ends it
            assert stranger.recv(1) == b""


def test_endpoint_speaks_http_1_with_a_client_that_prefers_http_2(certs: Path) -> None:
    with door(f"{ELSEWHERE}:0", Security(certs / "driver-here")) as bound:
        context = trusting(certs, certs / "stage0")
        context.set_alpn_protocols(["h2", "http/1.1"])  # as Prometheus does by default
        with (
            socket.create_connection((HERE, port_of(bound))) as connection,
            context.wrap_socket(connection, server_hostname=HERE) as session,
        ):
            assert session.selected_alpn_protocol() == "http/1.1"


def test_endpoint_serves_others_while_a_client_is_silent(certs: Path) -> None:
    with door(f"{ELSEWHERE}:0", Security(certs / "driver-here")) as bound:
        port = port_of(bound)
        with socket.create_connection((HERE, port)), socket.create_connection((HERE, port)):
            found = scrape(f"https://{HERE}:{port}/metrics", trusting(certs, certs / "driver-here"))
        assert value(found, "rpcmp_checkpoint_step") == 3


def test_server_uses_a_renewed_certificate(certs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    shutil.copytree(certs / "driver-here", folder)

    def shown(port: int) -> bytes | None:
        with socket.create_connection((HERE, port)) as connection:
            context = trusting(certs, certs / "stage0")
            with context.wrap_socket(connection, server_hostname=HERE) as session:
                return session.getpeercert(binary_form=True)

    with door(f"{ELSEWHERE}:0", Security(folder)) as bound:
        before = shown(port_of(bound))
        for name in ("tls.crt", "tls.key"):
            shutil.copy(certs / "stage0" / name, folder / name)
        assert shown(port_of(bound)) not in (before, None)
