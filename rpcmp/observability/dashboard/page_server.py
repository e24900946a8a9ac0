"""The live page of a run: an observer that serves it, in a thread of its own.

    observer's thread ── tell ──> state <── since ── server's thread ──> browsers

The two threads share the state and its lock, and nothing else. The server stops with the run, even
if a browser has not read the last message in time. The number of connections is limited, so that
they cannot use up the run's file descriptors. If the server fails, the run continues.
"""

from __future__ import annotations

import secrets
import ssl
import threading
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from rpcmp.net.accept import BoundedListener, Budget, share
from rpcmp.net.identity import Credentials
from rpcmp.observability.dashboard.app import Endpoint, application
from rpcmp.observability.dashboard.state import State
from rpcmp.observability.events import Event

LAST_WORDS = 1
"""Seconds for browsers to read the last message."""

MOST = 64
"""Connections at once; more are refused. The limit is lower if there are few descriptors."""

BACKLOG = 128
"""Connections that the kernel queues for the server to accept."""

CLOSE_SECONDS = 10.0
"""Seconds for the server to stop."""


class LivePage:
    """An observer that serves the page of one run until it is closed.

    Args:
        place: the endpoint to serve at; its socket is closed with the page.

    Raises:
        SecurityError: its certificate cannot be used.
    """

    name = "the page"

    def __init__(self, place: Endpoint) -> None:
        self._run = _PublishedRun()
        self._failure: Exception | None = None
        most = share(16, MOST)
        self._budget = Budget(most, max(1, most // 2), max(1, most // 2))
        listener = BoundedListener(place.listener.dup(), self._budget)
        app = application(self._run, place, listener.authenticate)
        self._server = _PageServer(_config(app, place), self._budget)
        self._thread = threading.Thread(
            target=self._serve, args=[place, listener], name="rpcmp-page-server", daemon=True
        )
        self._thread.start()

    def handle(self, event: Event) -> None:
        """See Observer; raises the server's error if it has failed."""
        self._run.take(event)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Send the last message, and stop; see Observer. It never raises."""
        self._run.end()
        self._server.should_exit = True
        self._thread.join(LAST_WORDS + 1)
        self._budget.end_all()  # connections that are still shaking hands
        self._thread.join(CLOSE_SECONDS)

    def _serve(self, place: Endpoint, listener: BoundedListener) -> None:
        try:
            with place.listener, listener:
                self._server.run([listener])
        except (Exception, SystemExit) as error:  # uvicorn exits if it cannot start
            self._failure = error if isinstance(error, Exception) else OSError("it cannot start")


class _PageServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, budget: Budget) -> None:
        super().__init__(config)
        self._budget = budget

    async def on_tick(self, counter: int) -> bool:
        """See uvicorn, which calls it ten times per second; returns whether to stop."""
        self._budget.expire()
        return await super().on_tick(counter)


class _PublishedRun:
    """The run's state, shared by two threads; see RunSource."""

    def __init__(self) -> None:
        self.name = secrets.token_hex(4)
        self.has_ended = False
        self._state = State()
        self._lock = threading.Lock()

    def take(self, event: Event) -> None:
        with self._lock:
            self._state.take(event)

    def since(self, version: int | None) -> dict[str, Any] | None:
        # What it returns does not change any more: the state replaces its parts.
        with self._lock:
            return self._state.since(version)

    def end(self) -> None:
        self.has_ended = True


def _config(app: ASGIApp, place: Endpoint) -> uvicorn.Config:
    """Return uvicorn's config, without features that the page does not need."""
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # a browser that disconnects in the middle is not an error
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MOST,
        backlog=BACKLOG,
        timeout_graceful_shutdown=LAST_WORDS,
    )
    config.load()
    config.ssl = None if place.certs is None else _tls(Credentials(place.certs))
    return config


def _tls(credentials: Credentials) -> ssl.SSLContext:
    """Return a context that uses the present certificate for each connection; it may be renewed."""

    def renew(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        connection.context = credentials.website()

    context = credentials.website()
    context.sni_callback = renew  # also called for a browser that sends no name
    return context
