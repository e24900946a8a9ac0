"""The server of the page: access, headers, and slow browsers, which do not block others."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rpcmp.errors import ConfigError, SecurityError
from rpcmp.net import authority, identity
from rpcmp.observability.dashboard import page_server
from rpcmp.observability.dashboard.page_server import Endpoint, LivePage
from tests.support import pageevents
from tests.support.pageevents import Event
from tests.support.runevents import typed

BEGUN: list[Event] = [event for event in pageevents.run(40) if event["event"] != "end"]


@contextlib.contextmanager
def serving(place: Endpoint) -> Iterator[LivePage]:
    page = LivePage(place)
    try:
        for event in BEGUN:
            page.handle(typed(event))
        yield page
    finally:
        page.close()


@pytest.fixture
def here() -> Iterator[Endpoint]:
    """Serve the page of a run on loopback."""
    place = Endpoint.open("127.0.0.1:0", None)
    with serving(place):
        yield place


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs") / "certs"
    authority.create(folder)
    return authority.issue(folder, "driver", identity.DRIVER, ["driver.example"], 1)


def get(
    place: Endpoint, path: str, headers: Mapping[str, str] | None = None, method: str = "GET"
) -> tuple[int, http.client.HTTPMessage, str]:
    """Return the status, headers and text of a response; for a stream, its first message."""
    with contextlib.closing(connection(place)) as line:
        line.request(method, path, headers=dict(headers or {}))
        answer = line.getresponse()
        if answer.headers.get("Content-Type", "").startswith("text/event-stream"):
            return answer.status, answer.headers, message(answer)[0]
        return answer.status, answer.headers, answer.read().decode()


def connection(place: Endpoint) -> http.client.HTTPConnection:
    if place.certs is None:
        return http.client.HTTPConnection("127.0.0.1", place.port, timeout=30)
    trusting = ssl.create_default_context(cafile=place.certs / "ca.crt")
    trusting.check_hostname = False  # its certificate is for another name than 127.0.0.1
    return http.client.HTTPSConnection("127.0.0.1", place.port, timeout=30, context=trusting)


def message(stream: http.client.HTTPResponse) -> tuple[str, Any]:
    """Return the id and the data of the next message that has an id."""
    found = {}
    for raw in stream:
        name, _, value = raw.decode().strip().partition(": ")
        found[name] = value
        if not name and "id" in found:
            return found["id"], json.loads(found["data"])
        if not name:
            found = {}
    raise AssertionError("the stream has ended")


def test_page_and_files_have_a_strict_content_policy(
    here: Endpoint,
) -> None:
    for path, kind in (
        ("/", "text/html"),
        ("/main.js", "text/javascript"),
        ("/page.css", "text/css"),
        ("/vendor/uPlot.iife.min.js", "text/javascript"),
        ("/icon.svg", "image/svg+xml"),
    ):
        status, headers, _ = get(here, path)
        assert (status, headers["Content-Type"].partition(";")[0]) == (200, kind)
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    "path", ["/nothing.js", "/../server.py", "/..%2fserver.py", "//etc/passwd", "/vendor/"]
)
def test_server_has_no_other_files(here: Endpoint, path: str) -> None:
    assert get(here, path)[0] == 404


def test_server_refuses_another_host_name_on_loopback(here: Endpoint) -> None:
    for name in ("127.0.0.1", "localhost", "[::1]"):
        assert get(here, "/", {"Host": f"{name}:{here.port}"})[0] == 200
    for forwarded in ("127.0.0.1", "localhost:1"):
        assert get(here, "/", {"Host": forwarded})[0] == 200
    for host in (f"evil.example:{here.port}", "evil.example", "[::1", ""):
        for path in ("/", "/events"):
            assert get(here, path, {"Host": host})[0] == 403


def test_server_refuses_post_requests(here: Endpoint) -> None:
    assert get(here, "/", method="POST")[0] == 405
    assert get(here, "/events", method="DELETE")[0] == 405


def test_reconnecting_browser_gets_missed_changes(here: Endpoint) -> None:
    with contextlib.closing(connection(here)) as line:
        line.request("GET", "/events")
        stream = line.getresponse()
        seen, everything = message(stream)
    assert everything["is_all"]
    assert len(everything["curve"]["rows"]) == 40
    run, _, version = seen.rpartition("-")
    for headers, path in (
        ({"Last-Event-ID": f"{run}-{int(version) - 1}"}, "/events"),
        ({}, f"/events?after={run}-{int(version) - 1}"),
    ):
        with contextlib.closing(connection(here)) as line:
            line.request("GET", path, headers=headers)
            _, rest = message(line.getresponse())
        assert not rest["is_all"]
        assert [entry["text"][:5] for entry in rest["entries"]] == ["done:"]
        assert rest["curve"] is None
    for strange in ("another-3", f"{run}-x", "-", "3"):
        with contextlib.closing(connection(here)) as line:
            line.request("GET", "/events", headers={"Last-Event-ID": strange})
            assert message(line.getresponse())[1]["is_all"]


def test_stream_ends_with_the_end_of_the_run() -> None:
    place = Endpoint.open("127.0.0.1:0", None)
    with contextlib.closing(connection(place)) as line:
        with serving(place) as page:
            line.request("GET", "/events")
            stream = line.getresponse()
            message(stream)
            page.handle(typed({"event": "end", "outcome": "failed", "error": "why"}))
        _, last = message(stream)
        assert last["parts"]["progress"]["status"] == "failed"
        assert stream.read().decode() == "event: end\ndata:\n\n"
    with pytest.raises(OSError):  # noqa: PT011 - which, depends on the moment
        socket.create_connection(("127.0.0.1", place.port), 5)


def test_server_serves_others_while_a_browser_reads_nothing() -> None:
    place = Endpoint.open("127.0.0.1:0", None)
    with socket.socket() as idle, serving(place) as page:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        idle.connect(("127.0.0.1", place.port))
        idle.sendall(f"GET /events HTTP/1.1\r\nHost: 127.0.0.1:{place.port}\r\n\r\n".encode())
        idle.recv(1)
        long = "x" * 100_000
        for number in range(100):
            page.handle(typed({"event": "warning", "text": f"{long}{number}"}))
        with contextlib.closing(connection(place)) as line:
            line.request("GET", "/events")
            assert len(message(line.getresponse())[1]["entries"]) > 100


def test_server_requires_the_token_elsewhere(certs: Path) -> None:
    place = Endpoint.open("0.0.0.0:0", certs)
    assert place.token is not None
    assert place.url == f"https://driver.example:{place.port}/?token={place.token}"
    other = Endpoint.open("0.0.0.0:0", certs)
    assert other.token != place.token
    other.listener.close()
    with serving(place):
        for path in (
            "/",
            "/events",
            "/main.js",
            "/?token=",
            "/?token=x",
            f"/?token={place.token}x",
        ):
            status, headers, text = get(place, path)
            assert status == 403
            assert "Set-Cookie" not in headers
            assert place.token not in text
        status, headers, text = get(place, f"/?token={place.token}")
        assert status == 200
        assert "<!doctype html>" in text
        cookie, *rules = headers["Set-Cookie"].split("; ")
        assert set(rules) == {"Path=/", "Secure", "HttpOnly", "SameSite=Strict"}
        for path in ("/", "/events", "/main.js"):
            assert get(place, path, {"Cookie": cookie})[0] == 200
            assert get(place, path, {"Cookie": cookie[:-1] + "!"})[0] == 403
        assert get(place, "/?token=x", {"Cookie": cookie})[0] == 403
        with socket.create_connection(("127.0.0.1", place.port), 30) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\nHost: driver.example\r\n\r\n")
            assert plain.recv(100)[:4] != b"HTTP"


def test_server_requires_a_certificate_elsewhere() -> None:
    for address in ("0.0.0.0:0", "192.0.2.1:80", "[::]:0", "host-a:8080"):
        with pytest.raises(ConfigError, match="certs issue DIR --driver"):
            Endpoint.open(address, None)


def test_endpoint_refuses_an_unusable_certificate(certs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    shutil.copytree(certs, folder)
    (folder / "tls.key").chmod(0o644)
    with pytest.raises(SecurityError, match="can be read by others"):
        Endpoint.open("0.0.0.0:0", folder)


def test_server_uses_a_renewed_certificate(certs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    shutil.copytree(certs, folder)
    renewed = authority.issue(certs.parent, "renewed", identity.DRIVER, ["driver.example"], 2)

    def shown(place: Endpoint) -> bytes | None:
        with contextlib.closing(connection(place)) as line:
            line.connect()
            assert isinstance(line.sock, ssl.SSLSocket)
            return line.sock.getpeercert(binary_form=True)

    place = Endpoint.open("0.0.0.0:0", folder)
    with serving(place):
        before = shown(place)
        shutil.copy(renewed / "tls.crt", folder / "tls.crt")
        assert shown(place) == before  # the new key is still missing
        shutil.copy(renewed / "tls.key", folder / "tls.key")
        assert shown(place) == ssl.PEM_cert_to_DER_cert((renewed / "tls.crt").read_text())
        assert get(place, f"/?token={place.token}")[0] == 200


@pytest.mark.parametrize("address", ["config.toml", "127.0.0.1", "127.0.0.1:x", "1:2:3:x", "", " "])
def test_endpoint_refuses_an_invalid_address(address: str) -> None:
    with pytest.raises(ConfigError, match=r"not \[HOST:\]PORT.*a bare --ui comes after CONFIG"):
        Endpoint.open(address, None)


def test_endpoint_refuses_a_used_port_if_it_was_given(here: Endpoint) -> None:
    with pytest.raises(ConfigError, match="cannot listen there: Address already in use"):
        Endpoint.open(str(here.port), None)


def test_endpoint_takes_any_port_if_the_default_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(page_server, "PORT", taken.getsockname()[1])
        place = Endpoint.open(None, None)
        assert place.port != taken.getsockname()[1]
        assert place.url == f"http://127.0.0.1:{place.port}/"
        place.listener.close()
    free = Endpoint.open(None, None)
    assert free.port == page_server.PORT
    free.listener.close()
