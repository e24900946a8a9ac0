"""A pool of stage servers that the jobs of this process use one after the other.

    replaces rpcmp.job.server_pool.LocalServers
    job ──start──> takes servers from the pool, which starts missing ones
        ──stop───> returns them once they are idle and hold nothing of the job any more

    with lend_servers(2) as servers: rpcmp("drive", config, "--connect", connect(servers))

They equal the servers that `rpcmp drive` starts: children of this process, which fork by its shared
fork server. But each of them may serve any stage, and writes checkpoints to any folder. A job
starts its own servers if it is confined, or if its test has `own_forks`. `running("drive", ...)`
does so too, because it is a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from rpcmp.config.topology import Member
from rpcmp.job.local_servers import LocalServers
from rpcmp.process.fork_client import Forks
from rpcmp.v1 import control_pb2 as pb
from tests.support import processes
from tests.support.reaper import TOKEN
from tests.support.sharedforks import BEFORE, DRIVE

SECONDS = 30.0
"""Seconds in which a server must be idle after the end of its job."""

NOT_OURS = (TOKEN, "RPCMP_CERTS")
"""Variables that the pool's servers must not inherit."""


class PooledServer:
    """A running `rpcmp serve --spare`.

    Args:
        line: a line to the fork server that its workers come from.
        listen: the address to listen on; a free port by default.

    Attributes:
        address: the address that it listens on.
    """

    def __init__(self, line: int, listen: str = "127.0.0.1:0") -> None:
        command = [sys.executable, "-P", "-m", "rpcmp", "serve", "--spare", "--listen", listen]
        more = ["--parent", str(os.getpid()), "--checkpoints", "/", "--forks", str(line)]
        with tempfile.TemporaryFile() as err:
            self.process = subprocess.Popen(
                [*command, *more],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=err,
                pass_fds=[line],
                env={name: value for name, value in BEFORE.items() if name not in NOT_OURS},
                start_new_session=True,
            )
            assert self.process.stdout is not None
            output = self.process.stdout.readline().decode()
            if (found := re.search(r"127\.0\.0\.1:\d+", output)) is None:
                self.end()
                err.seek(0)
                raise AssertionError(f"a stage server did not start: {output}{err.read().decode()}")
        self.address = found[0]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def is_idle(self) -> bool:
        """Return whether the server has no job, or has ended."""
        if self.has_ended:
            return True
        found = processes.describe(self)
        return found.state == pb.SERVER_STATE_IDLE and not found.job and not found.draining

    def end(self) -> None:
        """Kill the server and the workers forked for it."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class ServerPool:
    """A pool of idle servers. Thread-safe."""

    def __init__(self) -> None:
        self._all: list[PooledServer] = []
        self._idle: list[PooledServer] = []
        self._lock = threading.Lock()
        # Servers end with the thread that started them, so this thread must outlive them.
        self._starter = ThreadPoolExecutor(1, "pooled-servers")

    def take(self) -> PooledServer:
        """Return an idle server, or start one."""
        with self._lock:
            while self._idle:
                server = self._idle.pop()
                if not server.has_ended:
                    return server
        return self.start()

    def start(self, listen: str = "127.0.0.1:0") -> PooledServer:
        """Start a new server."""
        return self._starter.submit(self._start, listen).result()

    def put(self, server: PooledServer) -> None:
        """Return a server to the pool, which must be idle or ended.

        Raises:
            AssertionError: the server was neither, and has been killed.
        """
        try:
            processes.poll_for(server.is_idle, "it to be idle", SECONDS)
        except (AssertionError, grpc.RpcError) as error:
            server.end()
            raise AssertionError(
                f"the server at {server.address} was left busy: {error}"
            ) from error
        with self._lock:
            self._idle.append(server)

    def taken(self) -> list[PooledServer]:
        """Return the servers that jobs use."""
        with self._lock:
            return [each for each in self._all if not (each in self._idle or each.has_ended)]

    def close(self) -> None:
        """Stop all servers."""
        with self._lock:
            for server in self._all:
                server.end()
            self._idle.clear()

    def _start(self, listen: str) -> PooledServer:
        with processes.FORKS.line_of(DRIVE) as line:
            server = PooledServer(line.fileno(), listen)
        self._all = [*(each for each in self._all if not each.has_ended), server]
        return server


POOL = ServerPool()


@contextlib.contextmanager
def lend_servers(count: int) -> Iterator[list[PooledServer]]:
    """Lend servers of the pool to one test, whose jobs connect to them.

    They must be idle again at the end. A test may stop or kill a server: the next test gets
    another. They share the driver's network; `running_servers` starts servers as on several hosts.
    """
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            found.append(POOL.take())
            stack.callback(POOL.put, found[-1])
        yield found


@contextlib.contextmanager
def lend_server_at(address: str) -> Iterator[PooledServer]:
    """Start a new server at the address of one that has ended."""
    server = POOL.start(address)
    try:
        yield server
    finally:
        POOL.put(server)


class PooledServers(LocalServers):
    """Servers of the pool for one job; see LocalServers."""

    def __init__(self, forks: Forks, options: Sequence[str] = ()) -> None:
        super().__init__(forks, options)
        self._is_pooled = processes.FORKS.in_use and "--confine" not in options
        self._taken: dict[int, PooledServer] = {}

    async def start(self, workers: Sequence[Member]) -> list[str]:
        if not self._is_pooled:
            return await super().start(workers)
        return list(await asyncio.gather(*(self._take(index) for index in range(len(workers)))))

    def has_ended(self, index: int) -> bool:
        return self._taken[index].has_ended if self._is_pooled else super().has_ended(index)

    async def restart(self, index: int) -> str:
        if not self._is_pooled:
            return await super().restart(index)
        self._taken[index].end()
        return await self._take(index)

    async def stop(self) -> None:
        if not self._is_pooled:
            await super().stop()
        await asyncio.gather(*(asyncio.to_thread(POOL.put, each) for each in self._taken.values()))
        self._taken.clear()

    async def _take(self, index: int) -> str:
        self._taken[index] = await asyncio.to_thread(POOL.take)
        return self._taken[index].address
