"""When each event of a run was reported, and in which generation: said in one place."""

from __future__ import annotations

import time
from collections.abc import Callable

from rpcmp.process.channel import Message


class Stamp:
    """Passes events on with `time`, in seconds since 1970, and `generation`.

    Args:
        report: told of them.
        generation: says which one it is now.
    """

    def __init__(self, report: Callable[[Message], None], generation: Callable[[], int]) -> None:
        self._report = report
        self._generation = generation

    def __call__(self, event: Message) -> None:
        """Pass one on; the generation that it says itself stands."""
        generation = event.get("generation", self._generation())
        self._report({**event, "time": time.time(), "generation": generation})
