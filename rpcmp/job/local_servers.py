"""Stage servers that a job starts itself, on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rpcmp.config.schema import Config
from rpcmp.config.topology import Member
from rpcmp.errors import ConfigError, JobError, UnavailableError, WorkerDiedError
from rpcmp.job.failure_detection import task_group
from rpcmp.process import interpreter
from rpcmp.process.fork_client import Forks
from rpcmp.process.forked import ForkedChild
from rpcmp.process.logging import collector
from rpcmp.process.stopped import kill_if_stopped
from rpcmp.server.stage_server import sweep_leftovers

START_SECONDS = 30.0
STOP_SECONDS = 10.0

MORE_STARTS = 3
"""How often a server is started again that was killed before it served."""

log = logging.getLogger(__name__)


class LocalServers:
    """Stage servers on this machine: `rpcmp serve` with these options, as child processes."""

    def __init__(self, forks: Forks, options: Sequence[str] = ()) -> None:
        self._forks = forks
        self._options = list(options)
        self._workers: list[Member] = []
        self._processes: dict[int, asyncio.subprocess.Process | ForkedChild] = {}
        self._tasks: dict[int, list[asyncio.Task[None]]] = {}
        self._is_forking = False

    async def start(self, workers: Sequence[Member]) -> list[str]:
        """Start a server per worker on a free port; returns their addresses."""
        self._workers = list(workers)
        self._is_forking = len(workers) > 1  # one interpreter costs less than a template and a fork
        if self._is_forking:
            await self._forks.template.start()
        async with task_group() as tasks:  # if one fails, none of the others is started again
            starting = [tasks.create_task(self._start(index)) for index in range(len(workers))]
        return [each.result() for each in starting]

    def has_ended(self, index: int) -> bool:
        return self._processes[index].returncode is not None

    async def restart(self, index: int) -> str:
        """Start the server of one worker again, also if it still runs; returns its address."""
        await self._end(index)
        return await self._start(index)

    async def stop(self) -> None:
        await asyncio.gather(*map(self._end, self._processes))
        if any(process.returncode for process in self._processes.values()):
            await asyncio.to_thread(sweep_leftovers)  # one was killed, and none comes after it
        self._processes.clear()

    async def _end(self, index: int) -> None:
        for task in self._tasks[index]:
            task.cancel()
        await _end(self._processes[index])

    async def _start(self, index: int) -> str:
        for _ in range(MORE_STARTS):
            try:
                return await self._start_once(index)
            except WorkerDiedError as error:  # it, or the fork server, was killed meanwhile
                log.warning("%s; it is started again", error)
                if index in self._processes:
                    await self._end(index)
        return await self._start_once(index)

    async def _start_once(self, index: int) -> str:
        worker = self._workers[index]
        arguments = ["serve", "--stage", str(worker.stage_index), "--replica", str(worker.replica)]
        arguments += ["--listen", "127.0.0.1:0", "--parent", str(os.getpid())]
        arguments += self._options
        arguments += collector.options()  # it shares our standard error
        lender, borrower = socket.socketpair()
        with contextlib.ExitStack() as on_error:
            on_error.enter_context(borrower)
            with lender, await self._forks.new_line() as forks:
                lines = {"--forks": forks.fileno(), "--lender": lender.fileno()}
                process = await self._spawn(arguments, lines)
            on_error.pop_all()
        self._processes[index] = process
        name = f"the server of stage {worker.label!r}"
        self._tasks[index] = [
            asyncio.create_task(kill_if_stopped(process, name)),
            asyncio.create_task(self._forks.lend(borrower)),
        ]
        if process.stdout is None:
            raise AssertionError("the process was given a pipe")
        line = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                line = await process.stdout.readline()
        address = re.search(r"127\.0\.0\.1:\d+", line.decode(errors="replace"))
        if not address and process.stdout.at_eof():  # it has ended
            code = await process.wait()
            is_temporary = code < 0 or code == UnavailableError.exit_code
            kind = WorkerDiedError if is_temporary else JobError
            raise kind(f"{name} {interpreter.describe_exit(code)} before it served")
        if not address:
            raise JobError(f"{name} did not start: {line!r}")
        return address[0]

    async def _spawn(
        self, arguments: Sequence[str], lines: Mapping[str, int]
    ) -> asyncio.subprocess.Process | ForkedChild:
        """Fork a server if there is a template, or start an interpreter for it."""
        if self._is_forking:
            try:
                async with asyncio.timeout(START_SECONDS):
                    return await self._forks.template.fork(arguments, lines)
            except (TimeoutError, WorkerDiedError) as error:
                log.debug("%s", error)
        options = [word for name, fd in lines.items() for word in (name, str(fd))]
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "rpcmp", *arguments, *options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=list(lines.values()),
            env={key: value for key, value in os.environ.items() if key != "RPCMP_CERTS"},
            start_new_session=True,  # a Ctrl-C is for the driver, which ends its servers
        )


def serve_options(config: Config) -> list[str]:
    """Return options of `rpcmp serve` for a job: its checkpoints, and what its code may open."""
    options = ["--checkpoints", str(config.checkpoint_folder)]
    if config.security.confine:
        options.append("--confine")
        for path in config.paths_read:
            if not Path(path).exists():
                raise ConfigError(
                    f"there is no {path} on this machine; see `data.paths` and `init`"
                )
            options += ["--data", path]
    return options


async def _end(process: asyncio.subprocess.Process | ForkedChild) -> None:
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signum)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
                return
