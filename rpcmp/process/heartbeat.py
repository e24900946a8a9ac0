"""The sign of life that a child gives its supervisor, from a thread of its own.

It stops with the process, and when something holds Python's lock for ever; a layer that computes
for a long time does not hold it.
"""

from __future__ import annotations

import threading

from rpcmp.process.channel import Channel
from rpcmp.process.links import Links

BEAT_SECONDS = 0.5
"""Between two beats."""


def begin(channel: Channel) -> None:
    """Beat from now on."""

    def beat() -> None:
        pause, links = threading.Event(), Links()
        while not pause.wait(BEAT_SECONDS):
            links.watch()
            channel.send({"event": "beat"})

    threading.Thread(target=beat, name="rpcmp-heartbeat", daemon=True).start()
