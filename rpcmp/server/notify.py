"""Telling systemd how a server is: ready, alive, stopping. See sd_notify(3).

A datagram to the socket that it names in the environment; nothing where there is no systemd.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket


def notify(state: str) -> None:
    """Say "READY=1", "STOPPING=1" or "WATCHDOG=1"."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    if address:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with line, contextlib.suppress(OSError):  # systemd is being restarted
            line.sendto(state.encode(), address)


async def keep_alive() -> None:
    """Say twice as often as systemd asks for it that this event loop still turns."""
    if (asked := os.environ.get("WATCHDOG_USEC", "")).isdecimal():
        while True:
            notify("WATCHDOG=1")
            await asyncio.sleep(int(asked) / 2e6)
