"""What the server answers: the page's files, and the run as server-sent events.

    GET /             the page
    GET /NAME         one of its files
    GET /events       first the state, then what has changed of it, four times a second at most;
                      with the header Last-Event-ID, or ?after=ID, what has changed since that

Nobody remembers a browser: its connection knows which version of the state it has sent. One that
reads slowly gets fewer and larger messages; one that does not read at all waits alone. The id of a
message is "RUN-VERSION": with it a browser that comes back goes on where it was, unless another run
is served here now.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from rpcmp.page import assets
from rpcmp.page.guard import Guard
from rpcmp.page.place import Place

PAUSE = 0.25
"""Seconds between two messages to a browser."""

BEAT = 8
"""Pauses after which it gets an empty one: so it notices when the other end is gone."""


class Source(Protocol):
    """The run that is served."""

    @property
    def name(self) -> str:
        """No other run has the same."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""

    def since(self, version: int | None) -> dict[str, Any] | None:
        """See State."""


def application(source: Source, place: Place, let_in: Callable[[object], None]) -> ASGIApp:
    """Return the application that serves `source`.

    Args:
        let_in: see Guard.
    """
    loaded = assets.load()

    async def file(request: Request) -> Response:
        path = request.path_params["path"] or "index.html"
        if path not in loaded:
            return PlainTextResponse("404: no such file\n", 404)
        return Response(loaded[path], media_type=assets.kind(path))

    async def events(request: Request) -> Response:
        seen = request.headers.get("last-event-id") or request.query_params.get("after", "")
        version = _known(seen, source.name)
        return StreamingResponse(stream(source, version), media_type="text/event-stream")

    routes = [Route("/events", events), Route("/{path:path}", file)]
    return Guard(Starlette(routes=routes), place, let_in)


async def stream(source: Source, version: int | None) -> AsyncIterator[str]:
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
