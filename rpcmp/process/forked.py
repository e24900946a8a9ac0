"""Forked processes, with the part of asyncio.subprocess.Process that is used of them."""

from __future__ import annotations

import asyncio
import os
import signal

UNKNOWN = 255
"""Exit code of a child that some other code of this process has waited for, as asyncio has it."""


class Forked:
    """A process that another one has forked for us, and waits for.

    Attributes:
        returncode: None while it runs; -n if signal n ended it.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    def set_returncode(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode


class ForkedChild(Forked):
    """A child of this process, which another one has forked; see `template`.

    Args:
        stdout: its standard output.
    """

    def __init__(self, pid: int, stdout: asyncio.StreamReader) -> None:
        super().__init__(pid)
        self.stdout = stdout
        self._pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    def send_signal(self, signum: signal.Signals) -> None:
        if self.returncode is None:  # else that may be another one, with its number
            os.kill(self.pid, signum)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        try:
            _, status = os.waitpid(self.pid, 0)
        except ChildProcessError:
            self.set_returncode(UNKNOWN)
        else:
            self.set_returncode(os.waitstatus_to_exitcode(status))
