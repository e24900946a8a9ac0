"""Where a child's threads are in its code: written by its `faulthandler`, read by its supervisor.

In memory that both share, because a child that crashes, or that holds the interpreter's lock for
ever, cannot say anything any more.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
from types import FrameType

ASKING = signal.SIGUSR1
"""Makes a child write down where its threads are, by its main thread, while no other one moves."""

INSISTING = signal.SIGRTMIN
"""Makes it do so at once, even if some thread holds the interpreter's lock for ever. The others go
on meanwhile, so that faulthandler may read a frame that is gone: such a child crashes by it."""

MAX_BYTES = 64 * 1024

_ITSELF = re.compile(r'  File "[^"]*/process/stacks\.py", line \d+ in _write\n')


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
