"""Stage servers that a job starts for itself, on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rpcmp.config import Config
from rpcmp.errors import ConfigError, JobError
from rpcmp.logs import display
from rpcmp.members import Member
from rpcmp.process.forking import Forks

START_SECONDS = 30.0
STOP_SECONDS = 10.0


class LocalServers:
    """The same `rpcmp serve` that a host would run, as children of this process.

    Args:
        forks: where their workers come from.
        options: more of `rpcmp serve`, see `options_for`.
    """

    def __init__(self, forks: Forks, options: Sequence[str] = ()) -> None:
        self._forks = forks
        self._options = list(options)
        self._workers: list[Member] = []
        self._processes: dict[int, asyncio.subprocess.Process] = {}

    async def start(self, workers: Sequence[Member]) -> list[str]:
        """Start a server for each of them on a free port; returns their addresses."""
        self._workers = list(workers)
        return await asyncio.gather(*(self._start(index) for index in range(len(workers))))

    def has_ended(self, index: int) -> bool:
        """Whether the server of a worker is gone; one that is merely slow is not."""
        return self._processes[index].returncode is not None

    async def restart(self, index: int) -> str:
        """Start the server of one worker again, whatever became of it; returns its address."""
        await _end(self._processes[index])
        return await self._start(index)

    async def stop(self) -> None:
        """End all servers; returns when they are gone."""
        await asyncio.gather(*map(_end, self._processes.values()))
        self._processes.clear()

    async def _start(self, index: int) -> str:
        worker = self._workers[index]
        command = [sys.executable, "-P", "-m", "rpcmp", "serve"]
        command += ["--stage", str(worker.stage_index), "--replica", str(worker.replica)]
        command += ["--listen", "127.0.0.1:0", "--parent", str(os.getpid())]
        command += self._options
        command += display.options()  # it shares our standard error
        with await self._forks.another_line() as forks:
            process = await asyncio.create_subprocess_exec(
                *(*command, "--forks", str(forks.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=[forks.fileno()],
                env={key: value for key, value in os.environ.items() if key != "RPCMP_CERTS"},
                start_new_session=True,  # a Ctrl-C is for the driver, which then ends its servers
            )
        self._processes[index] = process
        if process.stdout is None:
            raise AssertionError("the process was given a pipe")
        line = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                line = await process.stdout.readline()
        found = re.search(r"127\.0\.0\.1:\d+", line.decode(errors="replace"))
        if not found:
            raise JobError(f"the server of stage {worker.label!r} did not start: {line!r}")
        return found[0]


def options_for(config: Config) -> list[str]:
    """Options of `rpcmp serve` for a job: where its checkpoints lie, and what its code may reach.

    Raises:
        ConfigError: something that the code is to read is not there.
    """
    options = ["--checkpoints", str(config.checkpoint_folder)]
    if not config.security.confine:
        return options
    for path in config.data_paths:
        if not Path(path).exists():
            raise ConfigError(f"there is no {path} on this machine; see `data.paths` and `init`")
    return [
        *options,
        "--confine",
        *(option for path in config.data_paths for option in ("--data", path)),
    ]


async def _end(process: asyncio.subprocess.Process) -> None:
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signum)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
                return
