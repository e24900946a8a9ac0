"""Whether a child is still heard of."""

from __future__ import annotations

import asyncio
import time


class Pulse:
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
