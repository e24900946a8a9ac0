"""An event loop whose clock jumps instead of waiting."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Item = TypeVar("Item")


class _Jumping(selectors.DefaultSelector):
    """A selector that advances the clock instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing is left that could happen"
        self.now += max(0.0, timeout)
        return super().select(0)


class PretendedTime(asyncio.SelectorEventLoop):
    """An event loop that runs `asyncio.sleep(3600)` at once, and whose clock then shows one hour
    more.
    """

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def in_pretended_time(work: Coroutine[Any, Any, Item]) -> tuple[Item, float]:
    """Run a coroutine; return its result and the seconds that it took."""
    with asyncio.Runner(loop_factory=PretendedTime) as runner:
        return runner.run(work), runner.get_loop().time()
