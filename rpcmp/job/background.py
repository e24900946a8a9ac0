"""An event loop in a thread of its own, for programs that have none."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

CLEANUP_SECONDS = 30.0
"""How long an interrupted caller waits for what it started to be taken down again."""

Result = TypeVar("Result")


class BackgroundLoop:
    """Runs coroutines for a thread that waits. Children of the loop follow its thread's life."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rpcmp-supervisor", daemon=True
        )
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it can run anything."""
        return self._thread.is_alive()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """What `coroutine` returns; blocks.

        A KeyboardInterrupt cancels it and is raised when it has cleaned up.
        """
        finished = threading.Event()

        async def run() -> Result:
            try:
                return await coroutine
            finally:
                finished.set()

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            finished.wait(CLEANUP_SECONDS)
            raise

    def close(self) -> None:
        """Cancel whatever still runs, and end the thread; does nothing the second time."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(CLEANUP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*others, return_exceptions=True)
