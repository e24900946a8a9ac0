"""The endpoint that Prometheus scrapes.

It serves HTTP on loopback, and elsewhere TLS with certificates on both sides, or HTTP with
`--insecure`. Each connection has a thread of its own, handshake included, so a silent client delays
no other. The number of connections and their duration are limited.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.registry import Collector

from rpcmp.config import addresses
from rpcmp.errors import ConfigError
from rpcmp.net.connection_limits import (
    AdmittedConnection,
    ConnectionLimit,
    accept_with_data,
    descriptor_limit,
    listen_deferred,
    peer_of,
)
from rpcmp.net.security import Credentials, Security, is_loopback

SCRAPE_SECONDS = 10.0
"""Seconds that a connection may last, for one scrape; also Prometheus' own default timeout."""

MOST = 16
"""Connections at once. The limit is lower if there are few file descriptors."""

LEAVING_SECONDS = 0.01
"""Seconds between two checks whether a connection has closed."""

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

log = logging.getLogger(__name__)


@contextlib.contextmanager
def serving(collector: Collector, address: str, security: Security) -> Iterator[str]:
    """Serve `collector`, and metrics of this process, until the block is left.

    Args:
        collector: collected at every scrape, on another thread.
        address: HOST:PORT; port 0 takes a free one.
        security: the security options of this process.

    Yields:
        the URL.

    Raises:
        ConfigError: the address is in use or invalid, or other machines could reach it without a
            certificate.
    """
    host, port = addresses.parse(address)
    credentials = None if is_loopback(host) else security.credentials
    if not is_loopback(host) and credentials is None and not security.insecure:
        raise ConfigError(
            f"--metrics {address} is not a loopback address: whoever reaches it reads what the job "
            "does. Give --certs DIR, which `rpcmp certs issue` makes, so that it takes TLS and a "
            "certificate of the same authority; or --insecure, where nobody else is on the network"
        )
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    try:
        server = _MetricsServer(host, port, credentials)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--metrics: cannot listen on {address}: {reason}") from error
    app: Application = make_wsgi_app(registry)
    server.set_app(_guarded(app, host) if is_loopback(host) else app)
    thread = threading.Thread(
        target=server.serve_forever, args=[0.1], name="rpcmp-metrics", daemon=True
    )
    thread.start()
    try:
        scheme = "http" if credentials is None else "https"
        yield f"{scheme}://{addresses.joined(host, server.server_port)}/metrics"
    finally:
        server.shutdown()
        server.server_close()


def _guarded(app: Application, host: str) -> Application:
    """Return `app` with a check of the Host header, so that no web page can read the metrics."""

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if addresses.is_own_name(environ.get("HTTP_HOST", ""), host):
            return app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain")])
        return [b"403: this is not the name of this server\n"]

    return guarded


class _MetricsHandler(WSGIRequestHandler):
    timeout = SCRAPE_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


class _MetricsServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, credentials: Credentials | None) -> None:
        self._credentials = credentials
        most = descriptor_limit(32, MOST)
        self._limit = ConnectionLimit(most, most, seconds=SCRAPE_SECONDS)
        self._admitted: dict[Any, AdmittedConnection] = {}
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _MetricsHandler)

    def server_bind(self) -> None:
        """Bind as HTTPServer does, but without a DNS lookup of the host's name."""
        TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()

    def server_activate(self) -> None:
        self.socket.setblocking(False)
        listen_deferred(self.socket)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Return the next connection, which uses the present certificate; it may be renewed.

        Raises:
            OSError: there is no connection, or no room for it yet.
        """
        if not self._limit.has_room():
            time.sleep(LEAVING_SECONDS)
            raise BlockingIOError("a connection has to leave first")
        connection, address = accept_with_data(self.socket)
        try:
            peer = peer_of(connection)
            if self._credentials is not None:
                context = self._credentials.server()
                connection = context.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
            admitted = self._limit.admit(peer, lambda: _break(connection))
            if admitted is None:
                raise BlockingIOError("there are too many connections")
            self._admitted[connection] = admitted
        except BaseException:
            connection.close()
            raise
        return connection, address

    def close_request(self, request: Any) -> None:
        """Close a connection, and free its place."""
        super().close_request(request)
        if (admitted := self._admitted.pop(request, None)) is not None:
            self._limit.remove(admitted)

    def service_actions(self) -> None:
        """Close expired connections; called ten times per second, and after each connection."""
        self._limit.expire()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a client that was refused or has disconnected; the client knows the error."""
        log.debug("a scrape from %s failed", client_address, exc_info=True)


def _break(connection: socket.socket) -> None:
    """Shut down a connection for its thread; not by TLS, which only that thread may use."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
