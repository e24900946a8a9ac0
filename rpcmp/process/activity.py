"""What a child is doing at this moment, for whoever wonders whether it hangs, or where it died.

In memory that child and supervisor share, so it can be read at any time and afterwards: a process
that is stopped, or dead, cannot be asked any more.

Where a child's threads are in its code: written by its `faulthandler`, read by its supervisor.

In memory that both share, because a child that crashes, or that holds the interpreter's lock for
ever, cannot say anything any more.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import re
import signal
import struct
import time
from collections.abc import Iterator
from types import FrameType
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
        fd: of a page of memory, see `rpcmp.process.descriptors`; not owned. None: of this process
        alone.
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


ASKING = signal.SIGUSR1
"""Makes a child write down where its threads are, by its main thread, while no other one moves."""

INSISTING = signal.SIGRTMIN
"""Makes it do so at once, even if some thread holds the interpreter's lock for ever. The others go
on meanwhile, so that faulthandler may read a frame that is gone: such a child crashes by it."""

MAX_BYTES = 64 * 1024

_ITSELF = re.compile(rf'  File "{re.escape(__file__)}", line \d+ in _write\n')


def write_when_asked(fd: int) -> None:
    """Have this process write to `fd` when it gets one of these signals, or crashes.

    Args:
        fd: of its supervisor's `Stacks`; open as long as the process lives.
    """

    def _write(signum: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(fd)

    signal.signal(ASKING, _write)
    faulthandler.register(INSISTING, fd)
    faulthandler.enable(fd)


class Stacks:
    """What a child has written down about itself."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("rpcmp-stacks")

    @property
    def size(self) -> int:
        """Bytes so far."""
        return os.fstat(self.fd).st_size

    def read(self, start: int = 0) -> str:
        """What was written after the first `start` bytes, busy threads first; the last of it."""
        start = max(start, self.size - MAX_BYTES)
        text = os.pread(self.fd, MAX_BYTES, start).decode(errors="replace")
        threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", _ITSELF.sub("", text))
        return "\n".join(sorted(threads, key=_waits)).strip()

    def __del__(self) -> None:
        os.close(self.fd)


def _waits(thread: str) -> bool:
    """Whether a thread is at rest: its innermost frame is one of Python's own libraries'."""
    innermost = next((line for line in thread.splitlines() if line.startswith("  File")), "")
    return bool(re.search(r"/(threading|selectors|socket|queue|thread)\.py\"", innermost))
