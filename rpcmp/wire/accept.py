"""Taking connections, whatever happens to single ones."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator

RETRY_SECONDS = 0.1

log = logging.getLogger(__name__)


async def connections(listener: socket.socket) -> AsyncGenerator[socket.socket, None]:
    """Each connection that somebody opens to a listening socket.

    Not by asyncio's `sock_accept`: one that is cancelled while somebody comes loses him, and says
    so with a traceback (Python 3.11).
    """
    while True:
        await _readable(listener)
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):  # gone again
            continue
        except OSError as error:  # too many open files: later there may be fewer
            log.warning("cannot take a connection: %s", error)
            await asyncio.sleep(RETRY_SECONDS)
        else:
            connection.setblocking(False)
            yield connection


async def _readable(listener: socket.socket) -> None:
    """Wait until somebody comes."""
    loop = asyncio.get_running_loop()
    came = asyncio.Event()
    loop.add_reader(listener, came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(listener)
