"""A supervisor's client of its fork server, see `rpcmp.process.__main__`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import platform
import signal
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from rpcmp.errors import JobError, RpcmpError, WorkerDiedError
from rpcmp.process import interpreter
from rpcmp.process.forked import Forked
from rpcmp.process.interpreter import compute_environment
from rpcmp.process.sandbox.confinement import FileAccess
from rpcmp.process.stopped import kill_if_stopped
from rpcmp.process.template_client import Template

WORKERS, DRIVERS = "rpcmp.worker.process", "rpcmp.driver.process"
"""The modules of workers and of driver processes: preloaded, and run by their `main` in a fork."""

MAX_BYTES = 64 * 1024
MAX_FDS = 2
MAX_PENDING_SOCKETS = 16

END_SECONDS = 1.0
"""For the fork server to end by itself, with its children."""

FORK_SERVER = f"the process on {platform.node()} that imports torch and forks workers"

GONE = f"{FORK_SERVER} has died; its standard error says why"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NetworkOf:
    """The network in which RPC agents of forked processes listen, see `sandbox/namespace.py`.

    Attributes:
        name: equal for processes that reach each other by loopback.
        is_private: whether no other user of the machine is in it.
        reason: why it is not private.
    """

    name: str
    is_private: bool
    reason: str


class Forks:
    """Forks children by a fork server, which is started on first use.

    Closed by `close`, or as an async context manager.

    Args:
        preloaded: modules that the server imports before it forks, WORKERS and DRIVERS.
        line: to the fork server of another supervisor, for one thread; None to start our own.
        lender: by which that supervisor lends another line when this one has ended, see `lend`.

    Attributes:
        template: forks stage servers, which need no torch.
    """

    def __init__(
        self,
        preloaded: Sequence[str],
        line: socket.socket | None = None,
        lender: socket.socket | None = None,
    ) -> None:
        self.template = Template()
        self._preloaded = preloaded
        self._environment = compute_environment(threads=1)
        self._lender, self._lent_environment = lender, self._environment
        self._has_asked = False
        self._starting = asyncio.Lock()
        # Sockets that were requested and not yet read wait in the line's buffer.
        self._requesting = asyncio.Semaphore(MAX_PENDING_SOCKETS)
        self._server: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._line: socket.socket | None = None
        self._is_used = True
        self._children: dict[int, Forked] = {}
        self._requests: deque[asyncio.Future[Any]] = deque()
        if line is not None:
            self._connect(line)

    async def start(self) -> None:
        """Start the server now: until it is asked for something, it imports meanwhile."""
        await self._require_server(self._environment)

    async def fork(
        self,
        module: str,
        environment: Mapping[str, str],
        fds: Sequence[int],
        file_access: FileAccess | None,
        scratch: str = "",
    ) -> Forked:
        """Fork a child that runs the `main` of `module`.

        Args:
            environment: of the child, beyond our own. If it differs from the last one, the fork
                server is restarted, and its children end.
            fds: what the child inherits, see `rpcmp.process.channel.connect_to_supervisor`; the
                last one of a confined child is its standard output and error.
            file_access: what the child may open, if it is confined.
            scratch: the folder for temporary files of a confined child.

        Raises:
            WorkerDiedError: the fork server is gone, or the system refuses it the process, for want
                of memory, processes or descriptors; another try may succeed.
        """
        await self._require_server(environment)
        message = {
            "op": "fork",
            "module": module,
            "file_access": None if file_access is None else file_access.to_message(),
            "scratch": scratch,
        }
        try:
            forked: Forked = await self._request(message, fds)
        except WorkerDiedError:
            raise
        except JobError as error:
            raise WorkerDiedError(f"{FORK_SERVER} cannot fork: {error}") from error
        return forked

    async def network(self) -> NetworkOf:
        await self._require_server(self._environment)
        network: NetworkOf = await self._request({"op": "network"})
        return network

    async def add_address(self, rank: int) -> None:
        """Add the address that the group's member `rank` listens on to its network."""
        await self._require_server(self._environment)
        await self._request({"op": "address", "rank": rank})

    async def connectable(self) -> socket.socket:
        async with self._requesting:
            connectable: socket.socket = await self._request({"op": "socket"})
            return connectable

    async def listener(self) -> socket.socket:
        """Return a TCP socket that listens on loopback in the network of forked processes."""
        listener: socket.socket = await self._request({"op": "listener"})
        return listener

    async def new_line(self) -> socket.socket:
        """Return a line by which another supervisor here may fork; its children end with it."""
        await self._require_server(self._environment)
        ours, theirs = _line()
        with ours:
            self._send({"op": "adopt"}, [ours.fileno()])
        if self._line is None:  # the server has just died
            theirs.close()
            raise WorkerDiedError(GONE)
        return theirs

    async def lend(self, borrower: socket.socket) -> None:
        """Lend another supervisor here a line whenever it asks for one, until it ends.

        If the fork server dies, one new one then serves all supervisors: each of their own would
        import torch for itself, all at once.
        """
        borrower.setblocking(False)
        with borrower:
            try:
                while await asyncio.get_running_loop().sock_recv(borrower, 1):
                    with await self._line_to_lend() as line:
                        socket.send_fds(borrower, [b"!"], [line.fileno()])
            except ConnectionError:
                pass
            except (OSError, RpcmpError) as error:  # it then starts a fork server of its own
                log.warning("a stage server gets no processes from us: %s", error)

    async def _line_to_lend(self) -> socket.socket:
        try:
            return await self.new_line()
        except WorkerDiedError:  # the server has just died; the next one has not
            return await self.new_line()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all children, and the fork server if it is our own, and the template."""
        await asyncio.gather(self._end_server(), self.template.close())

    async def _end_server(self) -> None:
        may_import = bool(self._requests) or not self._is_used  # then it leaves nothing
        self._disconnect()
        if self._watching is not None:
            self._watching.cancel()
        if self._server is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0 if may_import else END_SECONDS):
                    await self._server.wait()  # it removes what its children leave
            with contextlib.suppress(ProcessLookupError):
                self._server.kill()
            await self._server.wait()
            self._server = None

    async def _require_server(self, environment: Mapping[str, str]) -> None:
        async with self._starting:
            if self._line is None or environment != self._environment:
                await self._start(environment)

    async def _start(self, environment: Mapping[str, str]) -> None:
        if environment == self._lent_environment and (line := await self._borrow()) is not None:
            await self._end_server()
            self._environment = dict(environment)
            self._connect(line)
            return
        namespaces: list[int] = []
        if self._line is not None:  # what others have forked in the same network stays reachable
            namespaces = await self._request({"op": "namespaces"})
        await self._end_server()
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
        self._is_used = False
        self._watching = asyncio.create_task(kill_if_stopped(self._server, FORK_SERVER))
        self._connect(ours)

    async def _borrow(self) -> socket.socket | None:
        """Return a line of the supervisor that lends us some; None if there is none, or no more."""
        if self._lender is None:
            return None
        self._lender.setblocking(False)
        loop, answered = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._lender, answered.set)
        fds: list[int] = []
        try:
            if not self._has_asked:  # who has asked before was cancelled: its answer is ours
                self._lender.send(b"?")
                self._has_asked = True
            await answered.wait()
            self._has_asked = False
            _, fds, _, _ = socket.recv_fds(self._lender, 1, 1)
        except ConnectionError:
            pass
        finally:
            loop.remove_reader(self._lender)
        if fds:
            return socket.socket(fileno=fds[0])
        self._lender.close()
        self._lender = None
        return None

    def _connect(self, line: socket.socket) -> None:
        line.setblocking(False)
        self._line = line
        asyncio.get_running_loop().add_reader(line, self._read, line)

    def _request(self, message: dict[str, Any], fds: Sequence[int] = ()) -> asyncio.Future[Any]:
        request = asyncio.get_running_loop().create_future()
        if self._line is None:
            request.set_exception(WorkerDiedError(GONE))
            return request
        self._requests.append(request)
        self._send(message, fds)
        return request

    def _send(self, message: dict[str, Any], fds: Sequence[int]) -> None:
        assert self._line is not None
        self._is_used = True
        try:
            socket.send_fds(self._line, [json.dumps(message).encode()], fds)
        except OSError:  # it has died
            self._disconnect()

    def _read(self, line: socket.socket) -> None:
        try:
            data, fds, flags, _ = socket.recv_fds(line, MAX_BYTES, MAX_FDS)
        except BlockingIOError:
            return
        except OSError:
            data, fds, flags = b"", [], 0
        if not data:
            self._disconnect()
            return
        message = json.loads(data)
        if flags & socket.MSG_CTRUNC:  # we may open no more files: the kernel has dropped some
            for fd in fds:
                os.close(fd)
            message = {"event": "failed", "error": os.strerror(errno.EMFILE)}
        match message["event"]:
            case "started":
                self._add_child(Forked(message["pid"]))
            case "network":
                del message["event"]
                self._answer(NetworkOf(**message))
            case "namespaces":
                self._answer(fds)
            case "address":
                self._answer(None)
            case "socket":
                self._answer(socket.socket(fileno=fds[0]))
            case "failed":
                request = self._requests.popleft()
                if not request.cancelled():
                    why = message["error"]
                    request.set_exception(JobError(f"the system refuses it: {why}"))
            case "ended":
                self._children.pop(message["pid"]).set_returncode(message["code"])

    def _add_child(self, child: Forked) -> None:
        self._children[child.pid] = child
        if not self._answer(child):
            interpreter.kill_group(child.pid)

    def _answer(self, answer: Forked | NetworkOf | socket.socket | list[int] | None) -> bool:
        request = self._requests.popleft()
        if request.cancelled():
            return False
        request.set_result(answer)
        return True

    def _disconnect(self) -> None:
        if self._line is not None:
            asyncio.get_running_loop().remove_reader(self._line)
            self._line.close()
            self._line = None
        children, self._children = self._children, {}
        for child in children.values():
            interpreter.kill_group(child.pid)
            child.set_returncode(-signal.SIGKILL)
        requests, self._requests = self._requests, deque()
        for request in requests:
            if not request.cancelled():
                request.set_exception(WorkerDiedError(GONE))


def _line() -> tuple[socket.socket, socket.socket]:
    """Both ends of a line. A message arrives as one piece, with its descriptors."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
