"""What a supervisor observes of a child: its activity, its stacks, heartbeats, state, memory.

Activity and stacks are written to memory that child and supervisor share, so that the supervisor
can read them at any time: a child that has crashed, is stopped, or holds the interpreter's lock for
ever cannot answer a question.

A heartbeat comes from a thread of its own. It stops with the process, or if something holds the
interpreter's lock for ever; a layer that computes for a long time does not stop it. Heartbeats
carry what the supervisor cannot see from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import math
import mmap
import os
import re
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from rpcmp.process.sockets import Connections
from rpcmp.process.stopped import POLL_SECONDS, kill_stopped_loaders, sleep_late, stopped

NO_MICROBATCH = -1

PHASE_BYTES = 16
"""The longest name of a phase."""

_MAX_MICROBATCH = 2**31 - 1

_RECORD = struct.Struct(f"<{PHASE_BYTES}sqqd")


class Doing(NamedTuple):
    """One activity that takes time.

    Attributes:
        phase: "build", "join", "forward", "backward", "weight", "sum", "optimizer", "saving"; for
            the driver "plan", "join", "data", "step", "evaluation", "report"; empty while waiting.
        microbatch: its index, or NO_MICROBATCH.
        seconds: elapsed so far.
    """

    phase: str
    step: int
    microbatch: int
    seconds: float


class Activity:
    """The current activity of the thread that works: a record of 40 bytes, written without a lock.

    Args:
        fd: of a page of shared memory; not owned. None for memory of this process alone.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._memory = mmap.mmap(-1 if fd is None else fd, mmap.PAGESIZE)
        self._step = 0
        if not any(self._memory[: _RECORD.size]):
            _RECORD.pack_into(self._memory, 0, b"", 0, NO_MICROBATCH, 0.0)

    def start(self, phase: str, step: int = 0, microbatch: int = NO_MICROBATCH) -> None:
        """Record the start of an activity, which ends the one before."""
        self._step = step
        record = phase.encode(), step, microbatch, time.monotonic()
        _RECORD.pack_into(self._memory, 0, *record)

    def stop(self) -> None:
        """Record that the thread waits."""
        self.start("", self._step)

    @contextlib.contextmanager
    def during(self, phase: str, step: int = 0) -> Iterator[None]:
        self.start(phase, step)
        try:
            yield
        finally:
            self.stop()

    def read(self) -> Doing:
        """Return the current activity, or the last one of a process that has ended."""
        phase, step, microbatch, since = _RECORD.unpack_from(self._memory)
        now = time.monotonic()
        seconds = now - since if 0 < since < now else 0.0
        # A process whose memory is corrupt may have written anything here.
        name = phase.rstrip(b"\0").decode(errors="replace")
        step, microbatch = max(0, step), min(max(NO_MICROBATCH, microbatch), _MAX_MICROBATCH)
        return Doing(name, step, microbatch, seconds)


DUMP_SIGNAL = signal.SIGUSR1
"""Makes a child's main thread dump the stacks of all threads, while no other thread moves."""

FORCED_DUMP_SIGNAL = signal.SIGRTMIN
"""Makes a child dump its stacks at once, even if a thread holds the interpreter's lock for ever.
The other threads run on meanwhile, so faulthandler may read a frame that is gone and crash."""

MAX_STACKS = 64 * 1024

_DUMP_FRAME = re.compile(rf'  File "{re.escape(__file__)}", line \d+ in _write\n')


