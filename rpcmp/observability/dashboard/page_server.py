"""The live page of a run: an observer that serves its files, and the run as server-sent events.

    observer's thread ── handle ──> state <── since ── server's thread ──> browsers

    GET /             the page
    GET /NAME         one of its files
    GET /events       the state, then its changes, four times a second at most; with the header
                      Last-Event-ID, or ?after=ID, only the changes since that message

The server keeps no state per browser: each connection knows which version of the state it has sent.
A browser that reads slowly gets fewer and larger messages. The id of a message is "RUN-VERSION":
with it a browser that reconnects continues where it was, unless another run is served here now.

On loopback every process of this machine may read the page, but no page of another site: requests
for another host name are refused (see HostCheck), other origins are allowed nothing, and their
requests do not carry the cookie. Elsewhere the connection is encrypted, and a browser needs the
run's token.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Self

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rpcmp.config import addresses
from rpcmp.errors import ConfigError
from rpcmp.net.certificates import Certificate
from rpcmp.net.connection_limits import BoundedListener, ConnectionLimit, descriptor_limit
from rpcmp.net.security import Credentials, is_loopback
from rpcmp.observability.dashboard import html_report
from rpcmp.observability.dashboard.state import State
from rpcmp.observability.events import Event
from rpcmp.observability.web_server import HostCheck, WebServer, listen

PORT = 8265
"""Port of a bare `--ui`, if it is free."""

MOST = 64
"""Connections at once; more are refused. The limit is lower if there are few descriptors."""

PAUSE = 0.25
"""Seconds between two messages to a browser."""

BEAT = 8
"""Pauses without a change after which a browser gets an empty message, to detect a lost server."""


class Endpoint:
    """A listening socket, and what a browser needs to connect to it.

    Attributes:
        listener: the socket.
        host: the name by which browsers reach it.
        token: the token that they need; None: none.
        certs: folder of the certificate; None: connections are not encrypted.
    """

    def __init__(
        self,
        listener: socket.socket,
        host: str,
        token: str | None = None,
        certs: Path | None = None,
    ) -> None:
        self.listener = listener
        self.host = host
        self.port = int(listener.getsockname()[1])
        self.token = token
        self.certs = certs

    @classmethod
    def open(cls, address: str | None, certs: Path | None) -> Self:
        """Listen at "HOST:PORT", ":PORT" or "PORT"; for None at PORT, or at any free port.

        Raises:
            ConfigError: the address is invalid or in use, or other machines reach it although
                there is no certificate.
            SecurityError: the certificate cannot be used.
        """
        if address is None:
            try:
                return cls(listen(addresses.LOOPBACK, PORT), addresses.LOOPBACK)
            except OSError:
                return cls(listen(addresses.LOOPBACK, 0), addresses.LOOPBACK)
        host, port = parse(address)
        if is_loopback(host):
            return cls(_open(host, port), host)
        if certs is None:
            raise ConfigError(
                f"--ui {address}: other machines reach that address, so the page needs a "
                "certificate: give --certs DIR/driver, which `rpcmp certs issue DIR --driver "
                f"--host {socket.gethostname()}` makes; or serve it on 127.0.0.1, and reach it by "
                f"`ssh -L {port or PORT}:127.0.0.1:{port or PORT} {socket.gethostname()}`"
            )
        Credentials(certs)
        named = Certificate.load(certs).hosts
        return cls(_open(host, port), _name(host, named), secrets.token_urlsafe(32), certs)

    @property
    def url(self) -> str:
        """The URL of the page, which includes the token."""
        address = addresses.format_address(self.host, self.port)
        if self.token is None:
            return f"http://{address}/"
        return f"https://{address}/?token={self.token}"


def parse(address: str) -> tuple[str, int]:
    """Return host and port; the host defaults to loopback.

    Raises:
        ConfigError: the address is invalid.
    """
    port = address.removeprefix(":")
    try:
        return addresses.parse(f"{addresses.LOOPBACK}:{port}" if port.isdecimal() else address)
    except ConfigError:
        raise ConfigError(
            f"--ui {address!r} is not [HOST:]PORT, such as 127.0.0.1:{PORT}; a bare --ui comes "
            "after CONFIG"
        ) from None


def _open(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--ui {host}:{port}: cannot listen there: {reason}") from error


def _name(host: str, named: list[str]) -> str:
    """Return the name by which browsers reach `host`; it must be in the certificate."""
    if host in named or (not named and host not in ("0.0.0.0", "::")):
        return host
    return named[0] if named else socket.gethostname()


class LivePage:
    """An observer that serves the page of one run until it is closed.

    Args:
        endpoint: where to serve it; its socket is closed with the page.

    Raises:
        SecurityError: its certificate cannot be used.
    """

    name = "the page"

    def __init__(self, endpoint: Endpoint) -> None:
        self._run = PublishedRun()
        most = descriptor_limit(16, MOST)
        limit = ConnectionLimit(most, max(1, most // 2), max(1, most // 2))
        listener = BoundedListener(endpoint.listener, limit)
        app = _application(self._run, endpoint, listener.authenticate)
        tls = None if endpoint.certs is None else Credentials(endpoint.certs).website
        self._server = WebServer(app, listener, limit, tls, "rpcmp-page-server")

    def handle(self, event: Event) -> None:
        """See Observer; raises the server's error if it has failed."""
        self._run.apply(event)
        if self._server.failure is not None:
            raise self._server.failure

    def close(self) -> None:
        """Send the last message, and stop; see Observer. It never raises."""
        self._run.has_ended = True
        self._server.close()


