"""How many bytes of tensors other members have answered to this one, and it has sent them back.

The kernel counts what goes over connections, see `rpcmp.process.traffic`. What goes from process to
process through one machine's memory nobody counts, so this does, where answers arrive.
"""

from __future__ import annotations

import threading
from typing import Any

from rpcmp import tree
from rpcmp.process.traffic import Way


class Payload:
    """Counts. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ways: dict[str, Way] = {}

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
                way = self._ways.get(peer, Way(peer, 0, 0, 0.0))
                self._ways[peer] = way._replace(
                    sent=way.sent + sent, received=way.received + received
                )

    def read(self) -> list[Way]:
        """What was counted since the process began, by the members' names."""
        with self._lock:
            return list(self._ways.values())
