"""Tensors that a worker has for others, who ask for them before or after they are there.

    one worker   post(key, tensors) ──┐
    others       get(key) ────────────┴──> the tensors, once both have happened

Each is kept until as many have had it as want it. Keys begin with the number of a round, so that
nobody waits for what belongs to a round that was aborted.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.futures import Future

from rpcmp.errors import RpcmpError, to_wire
from rpcmp.rpc.transport import Raised

Key = tuple[int, str]
"""A round's number, and what it is; `NEVER` for what no abort concerns."""

NEVER = 2**62


@dataclass
class _PostedTensors:
    """What one key stands for, as far as it is known."""

    tensors: list[Tensor | None] | None = None
    left: int = 0
    waiting: list[Future[Any]] = field(default_factory=list)


class TensorMailbox:
    """What one worker has for others. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._posts: dict[Key, _PostedTensors] = {}
        self._aborted: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._posts)

    def post(self, key: Key, tensors: Sequence[Tensor | None], takers: int) -> None:
        """Have copies of these tensors for as many others; None stays None."""
        with self._lock:
            if not takers or key[0] in self._aborted:
                return
            post = self._posts.setdefault(key, _PostedTensors())
            post.tensors = [None if t is None else t.detach().cpu().clone() for t in tensors]
            post.left += takers
            waiting, post.waiting = post.waiting, []
            self._note_taken(key, len(waiting))
        for answer in waiting:
            answer.set_result(post.tensors)

    def get(self, key: Key) -> Future[Any]:
        """The tensors, asked by another worker: a list once they are there, or a Raised."""
        answer: Future[Any] = Future()
        found: Any = None
        with self._lock:
            if key[0] in self._aborted:
                found = Raised(self._aborted[key[0]])
            else:
                post = self._posts.setdefault(key, _PostedTensors())
                found = post.tensors
                if found is None:
                    post.waiting.append(answer)
                else:
                    self._note_taken(key, 1)
        if found is not None:
            answer.set_result(found)
        return answer

    def abort(self, first: int, last: int, error: RpcmpError) -> None:
        """Let nobody wait for what belongs to the rounds from `first` to `last`."""
        with self._lock:
            self._aborted.update(dict.fromkeys(range(first, last + 1), to_wire(error)))
            gone = [self._posts.pop(key) for key in list(self._posts) if key[0] in self._aborted]
        for answer in (answer for post in gone for answer in post.waiting):
            answer.set_result(Raised(to_wire(error)))

    def _note_taken(self, key: Key, count: int) -> None:
        post = self._posts[key]
        post.left -= count
        if post.left <= 0:
            del self._posts[key]
