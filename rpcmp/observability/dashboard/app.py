"""The web application of the page: its files, and the run as server-sent events.

    GET /             the page
    GET /NAME         one of its files
    GET /events       the state, then its changes, four times a second at most; with the header
                      Last-Event-ID, or ?after=ID, only the changes since that message

The server keeps no state per browser: each connection knows which version of the state it has sent.
A browser that reads slowly gets fewer and larger messages; one that does not read at all delays no
other. The id of a message is "RUN-VERSION": with it a browser that reconnects continues where it
was, unless another run is served here now.

On loopback every process of this machine may read the page. Elsewhere the connection is encrypted,
and a browser needs the run's token.

On loopback too, any web page can make a browser of this machine send requests here. Three things
keep such a page out: requests for another host name are refused (see rpcmp.config.addresses), other
origins are allowed nothing, and their requests do not carry the cookie.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any, Protocol, Self
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rpcmp.config import addresses
from rpcmp.errors import ConfigError
from rpcmp.net.certificates import Certificate
from rpcmp.net.security import Credentials, is_loopback
from rpcmp.observability.dashboard import html

PORT = 8265
"""Port of a bare `--ui`, if it is free."""


@dataclass(frozen=True)
class Endpoint:
    """A listening socket, and what a browser needs to connect to it.

    Attributes:
        listener: the socket.
        host: the name by which browsers reach it.
        token: the token that they need; None: none.
        certs: folder of the certificate; None: connections are not encrypted.
    """

    listener: socket.socket
    host: str
    token: str | None = None
    certs: Path | None = None

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
                return cls(_listen(addresses.HERE, PORT), addresses.HERE)
            except OSError:
                return cls(_listen(addresses.HERE, 0), addresses.HERE)
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
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    @property
    def url(self) -> str:
        """The URL of the page, which includes the token."""
        address = addresses.joined(self.host, self.port)
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
        return addresses.parse(f"{addresses.HERE}:{port}" if port.isdecimal() else address)
    except ConfigError:
        raise ConfigError(
            f"--ui {address!r} is not [HOST:]PORT, such as 127.0.0.1:{PORT}; a bare --ui comes "
            "after CONFIG"
        ) from None


def _open(host: str, port: int) -> socket.socket:
    try:
        return _listen(host, port)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--ui {host}:{port}: cannot listen there: {reason}") from error


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket: a browser that connects before the server runs waits for it."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = infos[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def _name(host: str, named: list[str]) -> str:
    """Return the name by which browsers reach `host`; it must be in the certificate."""
    if host in named or (not named and host not in ("0.0.0.0", "::")):
        return host
    return named[0] if named else socket.gethostname()


PAUSE = 0.25
"""Seconds between two messages to a browser."""

BEAT = 8
"""Pauses without a change after which a browser gets an empty message, to detect a lost server."""


class RunSource(Protocol):
    """The run that is served; `name` is unique, and `since` is that of `State`."""

    @property
    def name(self) -> str: ...

    @property
    def has_ended(self) -> bool: ...

    def since(self, version: int | None) -> dict[str, Any] | None: ...


def application(source: RunSource, place: Endpoint, let_in: Callable[[object], None]) -> ASGIApp:
    """Return the application that serves `source`; for `let_in` see Guard."""
    contents = html.load()

    async def file(request: Request) -> Response:
        path = request.path_params["path"] or "index.html"
        if path not in contents:
            return PlainTextResponse("404: no such file\n", 404)
        return Response(contents[path], media_type=html.media_type(path))

    async def events(request: Request) -> Response:
        last_id = request.headers.get("last-event-id") or request.query_params.get("after", "")
        version = _version_of(last_id, source.name)
        return StreamingResponse(stream(source, version), media_type="text/event-stream")

    routes = [Route("/events", events), Route("/{path:path}", file)]
    return Guard(Starlette(routes=routes), place, let_in)


async def stream(source: RunSource, version: int | None) -> AsyncIterator[str]:
    """Yield all messages for one browser, which has the state of `version`."""
    silent = 0
    while True:
        is_last = source.has_ended
        changes = source.since(version)
        if changes is not None:
            version, silent = changes["version"], 0
            text = json.dumps(changes, allow_nan=False, separators=(",", ":"))
            yield f"id: {source.name}-{version}\ndata: {text}\n\n"
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


class Guard:
    """Checks host name and token of each request before it reaches an application.

    Args:
        app: the application.
        place: the endpoint at which it is served.
        let_in: called with the address of each client whose request passes.
    """

    def __init__(self, app: ASGIApp, place: Endpoint, let_in: Callable[[object], None]) -> None:
        self._app = app
        self._let_in = let_in
        self._token = place.token
        self._cookie = f"__Host-rpcmp-{place.port}"
        self._host = place.host if place.token is None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        cookie = ""

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                if cookie:
                    headers["Set-Cookie"] = cookie
            await send(message)

        headers = Headers(scope=scope)
        if self._host is not None and not addresses.is_own_name(
            headers.get("host", ""), self._host
        ):
            refusal = PlainTextResponse("403: this is not the name of this server\n", 403)
            await refusal(scope, receive, answer)
        elif not self._knows_token(scope, headers):
            text = "403: open the address that `rpcmp drive --ui` printed; it has a token in it\n"
            await PlainTextResponse(text, 403)(scope, receive, answer)
        else:
            self._let_in(scope.get("client"))
            if self._token is not None and self._query_token(scope) is not None:
                attributes = "Path=/; Secure; HttpOnly; SameSite=Strict"
                cookie = f"{self._cookie}={self._token}; {attributes}"
            await self._app(scope, receive, answer)

    def _knows_token(self, scope: Scope, headers: Headers) -> bool:
        """Return whether a request has the token, in its URL or as a cookie."""
        if self._token is None:
            return True
        token = self._query_token(scope)
        if token is None:
            token = self._cookie_token(headers.get("cookie", ""))
        return secrets.compare_digest(token.encode(), self._token.encode())

    def _query_token(self, scope: Scope) -> str | None:
        tokens = parse_qs(scope["query_string"].decode("latin-1")).get("token")
        return None if tokens is None else tokens[0]

    def _cookie_token(self, header: str) -> str:
        try:
            cookie = SimpleCookie(header).get(self._cookie)
        except CookieError:
            return ""
        return "" if cookie is None else cookie.value
