"""A supervisor's one child: spawned, listened to, ended.

Spawned from the event loop's thread, which lives as long as the supervisor: PR_SET_PDEATHSIG fires
when the *thread* that spawned ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from rpcmp.errors import WorkerDiedError, from_wire
from rpcmp.process.channel import Message

MAX_MESSAGE = 64 * 2**20
"""Bytes of the longest message that a child may send."""

LAST_WORDS_SECONDS = 0.2
"""How long after its end a child's last message may still be under way."""


class Child:
    """A running `python -m MODULE` with a channel to it. Made by `spawn`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def spawn(
        cls,
        module: str,
        environment: Mapping[str, str],
        arguments: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Start `python -m module CHANNEL_FD PARENT_PID ARGUMENTS...`.

        Its standard output goes to our standard error: ours may be somebody's data.

        Args:
            module: has a `__main__` that calls `rpcmp.process.channel.begin_child`.
            environment: set in addition to our own.
            arguments: after the two that `begin_child` reads.
            pass_fds: file descriptors to inherit besides the channel's.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                # -P: a file in the current directory must not pass for a module.
                *("-P", "-m", module, str(fd), str(os.getpid()), *arguments),
                env={**os.environ, **environment},
                pass_fds=(fd, *pass_fds),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_fd(sys.stderr) else None,
                start_new_session=True,  # what the user's code forks is ended together with it
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_MESSAGE)
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -n when signal n ended it."""
        return self._process.returncode

    def send(self, message: Message) -> None:
        """Send one message; it is lost where the child has ended."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def ask(self, order: Message) -> Message:
        """The answer of a child that has one thing to do; ends the child.

        Raises:
            RpcmpError: what the child answered with an "error".
            WorkerDiedError: it ended without an answer.
        """
        self.send(order)
        try:
            async with contextlib.aclosing(self.messages()) as messages:
                async for answer in messages:
                    if answer["event"] == "error":
                        raise from_wire(answer["error"])
                    return answer
            code = await self.wait()
        finally:
            await self.kill()
        raise WorkerDiedError(f"a process that was to {order['op']} (pid {self.pid}) ended: {code}")

    async def messages(self) -> AsyncGenerator[Message, None]:
        """What the child says, until it has ended.

        The end of the line is not enough: a process that the user's code has forked holds a copy.
        """
        ended = asyncio.ensure_future(self._process.wait())
        try:
            while line := await self._line(ended):
                yield json.loads(line)
        finally:
            ended.cancel()

    async def _line(self, ended: asyncio.Future[int]) -> bytes:
        """The next line; nothing where there will be none."""
        reading = asyncio.ensure_future(self._reader.readline())
        either: list[asyncio.Future[Any]] = [reading, ended]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():  # it has ended: what it said before is on its way
            await asyncio.wait([reading], timeout=LAST_WORDS_SECONDS)
        if not reading.done():
            reading.cancel()
            return b""
        try:
            line = reading.result()
        except ConnectionError:
            return b""
        return line if line.endswith(b"\n") else b""

    async def wait(self, timeout: float | None = None) -> int | None:
        """The exit code, or None if the child still runs after `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                return await self._process.wait()
        return None

    async def kill(self) -> None:
        """End the child at once, and what it has forked; returns when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._writer.close()


def _has_fd(stream: object) -> bool:
    """Whether a standard stream is a real file; a notebook's is not."""
    try:
        return stream.fileno() >= 0  # type: ignore[attr-defined, no-any-return]
    except (OSError, AttributeError, ValueError):
        return False
