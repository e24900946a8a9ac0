"""Running a stage server until somebody stops it: the one function behind `rpcmp serve`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable

from rpcmp.process.signals import ending_signals, wishes
from rpcmp.server.notify import keep_alive, notify
from rpcmp.server.server import DRAIN_SECONDS, StageServer
from rpcmp.wire.security import INSECURE, WARN_SECONDS, Security
from rpcmp.wire.watching import watch

log = logging.getLogger(__name__)


async def serve(server: StageServer, host: str, port: int, announce: Callable[[int], None]) -> int:
    """Serve until SIGTERM, SIGINT, SIGHUP or a Drain call.

    The first of them lets a running job end after its current step; another SIGTERM or SIGINT ends
    it at once.

    Args:
        server: not started yet.
        host, port: where to listen; port 0 takes a free one.
        announce: told the port once the server is ready.

    Returns:
        The exit code: 0 for a server that was drained, by SIGTERM, SIGHUP or a call; 130 after
        SIGINT.

    Raises:
        ConfigError: the port cannot be had.
    """
    warning = asyncio.create_task(_warn(server.security))
    watching = asyncio.create_task(watch(server.security, lambda text: log.warning("%s", text)))
    received: asyncio.Queue[signal.Signals] = asyncio.Queue()
    signals: list[int] = []

    def note(signum: signal.Signals) -> None:
        before = wishes(signals)
        signals.append(signum)
        if wishes(signals) > before:
            received.put_nowait(signum)

    loop = asyncio.get_running_loop()
    for signum in ending_signals():
        loop.add_signal_handler(signum, note, signum)
    announce(await server.start(host, port))
    notify("READY=1")
    alive = asyncio.create_task(keep_alive())
    first = await _first(received, server)
    notify("STOPPING=1")
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
    warning.cancel()
    watching.cancel()
    alive.cancel()
    return 128 + first if first is signal.SIGINT else 0


async def _warn(security: Security) -> None:
    """Say each minute that everybody may come, where that is so."""
    while security.insecure:
        log.warning("%s", INSECURE)
        await asyncio.sleep(WARN_SECONDS)


async def _first(
    received: asyncio.Queue[signal.Signals], server: StageServer
) -> signal.Signals | None:
    """The first signal; None where a Drain call came before any."""
    signalled = asyncio.create_task(received.get())
    drained = asyncio.create_task(server.drain_requested.wait())
    await asyncio.wait([signalled, drained], return_when=asyncio.FIRST_COMPLETED)
    drained.cancel()
    if signalled.done():
        return signalled.result()
    signalled.cancel()
    return None
