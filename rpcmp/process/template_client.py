"""A supervisor's client of its template, see `rpcmp.process.template`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from rpcmp.errors import WorkerDiedError
from rpcmp.process import interpreter
from rpcmp.process.forked import ForkedChild
from rpcmp.process.stopped import kill_if_stopped

COMMAND = "rpcmp.cli"

SERVERS = ("rpcmp.cli.serve", "rpcmp.server.preloaded")

MAX_BYTES = 64 * 1024

TEMPLATE = f"the process on {platform.node()} that forks stage servers"


class Template:
    """Forks stage servers by a template, which is started on first use, and again if it is lost.

    The servers live on without it. Closed by `close`.

    Args:
        command: the module whose `main` runs in a forked process.
        preloaded: modules that the template imports besides.
    """

    def __init__(self, command: str = COMMAND, preloaded: Sequence[str] = SERVERS) -> None:
        self._command, self._preloaded = command, preloaded
        self._process: asyncio.subprocess.Process | None = None
        self._line: socket.socket | None = None
        self._watching: asyncio.Task[None] | None = None
        self._using = asyncio.Lock()

    async def start(self) -> None:
        """Start it now: it imports meanwhile. If it cannot be started, a fork will say so."""
        async with self._using:
            with contextlib.suppress(WorkerDiedError):
                await self._require_started()

    async def fork(self, arguments: Sequence[str], options: Mapping[str, int]) -> ForkedChild:
        """Fork a process that runs a command.

        Args:
            arguments: of the command, whose name is the first one.
            options: more of them, each with the number of a descriptor that the process gets.

        Raises:
            WorkerDiedError: the template has died, or cannot fork.
        """
        with contextlib.ExitStack() as opened:
            (reading, output), (permit, permitting) = os.pipe(), os.pipe()
            for fd in (output, permit, permitting):
                opened.callback(os.close, fd)
            stdout = await _reader(reading)
            message = {"arguments": [*arguments], "options": [*options]}
            async with self._using:
                await self._require_started()
                answer = await self._ask(message, [output, permit, *options.values()])
            if "error" in answer:
                raise WorkerDiedError(f"{TEMPLATE} cannot fork: {answer['error']}")
            try:
                server = ForkedChild(answer["pid"], stdout)
            except OSError as error:  # the process ends, and would stay a zombie
                asyncio.get_running_loop().run_in_executor(None, os.waitpid, answer["pid"], 0)
                raise WorkerDiedError(f"{TEMPLATE} has forked in vain: {error}") from error
            os.write(permitting, b"!")  # without it the process ends: nobody would know of it
            return server

    async def _require_started(self) -> None:
        if self._line is not None:
            return
        await self.close()
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.setblocking(False)
        environment = {
            # As `rpcmp serve` sets it, before gRPC is imported.
            "GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "NONE"),
            "SPT_NOENV": "1",  # a process's title must not be written over its environment
            "RPCMP_CERTS": None,  # servers of one machine have no certificates
        }
        with theirs:
            arguments = [str(theirs.fileno()), str(os.getpid()), self._command, *self._preloaded]
            try:
                self._process = await interpreter.start(
                    "rpcmp.process.template", arguments, environment, [theirs.fileno()]
                )
            except OSError as error:
                self._end()
                raise WorkerDiedError(f"{TEMPLATE} cannot be started: {error}") from error
        self._watching = asyncio.create_task(kill_if_stopped(self._process, TEMPLATE))

    async def _ask(self, message: dict[str, Any], fds: Sequence[int]) -> dict[str, Any]:
        assert self._line is not None
        data = b""
        try:
            socket.send_fds(self._line, [json.dumps(message).encode()], fds)
            data = await asyncio.get_running_loop().sock_recv(self._line, MAX_BYTES)
        except OSError:
            pass
        finally:
            if not data:  # it has died, or would fork what nobody awaits any more
                self._end()
        if not data:
            raise WorkerDiedError(f"{TEMPLATE} has died")
        answer: dict[str, Any] = json.loads(data)
        return answer

    async def close(self) -> None:
        """End the template, which leaves nothing."""
        self._end()
        if self._process is not None:
            await self._process.wait()
            self._process = None

    def _end(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._watching is not None:
            self._watching.cancel()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


async def _reader(fd: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
    )
    return reader
