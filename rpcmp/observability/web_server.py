"""The HTTP server of the page and of the metrics, in a thread of its own.

The number of connections is limited, so that they cannot use up the run's file descriptors. A
client that is silent, or reads slowly, delays no other. If the server fails, the run continues.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rpcmp.config import addresses
from rpcmp.net.connection_limits import BoundedListener, ConnectionLimit
from rpcmp.net.identity import refusal

log = logging.getLogger(__name__)

BACKLOG = 128
"""Connections that the kernel queues for the server to accept."""

LAST_SECONDS = 1
"""Seconds for clients to read the last message."""

CLOSE_SECONDS = 10.0
"""Seconds for the server to stop."""


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket: a client that connects before the server runs waits for it.

    A name with addresses of both kinds, such as localhost, means its IPv4 address.
    """
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = min(infos, key=lambda each: each[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


class WebServer:
    """Serves an application until it is closed.

    Args:
        app: the ASGI application.
        listener: the listening socket; closed with the server.
        limit: of the listener's connections.
        tls: returns the TLS context of the next connection; None: connections are not encrypted.
        name: name of the thread.
        on_failure: called from the thread if the server fails.

    Attributes:
        failure: why it has stopped; None: it has not failed.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: BoundedListener,
        limit: ConnectionLimit,
        tls: Callable[[], ssl.SSLContext] | None,
        name: str,
        on_failure: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._on_failure = on_failure
        self.failure: Exception | None = None
        self._limit = limit
        self._server = _Server(_config(app, tls), limit)
        self._thread = threading.Thread(target=self._run, args=[listener], name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, even if a client has not read the last message in time."""
        self._server.should_exit = True
        self._thread.join(LAST_SECONDS + 1)
        self._limit.end_all()  # connections that are still shaking hands
        self._thread.join(CLOSE_SECONDS)

    def _run(self, listener: BoundedListener) -> None:
        try:
            with listener:
                self._server.run([listener])
        except (Exception, SystemExit) as error:  # uvicorn exits if it cannot start
            self.failure = error if isinstance(error, Exception) else OSError("it cannot start")
            self._on_failure(self.failure)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, limit: ConnectionLimit) -> None:
        super().__init__(config)
        self._limit = limit

    async def on_tick(self, counter: int) -> bool:
        """See uvicorn, which calls it ten times per second; returns whether to stop."""
        self._limit.expire()
        return await super().on_tick(counter)


def _config(app: ASGIApp, tls: Callable[[], ssl.SSLContext] | None) -> uvicorn.Config:
    """Return uvicorn's config, without features that are not needed."""
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # a client that disconnects in the middle is not an error
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=LAST_SECONDS,
    )
    config.load()
    if tls is not None:
        config.ssl = _TlsContext(ssl.PROTOCOL_TLS_SERVER)
        config.ssl.current = tls
    return config


class _TlsContext(ssl.SSLContext):
    """A context that uses another one for each connection; its certificate may be renewed."""

    current: Callable[[], ssl.SSLContext]

    def wrap_bio(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **kwargs: Any
    ) -> ssl.SSLObject:
        """See ssl.SSLContext; asyncio calls it once per connection."""
        context = self.current()
        context.sslobject_class = _Handshake
        connection = context.wrap_bio(incoming, outgoing, *args, **kwargs)
        assert isinstance(connection, _Handshake)
        connection.outgoing = outgoing
        return connection


class _Handshake(ssl.SSLObject):
    """A TLS connection whose client learns why it is refused.

    asyncio drops the alert when a handshake fails. So the failure first asks for more data, for
    which asyncio sends all that is there; the client closes, or else the limit ends the connection.

    Attributes:
        outgoing: what asyncio will send.
    """

    outgoing: ssl.MemoryBIO
    _failure: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        """See ssl.SSLObject."""
        if self._failure is not None:
            raise self._failure
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            log.debug("refused a connection: %s", refusal(error))
            if not self.outgoing.pending:  # the client does not speak TLS
                raise
            self._failure = error
            raise ssl.SSLWantReadError from error


class HostCheck:
    """Refuses requests for another host name than `host`, so that no web page can read `app`.

    On loopback too, any web page can make a browser of this machine send requests here; see
    rpcmp.config.addresses.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if not addresses.is_own_name(Headers(scope=scope).get("host", ""), self._host):
            app = PlainTextResponse("403: this is not the name of this server\n", 403)
        await app(scope, receive, send)
