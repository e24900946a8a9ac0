"""What a stage reads of the batch, fetched from the driver a few micro-batches at a time.

One question for every micro-batch would double the messages of a stage that reads the batch. Not
all at once either: a stage must not hold more of a mini-batch because that has more micro-batches.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from torch.futures import Future

from rpcmp import transport
from rpcmp.members import DRIVER
from rpcmp.source import Source
from rpcmp.transport import Raised
from rpcmp.work import Outputs, Work

GROUP = 4
"""Micro-batches that are fetched together."""


class _Key(NamedTuple):
    round: int
    kind: str
    path: tuple[str, ...]
    reader: int
    first: int


class Slices:
    """The slices that were asked for and not taken yet. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[_Key, Future[Any]] = {}
        self._left: dict[_Key, int] = {}

    def get(self, work: Work, kind: str, path: tuple[str, ...], reader: int) -> Future[Any]:
        """One micro-batch's Outputs, or a Raised; each may be asked for once.

        Args:
            work: which micro-batch.
            kind, path: what of it; see `Source.slices`.
            reader: which input of the stage it is for. Each gets tensors of its own, so that a
                layer that works in place changes no other input.
        """
        first = work.microbatch - work.microbatch % GROUP
        key = _Key(work.round, kind, path, reader, first)
        count = min(GROUP, work.num_microbatches - first)
        with self._lock:
            group = self._groups.get(key)
            if group is None:
                group = transport.call(DRIVER, Source.slices, work.round, kind, path, first, count)
                self._groups[key], self._left[key] = group, count
            self._left[key] -= 1
            if not self._left[key]:
                del self._groups[key], self._left[key]
        answer: Future[Any] = Future()

        def arrived(done: Future[Any]) -> None:
            found = transport.outcome(done, DRIVER)
            is_raised = isinstance(found, Raised)
            answer.set_result(found if is_raised else Outputs(found[work.microbatch - first]))

        group.add_done_callback(arrived)
        return answer

    def forget(self) -> None:
        """Let go of what was asked for and will not be taken: a round was aborted."""
        with self._lock:
            self._groups.clear()
            self._left.clear()
