"""The sign of life that a child gives its supervisor, from a thread of its own.

It stops with the process, and when something holds Python's lock for ever; a layer that computes
for a long time does not hold it. What the supervisor cannot see from outside comes with it.

Whether a child is still heard of.

What a process takes up, as its kernel says; it need not answer for that.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rpcmp.process.channel import Channel, Message
from rpcmp.process.tcp_stats import Links, Traffic

BEAT_SECONDS = 0.5
"""Between two beats."""


def begin(channel: Channel, tell: Callable[[], Message]) -> None:
    """Beat from now on.

    Args:
        channel: to the supervisor.
        tell: what else each beat says; called on the heartbeat's thread.
    """

    def beat() -> None:
        pause, links, traffic = threading.Event(), Links(), Traffic()
        while not pause.wait(BEAT_SECONDS):
            ways = traffic.read(links.watch())
            channel.send({"event": "beat", "ways": ways, **tell()})

    threading.Thread(target=beat, name="rpcmp-heartbeat", daemon=True).start()


class HeartbeatMonitor:
    """Notes the signs of life of a child.

    Args:
        timeout: seconds without one after which it counts as lost; 0: never.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._last = time.monotonic()

    def beat(self) -> None:
        """Note a sign of life."""
        self._last = time.monotonic()

    async def lost(self) -> float:
        """Return when there was none for too long: the seconds since the last.

        A supervisor that was itself held up, by a suspended machine, hears first what has come
        meanwhile.
        """
        while True:
            left = self._last + (self._timeout or float("inf")) - time.monotonic()
            if left <= 0:
                await asyncio.sleep(GRACE_SECONDS)
                if (seconds := time.monotonic() - self._last) >= self._timeout:
                    return seconds
            else:
                await asyncio.sleep(min(left, 3600.0))


GRACE_SECONDS = 0.1
"""For what lies in the socket already."""


_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_USER, _SYSTEM = 11, 12
"""Places in /proc/PID/stat, counted after the name, which may hold anything."""


def resident_bytes(pid: int) -> int:
    """Memory of a process; 0 where that is not to be had."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def cpu_seconds(pid: int) -> float:
    """Time that all threads of a process have computed; 0 where that is not to be had."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS
    except (OSError, ValueError, IndexError):
        return 0.0
