"""How much memory a stage takes: what is left when a model is too big, and what to trade for speed.

On the CPU it is the process's resident memory, as the kernel counts it; on a GPU it is what torch
has allocated there.
"""

from __future__ import annotations

import resource
from pathlib import Path

import torch


class Meter:
    """Measures from its making on, when the stage has been built and nothing has run.

    Args:
        device: where the stage computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle = self._now()

    def read(self) -> dict[str, int]:
        """Bytes: "idle", when the stage had been built, and "peak", the most since then."""
        return {"idle": self._idle, "peak": max(self._idle, self._peak())}

    def _now(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * resource.getpagesize()

    def _peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
