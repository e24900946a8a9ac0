"""Servers under attack: a job trains on them while all ports receive malformed inputs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rpcmp.errors import RpcmpError
from rpcmp.net.peer_connection import Dialer
from rpcmp.net.security import Security
from rpcmp.server.client import StageClient
from tests.support.fuzz import http2
from tests.support.fuzz.entry_points import EntryPoint
from tests.support.fuzz.inputs import Input
from tests.support.fuzz.messages import Job
from tests.support.fuzz.sender import Sender, send_one
from tests.support.fuzz.watched import BEGINNING
from tests.support.processes import Server, connect, poll_for, rpcmp_process, running_server

UNDER = (sys.executable, "-m", "tests.support.fuzz.watched")
"""A command that runs a server whose tasks can be counted."""

ASK_SECONDS = 0.2

FILLING = 50
"""Calls over one connection."""


@dataclass(frozen=True)
class Resources:
    """Resources of an idle server.

    Attributes:
        descriptors, tasks: numbers of open descriptors and of tasks.
        resident: bytes of memory.
    """

    descriptors: int
    tasks: int
    resident: int


@dataclass
class Report:
    """Results of a siege.

    Attributes:
        seen: resources of each server before, after the first half and after the second.
        parameters: hash of the final parameters of each job that ran meanwhile.
    """

    seen: list[list[Resources]]
    parameters: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Siege:
    """Servers, a job for them, and their entry points.

    Attributes:
        servers: servers started under `UNDER`.
        config: the job.
        entry_points: the ways to connect.
        certs: folder of the driver's certificate; None: no TLS.
    """

    servers: Sequence[Server]
    config: Path
    entry_points: Sequence[EntryPoint]
    certs: Path | None = None

    def drive(self) -> str:
        """Run the job once; return the hash of its parameters.

        The job has its own process, because this may not be the main thread.
        """
        options = ["--json", "--connect", connect(self.servers)]
        certs = [] if self.certs is None else ["--certs", str(self.certs)]
        result = rpcmp_process("drive", self.config, *options, *certs)
        assert result.code == 0, result.err
        assert "fault" not in {event["event"] for event in result.events}, result.out
        return str(result.event("summary")["parameters_sha256"])

    def run(self, count: int, seed: int) -> Report:
        """Send `count` inputs while jobs run one after the other."""
        asyncio.run(self._fill())
        report = Report([self.look()])
        for half in (0, 1):
            asyncio.run(self._attack(count // 2, 2 * seed + half, report))
            report.seen.append(self._settled(report.seen[0]))
        return report

    def look(self) -> list[Resources]:
        """Return the resources of each server."""
        return [_look(server) for server in self.servers]

    async def _fill(self) -> None:
        """Fill each gRPC server's queue for unclaimed calls to its final size."""
        calls = (http2.call("/nobody/takes", b"", 2 * number + 1) for number in range(FILLING))
        one = Input(http2.opening() + b"".join(calls))
        entry_points = [entry_point for entry_point in self.entry_points if entry_point.speaks_grpc]
        for entry_point, server in itertools.product(entry_points, self.servers):
            for _ in range(1000 // FILLING):
                await send_one(entry_point, server.address, one)

    def _settled(self, before: Sequence[Resources]) -> list[Resources]:
        """Return each server's resources once its connections and tasks are back to `before`."""

        def is_settled() -> bool:
            pairs = zip(self.look(), before, strict=True)
            return all(
                now.descriptors <= then.descriptors and now.tasks <= then.tasks
                for now, then in pairs
            )

        try:
            poll_for(is_settled, "all connections to be closed, and all tasks to end")
        except AssertionError as error:
            last_lines = [server.run.err[-1] for server in self.servers]
            raise AssertionError(f"{before} before, {self.look()} now; {last_lines}") from error
        return self.look()

    async def _attack(self, count: int, seed: int, report: Report) -> None:
        job = Job()
        sender = Sender(self.entry_points, [server.address for server in self.servers], job, seed)
        asking = asyncio.create_task(self._ask(job))
        sending = asyncio.create_task(sender.send(count))
        try:
            while True:  # all inputs are sent while a job runs
                report.parameters.append(await asyncio.to_thread(self.drive))
                if sending.done():
                    break
            await sending
        finally:
            for task in (asking, sending):
                task.cancel()
            await asyncio.gather(asking, sending, return_exceptions=True)

    async def _ask(self, job: Job) -> None:
        """Ask the server repeatedly which job runs, as any peer can."""
        dialer = Dialer(Security(self.certs))
        async with StageClient("stage0", self.servers[0].address, dialer) as client:
            while True:
                with contextlib.suppress(RpcmpError):
                    described = await client.connect()
                    job.job_id, job.generation = described.holdings_of, described.generation
                await asyncio.sleep(ASK_SECONDS)


def _look(server: Server) -> Resources:
    process = psutil.Process(server.pid)
    tasks = _tasks(server)
    return Resources(process.num_fds(), tasks, process.memory_info().rss)


def _tasks(server: Server) -> int:
    lines = [line for line in server.run.err if line.startswith(BEGINNING)]
    server.run.process.send_signal(signal.SIGUSR2)

    def answers() -> list[str]:
        return [line for line in server.run.err if line.startswith(BEGINNING)][len(lines) :]

    return int(poll_for(answers, "the number of tasks")[0].removeprefix(BEGINNING).split()[0])


@contextlib.contextmanager
def besieged(num_stages: int, certs: Path | None = None) -> Iterator[list[Server]]:
    """Start servers on loopback that report their tasks."""
    with contextlib.ExitStack() as stack:
        servers = []
        for index in range(num_stages):
            options = [] if certs is None else ["--certs", str(certs / f"stage{index}")]
            place = ("--stage", str(index), "--listen", "127.0.0.1:0")
            server = running_server(*place, *options, owner=f"stage {index}", under=UNDER)
            servers.append(stack.enter_context(server))
        yield servers
