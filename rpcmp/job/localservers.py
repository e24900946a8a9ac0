"""Stage servers that a job starts for itself, on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys

from rpcmp.errors import JobError
from rpcmp.process.forking import Forks

START_SECONDS = 30.0
STOP_SECONDS = 10.0


class LocalServers:
    """The same `rpcmp serve` that a host would run, as children of this process.

    Args:
        forks: where their workers come from.
    """

    def __init__(self, forks: Forks) -> None:
        self._forks = forks
        self._processes: dict[int, asyncio.subprocess.Process] = {}

    async def start(self, num_stages: int) -> list[str]:
        """Start one server a stage on a free port; returns their addresses."""
        return await asyncio.gather(*(self._start(index) for index in range(num_stages)))

    def has_ended(self, stage_index: int) -> bool:
        """Whether the server of a stage is gone; one that is merely slow is not."""
        return self._processes[stage_index].returncode is not None

    async def restart(self, stage_index: int) -> str:
        """Start the server of one stage again, whatever became of it; returns its address."""
        await _end(self._processes[stage_index])
        return await self._start(stage_index)

    async def stop(self) -> None:
        """End all servers; returns when they are gone."""
        await asyncio.gather(*map(_end, self._processes.values()))
        self._processes.clear()

    async def _start(self, stage_index: int) -> str:
        command = [sys.executable, "-P", "-m", "rpcmp", "serve", "--stage", str(stage_index)]
        command += ["--listen", "127.0.0.1:0", "--parent", str(os.getpid())]
        with await self._forks.another_line() as forks:
            process = await asyncio.create_subprocess_exec(
                *(*command, "--forks", str(forks.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=[forks.fileno()],
                env={key: value for key, value in os.environ.items() if key != "RPCMP_CERTS"},
                start_new_session=True,  # a Ctrl-C is for the driver, which then ends its servers
            )
        self._processes[stage_index] = process
        if process.stdout is None:
            raise AssertionError("the process was given a pipe")
        line = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                line = await process.stdout.readline()
        found = re.search(r"127\.0\.0\.1:\d+", line.decode(errors="replace"))
        if not found:
            raise JobError(f"the server of stage {stage_index} did not start: {line!r}")
        return found[0]


async def _end(process: asyncio.subprocess.Process) -> None:
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signum)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
                return
