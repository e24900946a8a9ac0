"""How many bytes of tensors other members have answered to this one, and it has sent them back.

The kernel counts what goes over connections, see `rpcmp.process.traffic`. What goes from process to
process through one machine's memory nobody counts, so this does, where answers arrive.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from rpcmp import tree


class Carried(NamedTuple):
    """Between this process and another member, since the process began.

    Attributes:
        peer: the member's name.
        sent, received: bytes of tensors.
    """

    peer: str
    sent: int
    received: int


class Payload:
    """Counts. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._carried: dict[str, Carried] = {}

    def note(self, peer: str, answer: Any) -> None:
        """Count what a member has answered.

        And the gradients of those of its tensors that require grad: each goes back, unless the
        round is aborted, with the shape and the dtype in which its tensor came.
        """
        sent = received = 0
        for tensor in tree.tensors(answer):
            size = tensor.numel() * tensor.element_size()  # `nbytes` raises for sparse ones
            received += size
            sent += size if tensor.requires_grad else 0
        if received:
            with self._lock:
                so_far = self._carried.get(peer, Carried(peer, 0, 0))
                self._carried[peer] = Carried(peer, so_far.sent + sent, so_far.received + received)

    def read(self) -> list[Carried]:
        """What was counted, member by member."""
        with self._lock:
            return list(self._carried.values())
