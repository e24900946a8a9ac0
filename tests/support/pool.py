"""Stage servers that the jobs of this process share, each with the next job: started once.

    in the place of rpcmp.job.localservers.LocalServers
    job ──start──> takes servers from the pool, which starts what is missing
        ──stop───> puts them back, once they are idle and hold nothing of it any more

They are what `rpcmp drive` would start: children of this process that fork by its shared fork
server; but any of them serves any stage, and writes checkpoints anywhere. A job that is confined,
or whose test has `own_forks`, starts servers of its own. So does `running("drive", ...)`, which is
a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from rpcmp.job.localservers import LocalServers
from rpcmp.members import Member
from rpcmp.process.forking import Forks
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1.control_pb2_grpc import ControlStub
from tests.support import processes


class PooledServer:
    """A running `rpcmp serve --spare`."""

    def __init__(self, line: int) -> None:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "rpcmp", "serve", "--spare"),
                *("--listen", "127.0.0.1:0", "--parent", str(os.getpid())),
                *("--checkpoints", "/", "--forks", str(line)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[line],
            env={k: v for k, v in os.environ.items() if k not in (processes.TOKEN, "RPCMP_CERTS")},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        told = self._process.stdout.readline().decode()
        found = re.search(r"127\.0\.0\.1:\d+", told)
        assert found is not None, f"a stage server did not start: {told!r}"
        self.address = found[0]

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def is_idle(self) -> bool:
        """Whether it has forgotten the last job."""
        with grpc.insecure_channel(self.address) as channel:
            found = ControlStub(channel).Describe(pb.DescribeRequest(), timeout=10)
        return found.state == pb.SERVER_STATE_IDLE and not found.job and not found.draining

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class ServerPool:
    """Servers that no job has. Thread-safe."""

    def __init__(self) -> None:
        self._idle: list[PooledServer] = []
        self._lock = threading.Lock()
        # They end with the thread that has started them, so it must be one that stays.
        self._starter = ThreadPoolExecutor(1, "pooled-servers")

    def take(self) -> PooledServer:
        """One that runs."""
        with self._lock:
            while self._idle:
                server = self._idle.pop()
                if not server.has_ended:
                    return server
        return self._starter.submit(self._start).result()

    def put(self, server: PooledServer) -> None:
        """Give one back, which is idle again, or has ended."""
        if server.has_ended:
            return
        processes.poll_for(server.is_idle, f"the server at {server.address} to be idle")
        with self._lock:
            self._idle.append(server)

    def close(self) -> None:
        """End all that lie here."""
        with self._lock:
            for server in self._idle:
                server.end()
            self._idle.clear()

    def _start(self) -> PooledServer:
        line = processes.FORKS.line("drive")
        assert line is not None
        with line:
            return PooledServer(line.fileno())


POOL = ServerPool()


class PooledServers(LocalServers):
    """Servers of the pool, for one job; see LocalServers."""

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
