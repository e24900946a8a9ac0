"""What all replicas of a stage take over from the first one.

Buffers, such as BatchNorm's running statistics, which every replica changes by the micro-batches
that it has seen: after each step all have replica 0's, as under DistributedDataParallel. At the
beginning of a group the parameters as well. And where the replicas' hosts do not compute alike, the
parameters after each step: a processor that rounds an optimizer's step otherwise would make the
replicas different models in time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from rpcmp import transport
from rpcmp.errors import JobError, RpcmpError, to_wire
from rpcmp.transport import Raised


class FirstState:
    """Tensors of replica 0, by what they are and when.

    Args:
        first: name of replica 0 in the group; None: it is this one.
        num_others: how many take over what this one publishes.
        ask: asks replica 0 for the tensors with a key.
    """

    def __init__(
        self, first: str | None, num_others: int, ask: Callable[[str, str], Future[Any]]
    ) -> None:
        self._first = first
        self._num_others = num_others
        self._ask = ask
        self._lock = threading.Lock()
        self._published: dict[str, list[Tensor]] = {}
        self._waiting: dict[str, list[Future[Any]]] = {}
        self._taken: dict[str, int] = {}

    def share(self, key: str, tensors: Sequence[Tensor]) -> None:
        """Make `tensors` what they are at replica 0, which has to call this as well.

        Args:
            key: unique for each time, and the same at all replicas.
            tensors: the same ones at all replicas, in the same order; written to, but at replica 0.

        Raises:
            RpcmpError: replica 0 is gone, or the step was aborted.
        """
        if not tensors:
            return
        if self._first is None:
            self._publish(key, [tensor.detach().cpu().clone() for tensor in tensors])
            return
        found = transport.result(self._ask(self._first, key), self._first)
        with torch.no_grad():
            for tensor, value in zip(tensors, found, strict=True):
                tensor.copy_(value)

    def get(self, key: str) -> Future[Any]:
        """The tensors of replica 0, asked of it, once it has them."""
        answer: Future[Any] = Future()
        with self._lock:
            found = self._published.get(key)
            if found is None:
                self._waiting.setdefault(key, []).append(answer)
            else:
                self._note_taken(key, 1)
        if found is not None:
            answer.set_result(found)
        return answer

    def abort(self, error: RpcmpError) -> None:
        """Let nobody wait for what will not come."""
        with self._lock:
            waiting = [one for of_key in self._waiting.values() for one in of_key]
            self._waiting.clear()
        for answer in waiting:
            answer.set_result(Raised(to_wire(error)))

    def _publish(self, key: str, tensors: list[Tensor]) -> None:
        with self._lock:
            self._published[key] = tensors
            waiting = self._waiting.pop(key, [])
            self._note_taken(key, len(waiting))
        for answer in waiting:
            answer.set_result(tensors)

    def _note_taken(self, key: str, count: int) -> None:
        taken = self._taken[key] = self._taken.get(key, 0) + count
        if taken >= self._num_others:
            self._published.pop(key, None)
            self._taken.pop(key, None)


def gone(stage: str) -> JobError:
    """What those hear who wait for a step that was aborted."""
    return JobError(f"stage {stage!r}: the step was aborted")
