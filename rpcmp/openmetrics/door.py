"""Where metrics are scraped: HTTP on loopback, TLS with certificates on both sides elsewhere.

HTTP elsewhere too for who says `--insecure`.

Each connection has a thread of its own, which shakes hands as well: one that says nothing holds up
nobody but itself.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.registry import Collector

from rpcmp import addresses
from rpcmp.errors import ConfigError
from rpcmp.wire.credentials import Credentials
from rpcmp.wire.security import Security, is_loopback

SILENT_SECONDS = 10.0
"""After which a connection that says nothing is closed."""

log = logging.getLogger(__name__)


@contextlib.contextmanager
def serving(collector: Collector, address: str, security: Security) -> Iterator[str]:
    """Serve what `collector` has, and this process's own figures, until the block is left.

    Args:
        collector: asked at every scrape, on another thread.
        address: HOST:PORT; port 0 takes a free one.
        security: what this process was told about it.

    Yields:
        the URL.

    Raises:
        ConfigError: the address cannot be had, or others could reach it without a certificate.
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
        server = _Server(host, port, credentials)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--metrics: cannot listen on {address}: {reason}") from error
    server.set_app(make_wsgi_app(registry))
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


class _Handler(WSGIRequestHandler):
    timeout = SILENT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, credentials: Credentials | None) -> None:
        self._credentials = credentials
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Without asking the network for the host's name, as HTTPServer does."""
        TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        """The next connection; with the certificate that there is now, which may be a new one."""
        connection, address = super().get_request()
        if self._credentials is None:
            return connection, address
        context = self._credentials.server()
        return context.wrap_socket(
            connection, server_side=True, do_handshake_on_connect=False
        ), address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever is refused, or goes away, has been told so."""
        log.debug("a scrape from %s failed", client_address, exc_info=True)