class PublishedRun:
    """The run's state, which the threads of the observer and of the server share.

    Attributes:
        name: unique.
    """

    def __init__(self) -> None:
        self.name = secrets.token_hex(4)
        self.has_ended = False
        self._state = State()
        self._lock = threading.Lock()

    def apply(self, event: Event) -> None:
        with self._lock:
            self._state.apply(event)

    def since(self, version: int | None) -> dict[str, Any] | None:
        # What it returns does not change any more: the state replaces its parts.
        with self._lock:
            return self._state.since(version)


def _application(
    run: PublishedRun, endpoint: Endpoint, authenticate: Callable[[object], None]
) -> ASGIApp:
    """Return the application that serves `run`.

    Args:
        run: the run.
        endpoint: the endpoint at which it is served.
        authenticate: called with the address of each client whose request passes the checks.
    """
    contents = html_report.load()

    async def file(request: Request) -> Response:
        path = request.path_params["path"] or "index.html"
        if path not in contents:
            return PlainTextResponse("404: no such file\n", 404)
        return Response(contents[path], media_type=html_report.media_type(path))

    async def events(request: Request) -> Response:
        last_id = request.headers.get("last-event-id") or request.query_params.get("after", "")
        messages = _messages(run, _version_of(last_id, run.name))
        return StreamingResponse(messages, media_type="text/event-stream")

    files = Starlette(routes=[Route("/events", events), Route("/{path:path}", file)])

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        authenticate(scope.get("client"))
        await files(scope, receive, send)

    if endpoint.token is None:
        return SecureHeaders(HostCheck(app, endpoint.host))
    return SecureHeaders(TokenCheck(app, endpoint.token, endpoint.port))


async def _messages(run: PublishedRun, version: int | None) -> AsyncIterator[str]:
    """Yield all messages for one browser, which has the state of `version`."""
    silent = 0
    while True:
        is_last = run.has_ended
        changes = run.since(version)
        if changes is not None:
            version, silent = changes["version"], 0
            text = json.dumps(changes, allow_nan=False, separators=(",", ":"))
            yield f"id: {run.name}-{version}\ndata: {text}\n\n"
        elif silent == BEAT:
            silent = 0
            yield "event: beat\ndata:\n\n"
        if is_last:
            yield "event: end\ndata:\n\n"
            return
        silent += 1
        await asyncio.sleep(PAUSE)


def _version_of(event_id: str, name: str) -> int | None:
    """Return the version in the id of a message of this run; None for any other id."""
    run, _, version = event_id.rpartition("-")
    return int(version) if run == name and version.isdecimal() else None


HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
"""Headers of every response. No response is cached: the next run here may be another."""


class SecureHeaders:
    """Adds HEADERS to the responses of an application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)


class TokenCheck:
    """Refuses requests without the token, which may be in their URL or in a cookie."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app = app
        self._token = token
        self._cookie = f"__Host-rpcmp-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_cookie(message: Message) -> None:
            if message["type"] == "http.response.start":
                attributes = "Path=/; Secure; HttpOnly; SameSite=Strict"
                cookie = f"{self._cookie}={self._token}; {attributes}"
                MutableHeaders(scope=message)["Set-Cookie"] = cookie
            await send(message)

        request = Request(scope)
        in_url = request.query_params.get("token")
        token = request.cookies.get(self._cookie, "") if in_url is None else in_url
        if secrets.compare_digest(token.encode(), self._token.encode()):
            await self._app(scope, receive, send if in_url is None else send_cookie)
        else:
            text = "403: open the address that `rpcmp drive --ui` printed; it has a token in it\n"
            await PlainTextResponse(text, 403)(scope, receive, send)
