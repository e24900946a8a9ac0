"""Heartbeats from a child to its supervisor, and the memory and CPU time of a process.

A heartbeat comes from a thread of its own. It stops with the process, or if something holds the
interpreter's lock for ever; a layer that computes for a long time does not. Heartbeats carry what
the supervisor cannot see from outside.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rpcmp.process.channel import Channel, Message
from rpcmp.process.sockets import Links, Traffic

BEAT_SECONDS = 0.5
"""Between two heartbeats."""

GRACE_SECONDS = 0.1
"""For reading heartbeats that have arrived already."""

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_USER, _SYSTEM = 11, 12
"""Fields of /proc/PID/stat, counted after the name, which may contain anything."""


def start_heartbeat(channel: Channel, more: Callable[[], Message]) -> None:
    """Start the heartbeat thread.

    Args:
        more: returns what else each heartbeat carries; called on the heartbeat thread.
    """

    def beat() -> None:
        pause, links, traffic = threading.Event(), Links(), Traffic()
        while not pause.wait(BEAT_SECONDS):
            ways = traffic.read(links.watch())
            channel.send({"event": "beat", "ways": ways, **more()})

    threading.Thread(target=beat, name="rpcmp-heartbeat", daemon=True).start()


class HeartbeatMonitor:
    """Detects that a child's heartbeats have stopped.

    Args:
        timeout: seconds without a heartbeat after which the child counts as lost; 0 for never.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._last = time.monotonic()

    def beat(self) -> None:
        self._last = time.monotonic()

    async def lost(self) -> float:
        """Return, once heartbeats have been missing too long, the seconds since the last one.

        If the supervisor itself was held up, as by a suspended machine, it first reads the
        heartbeats that have arrived meanwhile.
        """
        while True:
            left = self._last + (self._timeout or float("inf")) - time.monotonic()
            if left <= 0:
                await asyncio.sleep(GRACE_SECONDS)
                if (seconds := time.monotonic() - self._last) >= self._timeout:
                    return seconds
            else:
                await asyncio.sleep(min(left, 3600.0))


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if unknown."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process; 0 if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS
    except (OSError, ValueError, IndexError):
        return 0.0
