"""A fork server whose children are coroutines, each beside a process that can be killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rpcmp.process.activity import Activity
from rpcmp.process.fork_client import Forks, NetworkOf
from rpcmp.process.forked import ForkedChild
from rpcmp.process.sandbox.confinement import FileAccess

EXIT = 'trap "" USR1 34; read -r code; exit "${code:-137}"'
"""The process beside a coroutine: ignores requests for stacks, exits with a code that it reads."""

BUG = 70
"""Exit code of a child whose coroutine has raised."""

Message = dict[str, Any]


class FakeProcess(ForkedChild):
    """A child as its supervisor sees it, with a real process id, and as its coroutine sees itself.

    Attributes:
        fds: the inherited descriptors beyond those of every child; of a worker, its snapshots.
        beats: whether it sends heartbeats.
        forks: what has made it.
        ended: done as soon as the process has ended, however.
    """

    def __init__(self, fds: Sequence[int], forks: FakeForks) -> None:
        self.forks = forks
        reading, self._exiting = os.pipe()
        pid = os.posix_spawn(
            "/bin/sh",
            ["sh", "-c", EXIT],
            os.environ,
            setpgroup=0,
            file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0)],
        )
        os.close(reading)
        super().__init__(pid, asyncio.StreamReader())
        self._inherited = [os.dup(fd) for fd in fds]
        channel, _, activity, *_ = self._inherited
        self.fds = self._inherited[6:]
        self.activity = Activity(activity)
        self.beats = True
        self.ended = asyncio.get_running_loop().create_future()
        self._channel = socket.socket(fileno=channel)
        self._task: asyncio.Task[int] | None = None

    def run(self, main: Callable[[FakeProcess], Awaitable[int]]) -> None:
        """Run what the process does, and let it exit with the code that this returns."""

        async def exits() -> int:
            self._reader, self._writer = await asyncio.open_connection(
                sock=self._channel, limit=2**24
            )
            try:
                code = await main(self)
            except Exception:  # a mistake in the fake, or in the test
                traceback.print_exc()
                code = BUG
            if self.returncode is None:  # else it was killed just now
                await self._writer.drain()
                self.exit(code)
            return code

        self._task = asyncio.create_task(exits())

    def send(self, message: Message) -> None:
        self.send_raw(json.dumps(message).encode())

    def send_raw(self, line: bytes) -> None:
        self._writer.write(line + b"\n")

    async def receive(self) -> Message:
        """Return the next message of the supervisor; never, if it is gone: it then kills us."""
        line = await self._reader.readline()
        if not line:
            await asyncio.Future()
        message: Message = json.loads(line)
        return message

    def exit(self, code: int) -> None:
        os.write(self._exiting, b"%d\n" % code)

    def strike(self, signum: signal.Signals) -> None:
        os.kill(self.pid, signum)

    def set_returncode(self, code: int) -> None:
        """Note the end of the process: its coroutine ends, and its end of the channel closes."""
        if self._task is not None:
            self._task.cancel()
        if hasattr(self, "_writer"):
            self._writer.close()
        else:
            self._channel.close()
        for fd in self._inherited[1:]:
            os.close(fd)
        os.close(self._exiting)
        self.ended.set_result(code)
        super().set_returncode(code)


class FakeForks(Forks):
    """Forks that run a coroutine instead of a module.

    Args:
        mains: what a child does, by its module.

    Attributes:
        children_made: all of them, in turn.
        slowness: by how much this host computes more slowly than others.
    """

    def __init__(self, mains: Mapping[str, Callable[[FakeProcess], Awaitable[int]]]) -> None:
        self._mains = mains
        self.children_made: list[FakeProcess] = []
        self.slowness = 1.0

    async def start(self) -> None:
        pass

    async def fork(
        self,
        module: str,
        environment: Mapping[str, str],
        fds: Sequence[int],
        file_access: FileAccess | None = None,
        scratch: str = "",
    ) -> FakeProcess:
        child = FakeProcess(fds, self)
        self.children_made.append(child)
        child.run(self._mains[module])
        return child

    async def network(self) -> NetworkOf:
        return NetworkOf("one for all", is_private=True, reason="")

    async def add_address(self, rank: int) -> None:
        pass

    async def close(self) -> None:
        for child in self.children_made:
            if child.returncode is None:
                child.strike(signal.SIGKILL)
                await child.wait()
