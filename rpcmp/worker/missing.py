"""Which gradients do not exist, though distributed autograd brings zeros for them.

None and zeros differ: weight decay and momentum act on the latter. It seldom happens that a reader
does not use what it reads, so it says so by a call of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from rpcmp.work import Bundle, Work


class Missing:
    """What the readers of a stage have said of its micro-batches. Thread-safe.

    Args:
        tell: tells the producer of an input of a bundle's micro-batch; blocks until it knows.

    Attributes:
        tell: as given.
    """

    def __init__(self, tell: Callable[[Bundle, Work, int, list[int]], None]) -> None:
        self.tell = tell
        self._lock = threading.Lock()
        self._noted: dict[tuple[int, int], dict[int, Sequence[int]]] = {}

    def note(self, work: Work, port: int, which: Sequence[int]) -> None:
        """Hear from the reader at a port that it has no gradients for some of its tensors."""
        with self._lock:
            self._noted.setdefault((work.round, work.microbatch), {})[port] = which

    def take(self, work: Work) -> Mapping[int, Sequence[int]]:
        """What has been said of a micro-batch, by port; nothing is known of it afterwards."""
        with self._lock:
            return self._noted.pop((work.round, work.microbatch), {})

    def clear(self) -> None:
        """Forget micro-batches that were given up."""
        with self._lock:
            self._noted.clear()
