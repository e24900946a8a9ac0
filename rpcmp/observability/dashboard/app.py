"""What the server answers: the page's files, and the run as server-sent events.

    GET /             the page
    GET /NAME         one of its files
    GET /events       first the state, then what has changed of it, four times a second at most;
                      with the header Last-Event-ID, or ?after=ID, what has changed since that

Nobody remembers a browser: its connection knows which version of the state it has sent. One that
reads slowly gets fewer and larger messages; one that does not read at all waits alone. The id of a
message is "RUN-VERSION": with it a browser that comes back goes on where it was, unless another run
is served here now.

Who gets an answer, and what a browser may do with it.

Any page that a browser shows can make it send requests here. Three things keep such a page out: a
name that is not ours is refused (see rpcmp.config.addresses), nothing is allowed to other origins,
and the cookie goes along with none of their requests.

Where the page is served, and for whom: anybody on this machine, or who has the run's token.

On loopback only processes of this machine reach it; a browser of this machine is one of them,
whatever page it shows, so the guard looks at the names that it uses (see
rpcmp.observability.dashboard.app). Elsewhere the connection is encrypted and the token keeps
strangers out.
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
from rpcmp.net.identity import Credentials
from rpcmp.net.security import is_loopback
from rpcmp.observability.dashboard import html

PORT = 8265
"""Where a bare `--ui` serves, if it is free."""


@dataclass(frozen=True)
class Endpoint:
    """A socket that is listened on, and who may connect to it.

    Attributes:
        listener: the socket.
        host: the name by which browsers reach it.
        token: what they have to know; None: nothing.
        certs: folder of the certificate; None: connections are not encrypted.
    """

    listener: socket.socket
    host: str
    token: str | None = None
    certs: Path | None = None

    @classmethod
    def open(cls, address: str | None, certs: Path | None) -> Self:
        """Listen at "HOST:PORT", ":PORT" or "PORT"; at PORT, or any that is free, for None.

        Raises:
            ConfigError: that is no address, one that cannot be listened on, or one that others
                reach although there is no certificate.
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
        """The port that is listened on."""
        return int(self.listener.getsockname()[1])

    @property
    def url(self) -> str:
        """What to open; it has the token in it."""
        where = addresses.joined(self.host, self.port)
        return f"http://{where}/" if self.token is None else f"https://{where}/?token={self.token}"


def parse(address: str) -> tuple[str, int]:
    """Host and port; the host is this machine where it is left out.

    Raises:
        ConfigError: that is no address.
    """
    given = address.removeprefix(":")
    try:
        return addresses.parse(f"{addresses.HERE}:{given}" if given.isdecimal() else address)
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
    """A listening socket: whoever connects before the server runs waits, and is not refused."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, where = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def _name(host: str, named: list[str]) -> str:
    """How browsers reach `host`: by a name of the certificate, which they compare."""
    if host in named or (not named and host not in ("0.0.0.0", "::")):
        return host
    return named[0] if named else socket.gethostname()


PAUSE = 0.25
"""Seconds between two messages to a browser."""

BEAT = 8
"""Pauses after which it gets an empty one: so it notices when the other end is gone."""


class RunSource(Protocol):
    """The run that is served."""

    @property
    def name(self) -> str:
        """No other run has the same."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""

    def since(self, version: int | None) -> dict[str, Any] | None:
        """See State."""


def application(source: RunSource, place: Endpoint, let_in: Callable[[object], None]) -> ASGIApp:
    """Return the application that serves `source`.

    Args:
        let_in: see Guard.
    """
    loaded = html.load()

    async def file(request: Request) -> Response:
        path = request.path_params["path"] or "index.html"
        if path not in loaded:
            return PlainTextResponse("404: no such file\n", 404)
        return Response(loaded[path], media_type=html.kind(path))

    async def events(request: Request) -> Response:
        seen = request.headers.get("last-event-id") or request.query_params.get("after", "")
        version = _known(seen, source.name)
        return StreamingResponse(stream(source, version), media_type="text/event-stream")

    routes = [Route("/events", events), Route("/{path:path}", file)]
    return Guard(Starlette(routes=routes), place, let_in)


async def stream(source: RunSource, version: int | None) -> AsyncIterator[str]:
    """All messages for one browser, which knows `version`."""
    silent = 0
    while True:
        is_last = source.has_ended
        found = source.since(version)
        if found is not None:
            version, silent = found["version"], 0
            text = json.dumps(found, allow_nan=False, separators=(",", ":"))
            yield f"id: {source.name}-{version}\ndata: {text}\n\n"
        elif silent == BEAT:
            silent = 0
            yield "event: beat\ndata:\n\n"
        if is_last:
            yield "event: end\ndata:\n\n"
            return
        silent += 1
        await asyncio.sleep(PAUSE)


def _known(event_id: str, name: str) -> int | None:
    """The version in the id of a message of this run; None: all has to be sent."""
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
"""Of every answer. Nothing is kept: the next run at this address may be another."""


class Guard:
    """Stands before an application.

    Args:
        app: what answers those who are let in.
        place: where it is served.
        let_in: called with the address of each client that is.
    """

    def __init__(self, app: ASGIApp, place: Endpoint, let_in: Callable[[object], None]) -> None:
        self._app = app
        self._let_in = let_in
        self._token = place.token
        self._cookie = f"__Host-rpcmp-{place.port}"
        self._host = place.host if place.token is None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
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
            if self._token is not None and self._of_query(scope) is not None:
                kept = "Path=/; Secure; HttpOnly; SameSite=Strict"
                cookie = f"{self._cookie}={self._token}; {kept}"
            await self._app(scope, receive, answer)

    def _knows_token(self, scope: Scope, headers: Headers) -> bool:
        """Whether a request has the token, in its address or as a cookie."""
        if self._token is None:
            return True
        given = self._of_query(scope)
        if given is None:
            given = self._of_cookie(headers.get("cookie", ""))
        return secrets.compare_digest(given.encode(), self._token.encode())

    def _of_query(self, scope: Scope) -> str | None:
        found = parse_qs(scope["query_string"].decode("latin-1")).get("token")
        return None if found is None else found[0]

    def _of_cookie(self, header: str) -> str:
        try:
            found = SimpleCookie(header).get(self._cookie)
        except CookieError:
            return ""
        return "" if found is None else found.value
