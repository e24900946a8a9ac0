"""A supervisor's side of its fork server, see `rpcmp.process.__main__`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import signal
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rpcmp.errors import JobError, WorkerDiedError
from rpcmp.process import interpreter
from rpcmp.process.environment import compute_environment

WORKERS, DRIVERS = "rpcmp.worker.preload", "rpcmp.driver.process"
"""Imported before any worker is forked, and before any driver process."""

MAX_BYTES = 64 * 1024

GONE = (
    f"the process on {platform.node()} that imports torch and forks workers has died; its standard "
    "error says why"
)


class Forked:
    """A process that was forked; what Child needs of an asyncio.subprocess.Process.

    Attributes:
        pid: process id.
        returncode: None while it runs; -n when signal n ended it.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    def end(self, code: int) -> None:
        """Hear that it has ended."""
        self.returncode = code
        self._ended.set()

    async def wait(self) -> int:
        """The exit code, once it has ended."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode


class Forks:
    """Children by fork, of a fork server that is started when there is first need of it.

    Closed by `close`, or as an async context manager.

    Args:
        preloaded: modules that are imported before all forks, WORKERS and DRIVERS.
        line: to the fork server of another supervisor, for one thread; None: of this one's own.
    """

    def __init__(self, preloaded: Sequence[str], line: socket.socket | None = None) -> None:
        self._preloaded = preloaded
        self._environment = compute_environment(threads=1)
        self._starting = asyncio.Lock()
        self._server: asyncio.subprocess.Process | None = None
        self._line: socket.socket | None = None
        self._children: dict[int, Forked] = {}
        self._asked: deque[asyncio.Future[Forked]] = deque()
        if line is not None:
            self._listen(line)

    async def fork(self, module: str, environment: Mapping[str, str], fds: Sequence[int]) -> Forked:
        """A child that runs `module` as `python -m` does.

        Args:
            environment: of the child, beyond our own; where it is another one than before, what was
                forked before is ended.
            fds: what the child inherits, see `rpcmp.process.channel.begin_child`.

        Raises:
            WorkerDiedError: the fork server ended meanwhile.
            JobError: the system gives no more processes.
        """
        await self._require(environment)
        asked = asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        self._send({"op": "fork", "module": module}, fds)
        forked: Forked = await asked
        return forked

    async def another_line(self) -> socket.socket:
        """A line for another supervisor on this machine to fork by; its children end with it."""
        await self._require(self._environment)
        ours, theirs = _line()
        with ours:
            self._send({"op": "adopt"}, [ours.fileno()])
        return theirs

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the fork server, where it is our own, and all that were forked."""
        self._hang_up()
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                self._server.kill()
            await self._server.wait()
            self._server = None

    async def _require(self, environment: Mapping[str, str]) -> None:
        async with self._starting:
            if self._line is None or environment != self._environment:
                await self._start(environment)

    async def _start(self, environment: Mapping[str, str]) -> None:
        await self.close()
        self._environment = dict(environment)
        ours, theirs = _line()
        with theirs:
            self._server = await interpreter.start(
                "rpcmp.process",
                [str(theirs.fileno()), str(os.getpid()), *self._preloaded],
                # A process's title must not be written over its environment.
                {**environment, "SPT_NOENV": "1"},
                [theirs.fileno()],
            )
        self._listen(ours)

    def _listen(self, line: socket.socket) -> None:
        line.setblocking(False)
        self._line = line
        asyncio.get_running_loop().add_reader(line, self._hear, line)

    def _send(self, message: dict[str, Any], fds: Sequence[int]) -> None:
        assert self._line is not None
        try:
            socket.send_fds(self._line, [json.dumps(message).encode()], fds)
        except OSError:  # it has died
            self._hang_up()

    def _hear(self, line: socket.socket) -> None:
        try:
            data = line.recv(MAX_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up()
            return
        message = json.loads(data)
        match message["event"]:
            case "started":
                self._started(Forked(message["pid"]))
            case "failed":
                asked = self._asked.popleft()
                if not asked.cancelled():
                    asked.set_exception(JobError(f"cannot fork a process: {message['error']}"))
            case "ended":
                self._children.pop(message["pid"]).end(message["code"])

    def _started(self, child: Forked) -> None:
        self._children[child.pid] = child
        asked = self._asked.popleft()
        if asked.cancelled():
            interpreter.kill_group(child.pid)
        else:
            asked.set_result(child)

    def _hang_up(self) -> None:
        """The fork server is gone, or we let go of it, and all children with it."""
        if self._line is not None:
            asyncio.get_running_loop().remove_reader(self._line)
            self._line.close()
            self._line = None
        children, self._children = self._children, {}
        for child in children.values():
            interpreter.kill_group(child.pid)
            child.end(-signal.SIGKILL)
        asked, self._asked = self._asked, deque()
        for waiting in asked:
            if not waiting.cancelled():
                waiting.set_exception(WorkerDiedError(GONE))


def _line() -> tuple[socket.socket, socket.socket]:
    """Two ends; what is sent arrives as one piece, with its descriptors."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
