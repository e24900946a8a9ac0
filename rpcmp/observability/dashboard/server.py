"""The live page of a run: an observer that serves it, in a thread of its own.

    observer's thread ── tell ──> state <── since ── server's thread ──> browsers

The two share the state and its lock, and nothing else. The server ends with the run; a browser that
does not take the last message in time is left behind. Connections are bounded in number, so that
they cannot take the run's file descriptors; and what ends the server does not end the run.
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
from rpcmp.observability.events.event import Event

LAST_WORDS = 1
"""Seconds for browsers to take the last message."""

MOST = 64
"""Connections at once; more are refused. Fewer if there are few file descriptors."""

BACKLOG = 128
"""Connections that the kernel keeps for the server to accept."""

CLOSE_SECONDS = 10.0
"""How long the server may take to end."""


class Page:
    """Serves the page of one run until it is closed.

    Args:
        place: where; its socket is closed with the page.

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

    def tell(self, event: Event) -> None:
        """See Observer.

        Raises:
            OSError: the server has failed.
        """
        self._run.take(event)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Send what is left, and stop; see Observer. It never raises."""
        self._run.end()
        self._server.should_exit = True
        self._thread.join(LAST_WORDS + 1)
        self._budget.end_all()  # connections that are still shaking hands
        self._thread.join(CLOSE_SECONDS)

    def _serve(self, place: Endpoint, listener: BoundedListener) -> None:
        try:
            with place.listener, listener:
                self._server.run([listener])
        except (Exception, SystemExit) as error:  # uvicorn exits where it cannot start
            self._failure = error if isinstance(error, Exception) else OSError("it cannot start")


class _PageServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, budget: Budget) -> None:
        super().__init__(config)
        self._budget = budget

    async def on_tick(self, counter: int) -> bool:
        """See uvicorn: called ten times a second; whether to stop."""
        self._budget.expire()
        return await super().on_tick(counter)


class _PublishedRun:
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

    def take(self, event: Event) -> None:
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


def _config(app: ASGIApp, place: Endpoint) -> uvicorn.Config:
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
        backlog=BACKLOG,
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
