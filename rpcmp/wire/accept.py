"""Taking connections, whatever happens to single ones."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator

RETRY_SECONDS = 0.1

log = logging.getLogger(__name__)


async def connections(listener: socket.socket) -> AsyncIterator[socket.socket]:
    """Each connection that somebody opens to a listening socket."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except OSError as error:  # too many open files: later there may be fewer; or it is gone
            log.warning("cannot take a connection: %s", error)
            await asyncio.sleep(RETRY_SECONDS)
        else:
            yield connection
