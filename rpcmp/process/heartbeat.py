"""The sign of life that a child gives its supervisor, from a thread of its own.

It stops with the process, and when something holds Python's lock for ever; a layer that computes
for a long time does not hold it. What the supervisor cannot see from outside comes with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rpcmp.process.channel import Channel, Message
from rpcmp.process.links import Links
from rpcmp.process.traffic import Traffic

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
