"""Work for a thread of its own, until another thread would only wait for it and does it instead.

On busy cores, a hop from one thread to another and back takes a millisecond.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future as Waiting
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Work = Callable[[], None]


class WorkQueue:
    """A queue of work, which must not raise. Thread-safe.

    Args:
        name: of its thread.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._changed = threading.Condition()
        self._work: deque[Work] = deque()
        self._is_helped = False

    def submit(self, work: Work) -> None:
        with self._changed:
            self._work.append(work)
            if self._is_helped:
                self._changed.notify()
            else:
                self._thread.submit(self._do_next)

    @contextlib.contextmanager
    def helped(self) -> Iterator[None]:
        """Let the calling thread do what is submitted or has not begun, in `work_until`."""
        with self._changed:
            self._is_helped = True
        try:
            yield
        finally:
            with self._changed:
                self._is_helped = False
                for _ in self._work:
                    self._thread.submit(self._do_next)

    def work_until(self, waiting: Waiting[Any]) -> None:
        """Work until `waiting` is done; only while `helped` is entered."""
        waiting.add_done_callback(self._wake)
        while not waiting.done():
            with self._changed:
                self._changed.wait_for(lambda: self._work or waiting.done())
            self._do_next()

    def _wake(self, _: Waiting[Any]) -> None:
        with self._changed:
            self._changed.notify()

    def _do_next(self) -> None:
        with self._changed:
            work = self._work.popleft() if self._work else None
        if work is not None:  # or another thread has done it
            work()
