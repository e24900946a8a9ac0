"""What a child is doing at this moment, for whoever wonders whether it hangs, or where it died.

In memory that child and supervisor share, so it can be read at any time and afterwards: a process
that is stopped, or dead, cannot be asked any more.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

NO_MICROBATCH = -1

PHASE_BYTES = 16
"""The longest name of a phase."""

_MOST = 2**31 - 1

_RECORD = struct.Struct(f"<{PHASE_BYTES}sqqd")


class Doing(NamedTuple):
    """One thing that takes time.

    Attributes:
        phase: "build", "join", "forward", "backward", "weight", "sum", "optimizer", "saving"; of
            the driver "plan", "join", "data", "step", "evaluation", "report"; empty: it waits.
        step, microbatch: of which; NO_MICROBATCH: of none.
        seconds: so far.
    """

    phase: str
    step: int
    microbatch: int
    seconds: float


class Activity:
    """Written by the thread that works; a record of 40 bytes, so nobody waits for a lock.

    Args:
        fd: of a page of memory, see `rpcmp.sealed`; not owned. None: of this process alone.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._memory = mmap.mmap(-1 if fd is None else fd, mmap.PAGESIZE)
        self._step = 0
        if not any(self._memory[: _RECORD.size]):
            _RECORD.pack_into(self._memory, 0, b"", 0, NO_MICROBATCH, 0.0)

    def begin(self, phase: str, step: int = 0, microbatch: int = NO_MICROBATCH) -> None:
        """Note what begins now."""
        self._step = step
        record = phase.encode(), step, microbatch, time.monotonic()
        _RECORD.pack_into(self._memory, 0, *record)

    def end(self) -> None:
        """Note that it waits now."""
        self.begin("", self._step)

    @contextlib.contextmanager
    def doing(self, phase: str, step: int = 0) -> Iterator[None]:
        """Note what is done within the block."""
        self.begin(phase, step)
        try:
            yield
        finally:
            self.end()

    def read(self) -> Doing:
        """What is done now, or was when the process ended; on the same machine."""
        phase, step, microbatch, since = _RECORD.unpack_from(self._memory)
        now = time.monotonic()
        seconds = now - since if 0 < since < now else 0.0
        # A process whose memory is broken may have written anything here.
        name = phase.rstrip(b"\0").decode(errors="replace")
        step, microbatch = max(0, step), min(max(NO_MICROBATCH, microbatch), _MOST)
        return Doing(name, step, microbatch, seconds)
