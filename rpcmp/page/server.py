"""The live page of a run: an observer that serves it, in a thread of its own.

    observer's thread ── tell ──> state <── since ── server's thread ──> browsers

The two share the state and its lock, and nothing else. The server ends with the run; a browser that
does not take the last message in time is left behind.
"""

from __future__ import annotations

import contextlib
import secrets
import ssl
import threading
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from rpcmp.page.app import application
from rpcmp.page.place import Place
from rpcmp.page.state import State
from rpcmp.process.channel import Message
from rpcmp.wire.credentials import Credentials

LAST_WORDS = 1
"""Seconds for browsers to take the last message."""

MOST = 64
"""Connections at once; more are refused."""


class Page:
    """Serves the page of one run until it is closed.

    Args:
        place: where; its socket is closed with the page.

    Raises:
        SecurityError: its certificate cannot be used.
    """

    name = "the page"

    def __init__(self, place: Place) -> None:
        self._run = _Run()
        self._server = uvicorn.Server(_config(application(self._run, place), place))
        self._thread = threading.Thread(
            target=self._serve, args=[place], name="rpcmp-page-server", daemon=True
        )
        self._thread.start()

    def tell(self, event: Message) -> None:
        """See Observer."""
        self._run.take(event)

    def close(self) -> None:
        """Send what is left, and stop; see Observer."""
        self._run.end()
        self._server.should_exit = True
        self._thread.join()

    def _serve(self, place: Place) -> None:
        with contextlib.closing(place.listener):
            self._server.run([place.listener])


class _Run:
    """The run's state, for two threads.

    Attributes:
        name: no other run has the same.
        has_ended: whether nothing more will come.
    """

    def __init__(self) -> None:
        self.name = secrets.token_hex(4)
        self.has_ended = False
        self._state = State()
        self._lock = threading.Lock()

    def take(self, event: Message) -> None:
        """An event."""
        with self._lock:
            self._state.take(event)

    def since(self, version: int | None) -> dict[str, Any] | None:
        """See State. What it returns does not change any more."""
        with self._lock:
            return self._state.since(version)

    def end(self) -> None:
        """There will be no more events."""
        self.has_ended = True


def _config(app: ASGIApp, place: Place) -> uvicorn.Config:
    """uvicorn without what a page on loopback has no use for."""
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # a browser that goes away in the middle is no error
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MOST,
        timeout_graceful_shutdown=LAST_WORDS,
    )
    config.load()
    config.ssl = None if place.certs is None else _tls(Credentials(place.certs))
    return config


def _tls(credentials: Credentials) -> ssl.SSLContext:
    """uvicorn is given it once, and a certificate may be renewed: each connection looks again."""

    def renew(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        connection.context = credentials.website()

    context = credentials.website()
    context.sni_callback = renew  # called for those that send no name as well
    return context
