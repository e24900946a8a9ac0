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
from dataclasses import dataclass
from typing import Any, Self

from rpcmp.errors import JobError, WorkerDiedError
from rpcmp.process import interpreter
from rpcmp.process.confinement import Reach
from rpcmp.process.interpreter import compute_environment

WORKERS, DRIVERS = "rpcmp.worker.process", "rpcmp.driver.process"
"""Imported before any worker is forked, and before any driver process."""

MAX_BYTES = 64 * 1024
MAX_FDS = 2
MAX_ASKED = 16

GONE = (
    f"the process on {platform.node()} that imports torch and forks workers has died; its standard "
    "error says why"
)


@dataclass(frozen=True)
class NetworkOf:
    """Where the RPC agents of forked processes listen, see `rpcmp.process.namespace`.

    Attributes:
        name: equal for those who reach each other by loopback.
        is_private: whether no other user of the machine is in it.
        reason: why it is not.
    """

    name: str
    is_private: bool
    reason: str


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
        self._giving = asyncio.Semaphore(MAX_ASKED)  # what is asked for waits in the line's buffer
        self._server: asyncio.subprocess.Process | None = None
        self._line: socket.socket | None = None
        self._children: dict[int, Forked] = {}
        self._asked: deque[asyncio.Future[Any]] = deque()
        if line is not None:
            self._listen(line)

    async def fork(
        self,
        module: str,
        environment: Mapping[str, str],
        fds: Sequence[int],
        reach: Reach | None = None,
        scratch: str = "",
    ) -> Forked:
        """A child that runs `module` as `python -m` does.

        Args:
            environment: of the child, beyond our own; where it is another one than before, what was
                forked before is ended.
            fds: what the child inherits, see `rpcmp.process.channel.begin_child`; of one that is
                confined the last is its standard output and error.
            reach: what the child may open, if it is confined.
            scratch: its folder for temporary files then.

        Raises:
            WorkerDiedError: the fork server ended meanwhile.
            JobError: the system gives no more processes.
        """
        await self._require(environment)
        order = {
            "op": "fork",
            "module": module,
            "reach": None if reach is None else reach.to_message(),
            "scratch": scratch,
        }
        forked: Forked = await self._ask(order, fds)
        return forked

    async def network(self) -> NetworkOf:
        """The network of what is forked."""
        await self._require(self._environment)
        found: NetworkOf = await self._ask({"op": "network"})
        return found

    async def add_address(self, rank: int) -> None:
        """Make the address that a group's member with `rank` listens on in its network."""
        await self._require(self._environment)
        await self._ask({"op": "address", "rank": rank})

    async def connectable(self) -> socket.socket:
        """A TCP socket in the network of what is forked."""
        async with self._giving:
            made: socket.socket = await self._ask({"op": "socket"})
            return made

    async def listener(self, host: str, port: int) -> socket.socket:
        """A TCP socket there that listens.

        Raises:
            JobError: the port is taken.
        """
        made: socket.socket = await self._ask({"op": "listener", "host": host, "port": port})
        return made

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
        namespaces: list[int] = []
        if self._line is not None:  # who was forked elsewhere, in the same network, stays in reach
            namespaces = await self._ask({"op": "namespaces"})
        await self.close()
        self._environment = dict(environment)
        ours, theirs = _line()
        shared = ",".join(map(str, namespaces))
        with theirs, contextlib.ExitStack() as opened:
            for fd in namespaces:
                opened.callback(os.close, fd)
            self._server = await interpreter.start(
                "rpcmp.process",
                [str(theirs.fileno()), str(os.getpid()), shared, *self._preloaded],
                # A process's title must not be written over its environment.
                {**environment, "SPT_NOENV": "1"},
                [theirs.fileno(), *namespaces],
            )
        self._listen(ours)

    def _listen(self, line: socket.socket) -> None:
        line.setblocking(False)
        self._line = line
        asyncio.get_running_loop().add_reader(line, self._hear, line)

    def _ask(self, message: dict[str, Any], fds: Sequence[int] = ()) -> asyncio.Future[Any]:
        """The answer to a message; answers come in the order of what was asked."""
        asked = asyncio.get_running_loop().create_future()
        if self._line is None:
            asked.set_exception(WorkerDiedError(GONE))
            return asked
        self._asked.append(asked)
        self._send(message, fds)
        return asked

    def _send(self, message: dict[str, Any], fds: Sequence[int]) -> None:
        assert self._line is not None
        try:
            socket.send_fds(self._line, [json.dumps(message).encode()], fds)
        except OSError:  # it has died
            self._hang_up()

    def _hear(self, line: socket.socket) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(line, MAX_BYTES, MAX_FDS)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self._hang_up()
            return
        message = json.loads(data)
        match message["event"]:
            case "started":
                self._started(Forked(message["pid"]))
            case "network":
                del message["event"]
                self._answer(NetworkOf(**message))
            case "namespaces":
                self._answer(fds)
            case "address":
                self._answer(None)
            case "socket" if fds:
                self._answer(socket.socket(fileno=fds[0]))
            case "socket" | "failed":
                why = message.get("error", "too many open files")
                asked = self._asked.popleft()
                if not asked.cancelled():
                    asked.set_exception(JobError(f"the system refuses it: {why}"))
            case "ended":
                self._children.pop(message["pid"]).end(message["code"])

    def _started(self, child: Forked) -> None:
        self._children[child.pid] = child
        if not self._answer(child):
            interpreter.kill_group(child.pid)

    def _answer(self, answer: Forked | NetworkOf | socket.socket | list[int] | None) -> bool:
        """Give the answer to who has asked; whether he still waits."""
        asked = self._asked.popleft()
        if asked.cancelled():
            return False
        asked.set_result(answer)
        return True

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
