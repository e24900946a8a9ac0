"""Processes that are stopped, as by SIGSTOP: they are noticed, and killed if they are ours.

That a process is stopped, the kernel tells. A process that waits for its turn on a busy machine is
not, however late its heartbeats are.

A run on one machine has many processes, so whatever waits for a process to be stopped shares one
look at all of them, a task of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import signal
import time
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

STOPPED_SECONDS = 1.5
"""How long a process may be stopped: a shell or a debugger may do that for a moment."""

POLL_SECONDS = 0.5
"""Interval of looks at processes' states."""

LOADERS_SECONDS = 2.0
"""Interval of looks for processes that load samples; most runs have none."""

HELD_UP_SECONDS = 0.5
"""If we wake up later than this, all of the machine may have been suspended."""

LOADERS = (b"rpcmp.data.batches", b"multiprocessing")
"""Words in the command lines of processes that load samples: a stage's own, and torch's."""

_STATE = re.compile(r"^State:\s*(.+)$", re.MULTILINE)

log = logging.getLogger(__name__)


def kernel_state(pid: int) -> str:
    """Return the kernel's state of a process, such as "State: T (stopped)"; empty if unknown."""
    with contextlib.suppress(OSError):  # it has ended
        found = _STATE.search(_read(f"/proc/{pid}/status").decode(errors="replace"))
        return f"State: {found[1]}" if found else ""
    return ""


def _read(path: str) -> bytes:
    """Return a small file of /proc; faster than a Path, as servers do it for ever."""
    with open(path, "rb", buffering=0) as file:
        return file.read()


@dataclass(eq=False)
class _Wait:
    """A wait for a process to be stopped for `timeout` seconds."""

    pid: int
    timeout: float
    ended: asyncio.Future[None]
    since: float = math.inf

    def look(self, now: float, late: float) -> None:
        """End the wait if it is time; `late` is for how long this process has been held up."""
        is_stopped = kernel_state(self.pid).startswith("State: T")
        self.since = min(self.since + late, now) if is_stopped else math.inf
        if now - self.since >= self.timeout and not self.ended.done():
            self.ended.set_result(None)


class _Looks:
    """The looks at all processes that one event loop waits for."""

    def __init__(self) -> None:
        self._waits: set[_Wait] = set()
        self._looking: asyncio.Task[None] | None = None

    async def wait(self, pid: int, timeout: float) -> None:
        wait = _Wait(pid, timeout, asyncio.get_running_loop().create_future())
        self._waits.add(wait)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        try:
            await wait.ended
        finally:
            self._waits.discard(wait)

    async def _look(self) -> None:
        try:
            while self._waits:
                late = await sleep_late(POLL_SECONDS)
                now = time.monotonic()
                for wait in self._waits:
                    try:
                        wait.look(now, late)
                    except Exception:  # the others are looked at all the same
                        log.exception("cannot look at process %d", wait.pid)
        finally:
            self._looking = None


_looks: WeakKeyDictionary[asyncio.AbstractEventLoop, _Looks] = WeakKeyDictionary()


async def stopped(pid: int, timeout: float = STOPPED_SECONDS) -> None:
    """Return once a process has been stopped for `timeout` seconds.

    Time in which this process itself was held up, as all of a suspended machine, does not count.
    """
    await _looks.setdefault(asyncio.get_running_loop(), _Looks()).wait(pid, timeout)


async def sleep_late(seconds: float) -> float:
    """Sleep, and return for how long this process was held up meanwhile; 0 for a moment."""
    begin = time.monotonic()
    await asyncio.sleep(seconds)
    late = time.monotonic() - begin - seconds
    return late if late > HELD_UP_SECONDS else 0.0


class OwnProcess(Protocol):
    """A child process, see asyncio.subprocess.Process."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...


async def kill_if_stopped(process: OwnProcess, name: str) -> None:
    """Kill a process of ours once it is stopped, so that what follows is as if it had died.

    Args:
        name: of the process, for the log.
    """
    await stopped(process.pid)
    if process.returncode is not None:  # that is another one, with its number
        return
    _kill(name, process.pid)


def _kill(name: str, pid: int) -> None:
    log.warning("%s (pid %d) was stopped: it is killed", name, pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def loaders_of(pid: int) -> set[int]:
    """Return the processes that load samples for a process."""
    found: set[int] = set()
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # it or a child has, or the kernel does not say
                for child in map(int, _read(f"/proc/{pid}/task/{thread}/children").split()):
                    line = _read(f"/proc/{child}/cmdline")
                    if any(word in line for word in LOADERS):
                        found.add(child)
    return found


async def kill_stopped_loaders(pid: int) -> None:
    """Kill each process that loads samples for `pid` once it is stopped; never returns.

    The process that waits for its samples then finds it dead.
    """
    watching: dict[int, asyncio.Task[None]] = {}
    try:
        while True:
            await asyncio.sleep(LOADERS_SECONDS)
            loaders = loaders_of(pid)
            for ended in watching.keys() - loaders:
                watching.pop(ended).cancel()
            for new in loaders - watching.keys():
                watching[new] = asyncio.create_task(_kill_stopped_loader(new, pid))
    finally:
        for task in watching.values():
            task.cancel()


async def _kill_stopped_loader(loader: int, pid: int) -> None:
    while True:
        await stopped(loader)
        if loader in loaders_of(pid):  # else it is another process, with its number
            _kill("a process that loads samples", loader)
