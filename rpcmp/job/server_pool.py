"""The stage servers of a job, over all its generations: found or started, awaited, replaced, freed.

This is where a lost server is replaced. If the job started it, it is started again. Any other is
waited for: an operator or systemd restarts it at the same address, or a spare takes over its stage.
Workers are replaced by their servers, which start new ones for each generation; see `worker_group`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from rpcmp.checkpoint.folder import new_name
from rpcmp.checkpoint.slots import HeldSnapshots
from rpcmp.config.schema import Config
from rpcmp.config.topology import Member
from rpcmp.errors import (
    ConfigError,
    JobError,
    RecoveryTimeoutError,
    RpcmpError,
    SecurityError,
    UnavailableError,
    WorkerDiedError,
)
from rpcmp.job.failure_detection import task_group
from rpcmp.job.server_calls import ANSWER_SECONDS, describe, dialer_for, require_addresses
from rpcmp.net.identity import NO_TLS
from rpcmp.net.peer_connection import Dialer
from rpcmp.observability.events import Event, ReplacedEvent, WaitingEvent, WarningEvent
from rpcmp.process import interpreter
from rpcmp.process.fork_client import DRIVERS, WORKERS, Forks
from rpcmp.process.forked import ForkedChild
from rpcmp.process.logging import collector
from rpcmp.process.sandbox.confinement import FileAccess, hidden_by
from rpcmp.process.stopped import kill_if_stopped
from rpcmp.server.client import StageClient
from rpcmp.server.stage_server import sweep_leftovers
from rpcmp.v1 import control_pb2 as pb

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


RETRY_SECONDS = 0.2


class ServerPool:
    """The stage servers of one job.

    Args:
        connect: addresses of running servers, one per worker; None uses the config's or, if it has
            none, starts servers on this machine.

    Raises:
        ConfigError, SecurityError: see `require_addresses` and `dialer_for`.

    Attributes:
        addresses: of the servers, by worker.
        is_local: whether the job has started its servers itself.
        driver_id: unique for each start of a driver.
        supersedes: ids of the drivers that this one has taken the job over from.
        drops_held: whether to claim servers that hold another job, whose driver was lost.
        job_id: unique for each run.
        run_folder: the name of the folder of the run's checkpoints; see rpcmp.checkpoint.folder.
    """

    def __init__(
        self,
        config: Config,
        connect: Sequence[str] | None = None,
        report: Callable[[Event], None] = lambda event: None,
        forks: Forks | None = None,
    ) -> None:
        self.addresses = list(config.addresses if connect is None else connect)
        require_addresses(config, self.addresses)
        self.dialer = dialer_for(config, [*self.addresses, *config.recovery.spares])
        self.job_id, self.driver_id = uuid.uuid4().hex, uuid.uuid4().hex
        self.supersedes: list[str] = []
        self.drops_held = False
        self.run_folder = new_name(self.job_id)
        self._config = config
        self._report = report
        self._spares = list(config.recovery.spares)
        self.forks = forks or forks_for(config, connect)
        self._owns_forks = forks is None
        self._local = None if self.addresses else LocalServers(self.forks, serve_options(config))

    def take_over(self, job_id: str, drivers: list[str], addresses: Sequence[str]) -> None:
        """Go on with another driver's job, at the servers that it had last."""
        self.job_id, self.supersedes = job_id, drivers
        if len(addresses) != len(self.addresses):
            return
        self.dialer.security.require_allowed(addresses)
        for index, (ours, theirs) in enumerate(zip(self.addresses, addresses, strict=True)):
            if theirs in self._spares:
                stage = self._config.workers[index].label
                self._spares.remove(theirs)
                self.addresses[index] = theirs
                self._report(ReplacedEvent(stage=stage, lost=ours, address=theirs))

    @property
    def is_local(self) -> bool:
        return self._local is not None

    @property
    def file_access(self) -> FileAccess | None:
        """The files that the driver process may open; None: it is not confined."""
        config, confine = self._config, self._config.security.confine
        if confine is False or (confine is None and self._local is not None):
            return None
        hidden = hidden_by(config.certs_folder, needed=config.folder)
        return FileAccess(hidden=hidden).reading(config.folder, *config.paths_read)

    async def open(self) -> None:
        if self._local is not None and not self.addresses:
            self.addresses = await self._local.start(self._config.workers)

    async def wait_until_ready(self) -> None:
        async with task_group() as tasks:
            for index in range(len(self.addresses)):
                tasks.create_task(self._wait_for(index))

    def client(self, address: str) -> StageClient:
        """Return a client of one server, which has to present the certificate of its stage."""
        worker = self._config.workers[self.addresses.index(address)]
        return StageClient(worker.label, address, self.dialer, worker.stage_index)

    async def holdings(self) -> dict[str, HeldSnapshots]:
        """Return the job's snapshots that each worker's server holds; none if it is gone."""
        names = [worker.label for worker in self._config.workers]
        servers = await asyncio.gather(*map(self._describe_if_trusted, self.addresses))
        return {
            name: HeldSnapshots.from_proto(server.holdings)
            if server is not None and server.holdings_of == self.job_id
            else HeldSnapshots()
            for name, server in zip(names, servers, strict=True)
        }

    async def free(self, generation: int) -> None:
        """Free all servers; stop those that the job has started."""
        stop = pb.StopRequest(job_id=self.job_id, generation=generation, driver_id=self.driver_id)
        try:
            await asyncio.gather(*(self._try_stop(address, stop) for address in self.addresses))
            if self._local is not None:
                await self._local.stop()
        finally:
            if self._owns_forks:
                await self.forks.close()

    async def _try_stop(self, address: str, request: pb.StopRequest) -> None:
        async with self.client(address) as client:
            with contextlib.suppress(RpcmpError):  # gone, free already, or another job's
                await client.connect(ANSWER_SECONDS, starting=False)
                await client.stop(request)

    async def _wait_for(self, index: int) -> None:
        stage, lost_at = self._config.workers[index].label, time.monotonic()
        recovery, is_reported, last_problem = self._config.recovery, False, ""
        while True:
            if self._local is not None and self._local.has_ended(index):
                self.addresses[index] = await self._local.restart(index)
            server, problem = None, ""
            try:
                server = await describe(self.client(self.addresses[index]))
            except SecurityError as error:
                if NO_TLS not in (problem := str(error)):
                    raise
            if server is not None and not server.draining:
                return
            waited = time.monotonic() - lost_at
            if waited >= recovery.replace_after and await self._replace(index):
                continue
            if waited >= recovery.give_up_after:
                raise RecoveryTimeoutError(
                    f"the server of stage {stage!r} at {self.addresses[index]} did not come back "
                    f"within {recovery.give_up_after:.0f} s, and no spare can take its place"
                    f"{problem and f'; {problem}'}"
                )
            if not is_reported:
                is_reported = True
                self._report(WaitingEvent(stage=stage, address=self.addresses[index]))
            if problem and problem != last_problem:  # it was restarted without its certificate
                self._report(WarningEvent(text=f"{problem}; the run waits for another one there"))
            last_problem = problem
            await asyncio.sleep(RETRY_SECONDS)

    async def _describe_if_trusted(self, address: str) -> pb.DescribeResponse | None:
        with contextlib.suppress(SecurityError):
            return await describe(self.client(address))
        return None

    async def _replace(self, index: int) -> bool:
        """Let a free spare take over a stage; returns whether there is one."""
        worker = self._config.workers[index]
        for spare in list(self._spares):
            client = StageClient(worker.label, spare, self.dialer, worker.stage_index)
            server = await describe(client)
            is_free = server is not None and server.spare and not (server.job or server.draining)
            if is_free and spare in self._spares:  # another stage may have taken it meanwhile
                self._spares.remove(spare)
                lost, self.addresses[index] = self.addresses[index], spare
                self._report(ReplacedEvent(stage=worker.label, lost=lost, address=spare))
                return True
        return False


def forks_for(config: Config, connect: Sequence[str] | None) -> Forks:
    """Return the fork server for a job's driver, and for workers of servers that it starts."""
    addresses = config.addresses if connect is None else connect
    return Forks([DRIVERS] if addresses else [WORKERS, DRIVERS])


@contextlib.asynccontextmanager
async def connected(
    config: Config, dialer: Dialer, addresses: Sequence[str], num_local: int, forks: Forks
) -> AsyncIterator[list[StageClient]]:
    """Connect to stage servers without running a job there, to measure or inspect their hosts.

    Args:
        addresses: of running servers, one per worker; empty: start servers on this machine.
        num_local: how many servers to start there, for the first workers.
    """
    local = LocalServers(forks, serve_options(config))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(local.stop)
        addresses = addresses or await local.start(config.workers[:num_local])
        clients = []
        for worker, address in zip(config.workers, addresses, strict=False):
            client = StageClient(worker.label, address, dialer, worker.stage_index)
            clients.append(await stack.enter_async_context(client))
        yield clients