def enable_stack_dumps(fd: int) -> None:
    """Have this process write its stacks to `fd` on one of these signals, or when it crashes."""

    def _write(signum: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(fd)

    signal.signal(DUMP_SIGNAL, _write)
    faulthandler.register(FORCED_DUMP_SIGNAL, fd)
    faulthandler.enable(fd)


class Stacks:
    """The stack dumps of a child, in memory that its supervisor owns."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("rpcmp-stacks")

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return os.fstat(self.fd).st_size

    def read(self, start: int = 0) -> str:
        """Return the last MAX_STACKS of what was written after `start`, busy threads first."""
        start = max(start, self.size - MAX_STACKS)
        text = os.pread(self.fd, MAX_STACKS, start).decode(errors="replace")
        threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", _DUMP_FRAME.sub("", text))
        return "\n".join(sorted(threads, key=_is_waiting)).strip()

    def __del__(self) -> None:
        os.close(self.fd)


def _is_waiting(thread: str) -> bool:
    """Whether the innermost frame is in one of Python's libraries in which threads wait."""
    innermost = next((line for line in thread.splitlines() if line.startswith("  File")), "")
    return bool(re.search(r"/(threading|selectors|socket|queue|thread)\.py\"", innermost))


BEAT_SECONDS = 0.5
"""Between two heartbeats."""

GRACE_SECONDS = 0.1
"""For reading heartbeats that have arrived already."""

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_USER, _SYSTEM = 11, 12
"""Fields of /proc/PID/stat, counted after the name, which may contain anything."""


def start_heartbeat(
    send: Callable[[dict[str, Any]], None], more: Callable[[], dict[str, Any]]
) -> None:
    """Start the heartbeat thread, which calls `send` with each heartbeat.

    Args:
        more: returns what else a heartbeat carries.

    A heartbeat without "ways" carries no new counts of bytes: `Connections.look` was too early.
    """

    def beat() -> None:
        pause, connections = threading.Event(), Connections()
        while not pause.wait(BEAT_SECONDS):
            ways = connections.look()
            counted = {} if ways is None else {"ways": ways}
            send({"event": "beat", **counted, **more()})

    threading.Thread(target=beat, name="rpcmp-heartbeat", daemon=True).start()


STOPPED_SHARE = 0.25
"""Part of the time without a heartbeat for which a process may be known to be stopped."""


class HeartbeatMonitor:
    """Detects that a child is stopped, or its heartbeats have ended once they have begun.

    Args:
        timeout: seconds without a heartbeat after which the child counts as lost, and four times
            those that it may be stopped; 0 for never.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._last = math.inf

    def begin(self) -> None:
        """Expect heartbeats from now on."""
        self._last = time.monotonic()

    def beat(self) -> None:
        if self._last < math.inf:
            self._last = time.monotonic()

    async def lost(self, pid: int) -> float:
        """Return, once the child is silent or stopped, the seconds since its last heartbeat.

        Args:
            pid: the child.
        """
        if not self._timeout:
            await asyncio.Future()
        signs = [
            asyncio.ensure_future(self.silent()),
            asyncio.ensure_future(stopped(pid, STOPPED_SHARE * self._timeout)),
            asyncio.ensure_future(kill_stopped_loaders(pid)),
        ]
        try:
            done, _ = await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
            for sign in done:
                sign.result()  # an error is no sign of a loss
        finally:
            for sign in signs:
                sign.cancel()
        begun = self._last < math.inf
        return time.monotonic() - self._last if begun else STOPPED_SHARE * self._timeout

    async def silent(self) -> None:
        """Return once heartbeats have been missing too long.

        If the supervisor itself was held up, it first reads the heartbeats that have arrived
        meanwhile. That time does not count: the child may have been held up as well.
        """
        while True:
            if (left := self._last + self._timeout - time.monotonic()) <= 0:
                await asyncio.sleep(GRACE_SECONDS)
                if time.monotonic() - self._last >= self._timeout:
                    return
                continue
            late = await sleep_late(min(left, POLL_SECONDS))
            self._last += late  # which a heartbeat may have changed meanwhile


def core_seconds() -> tuple[float, float]:
    """Return for how long the calling thread has had a core, and has waited for one.

    The latter is 0 where the kernel does not tell.
    """
    try:
        used, waited, *_ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
    except (OSError, ValueError):
        used = waited = 0
    return (used / 1e9, waited / 1e9) if used else (time.thread_time(), 0.0)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if unknown."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process; 0 if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS
    except (OSError, ValueError, IndexError):
        return 0.0
