"""How many bytes of tensors a process exchanges with each member of its group."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from torch import Tensor

from rpcmp.process.sockets import PeerTraffic
from rpcmp.rpc.shared_memory import SharedTensor


class Payload:
    """Bytes of tensors per member: in its answers, and in gradients sent back. Thread-safe.

    The kernel counts bytes on connections, see `rpcmp.process.sockets`, but not those in memory
    that processes share.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent = Counter[str]()
        self._received = Counter[str]()

    def count(self, peer: str, tensors: Iterable[Tensor | SharedTensor]) -> None:
        """Count an answer's tensors, and the gradients that go back unless a round aborts."""
        with self._lock:
            for tensor in tensors:
                if isinstance(tensor, SharedTensor):
                    size = tensor.nbytes
                else:
                    size = tensor.numel() * tensor.element_size()  # `nbytes` raises for sparse ones
                self._received[peer] += size
                self._sent[peer] += size if tensor.requires_grad else 0

    def read(self) -> list[PeerTraffic]:
        with self._lock:
            return [PeerTraffic(p, self._sent[p], n, 0.0) for p, n in self._received.items() if n]
