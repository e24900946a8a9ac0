"""Running a stage server until somebody stops it: the one function behind `rpcmp serve`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable

from rpcmp.server.server import DRAIN_SECONDS, StageServer


async def serve(server: StageServer, host: str, port: int, announce: Callable[[int], None]) -> int:
    """Serve until SIGTERM or SIGINT.

    The first signal lets a running job end after its current step; a second ends it at once.

    Args:
        server: not started yet.
        host, port: where to listen; port 0 takes a free one.
        announce: told the port once the server is ready.

    Returns:
        The exit code: 0 after SIGTERM, which drains the server; 130 after SIGINT.

    Raises:
        ConfigError: the port cannot be had.
    """
    received: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, received.put_nowait, signum)
    announce(await server.start(host, port))
    first = await received.get()
    await server.drain()
    stopping = asyncio.create_task(server.stop(DRAIN_SECONDS))
    second = asyncio.create_task(received.get())
    await asyncio.wait([stopping, second], return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        stopping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stopping
        await server.stop(0)
    second.cancel()
    return 128 + first if first is signal.SIGINT else 0
