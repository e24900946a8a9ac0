"""Run a stage server until it is stopped: the function behind `rpcmp serve`.

Reports the server's state to systemd (ready, alive, stopping; see sd_notify(3)): a datagram to the
socket that systemd names in the environment. Without systemd, nothing is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
from collections.abc import Callable

from rpcmp.net.security import INSECURE, WARN_SECONDS, Security, watch
from rpcmp.process.interpreter import count_stop_requests, stop_signals
from rpcmp.server.stage_server import DRAIN_SECONDS, StageServer

log = logging.getLogger(__name__)


def notify(state: str) -> None:
    """Send "READY=1", "STOPPING=1" or "WATCHDOG=1" to systemd."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    if address:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with line, contextlib.suppress(OSError):  # systemd is being restarted
            line.sendto(state.encode(), address)


async def keep_alive() -> None:
    """Notify systemd's watchdog, twice as often as it asks for, that this event loop still runs."""
    if (interval := os.environ.get("WATCHDOG_USEC", "")).isdecimal():
        faulthandler.enable()  # it aborts a server that hangs: where it hung is to be in the log
        while True:
            notify("WATCHDOG=1")
            await asyncio.sleep(int(interval) / 2e6)


async def serve(
    server: StageServer, host: str, port: int, on_listening: Callable[[int], None]
) -> int:
    """Serve until SIGTERM, SIGINT, SIGHUP or a Drain call.

    The first of them lets a running job end after its current step. Another SIGTERM or SIGINT ends
    it at once. `on_listening` is called with the port once the server is ready.

    Returns:
        The exit code: 0 for a server that was drained, by SIGTERM, SIGHUP or a call; 130 after
        SIGINT.
    """
    background = [
        asyncio.create_task(_warn(server.security)),
        asyncio.create_task(watch(server.security, lambda text: log.warning("%s", text))),
    ]
    signals: list[int] = []
    at_once = asyncio.Event()
    stopped_by: signal.Signals | None = None

    def on_signal(signum: signal.Signals) -> None:
        nonlocal stopped_by
        before = count_stop_requests(signals)
        signals.append(signum)
        if count_stop_requests(signals) == before:
            return
        if server.drain_requested.is_set():
            at_once.set()
        else:
            stopped_by = signum
            server.drain_requested.set()

    loop = asyncio.get_running_loop()
    for signum in stop_signals():
        loop.add_signal_handler(signum, on_signal, signum)
    on_listening(await server.start(host, port))
    notify("READY=1")
    background.append(asyncio.create_task(keep_alive()))
    await server.drain_requested.wait()
    notify("STOPPING=1")
    await server.drain()
    stopping = asyncio.create_task(server.stop(DRAIN_SECONDS))
    hurrying = asyncio.create_task(at_once.wait())
    await asyncio.wait([stopping, hurrying], return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        stopping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stopping
        await server.stop(0)
    for task in (hurrying, *background):
        task.cancel()
    return 128 + signal.SIGINT if stopped_by is signal.SIGINT else 0


async def _warn(security: Security) -> None:
    """Log a warning each minute while the server accepts connections without certificates."""
    while security.insecure:
        log.warning("%s", INSECURE)
        await asyncio.sleep(WARN_SECONDS)
