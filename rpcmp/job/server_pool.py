"""The stage servers of a job, over all its generations: found or started, awaited, replaced, freed.

A generation ends with whatever went wrong; the servers are the job's until it ends. One that is
gone is started again where the job has started it, and else waited for: by hand or by systemd it
comes back to the same address, or a spare takes its stage.

Stage servers that a job starts for itself, on this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rpcmp.checkpoint.runs import new_name
from rpcmp.config.schema import Config
from rpcmp.config.topology import Member
from rpcmp.errors import ConfigError, JobError, RecoveryTimeoutError, RpcmpError, UnreachableError
from rpcmp.job.recovery import HeldSnapshots
from rpcmp.job.server_calls import dialer_of, require_one_each
from rpcmp.observability.events.definitions import ReplacedEvent, WaitingEvent
from rpcmp.observability.events.event import Event
from rpcmp.process.fork_client import DRIVERS, WORKERS, Forks
from rpcmp.process.logging import display
from rpcmp.process.sandbox.confinement import Reach, hidden_by
from rpcmp.server.client import StageClient
from rpcmp.v1 import control_pb2 as pb

START_SECONDS = 30.0
STOP_SECONDS = 10.0


class LocalServers:
    """The same `rpcmp serve` that a host would run, as children of this process.

    Args:
        forks: where their workers come from.
        options: more of `rpcmp serve`, see `options_for`.
    """

    def __init__(self, forks: Forks, options: Sequence[str] = ()) -> None:
        self._forks = forks
        self._options = list(options)
        self._workers: list[Member] = []
        self._processes: dict[int, asyncio.subprocess.Process] = {}

    async def start(self, workers: Sequence[Member]) -> list[str]:
        """Start a server for each of them on a free port; returns their addresses."""
        self._workers = list(workers)
        return await asyncio.gather(*(self._start(index) for index in range(len(workers))))

    def has_ended(self, index: int) -> bool:
        """Whether the server of a worker is gone; one that is merely slow is not."""
        return self._processes[index].returncode is not None

    async def restart(self, index: int) -> str:
        """Start the server of one worker again, whatever became of it; returns its address."""
        await _end(self._processes[index])
        return await self._start(index)

    async def stop(self) -> None:
        """End all servers; returns when they are gone."""
        await asyncio.gather(*map(_end, self._processes.values()))
        self._processes.clear()

    async def _start(self, index: int) -> str:
        worker = self._workers[index]
        command = [sys.executable, "-P", "-m", "rpcmp", "serve"]
        command += ["--stage", str(worker.stage_index), "--replica", str(worker.replica)]
        command += ["--listen", "127.0.0.1:0", "--parent", str(os.getpid())]
        command += self._options
        command += display.options()  # it shares our standard error
        with await self._forks.new_line() as forks:
            process = await asyncio.create_subprocess_exec(
                *(*command, "--forks", str(forks.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=[forks.fileno()],
                env={key: value for key, value in os.environ.items() if key != "RPCMP_CERTS"},
                start_new_session=True,  # a Ctrl-C is for the driver, which then ends its servers
            )
        self._processes[index] = process
        if process.stdout is None:
            raise AssertionError("the process was given a pipe")
        line = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                line = await process.stdout.readline()
        found = re.search(r"127\.0\.0\.1:\d+", line.decode(errors="replace"))
        if not found:
            raise JobError(f"the server of stage {worker.label!r} did not start: {line!r}")
        return found[0]


def options_for(config: Config) -> list[str]:
    """Options of `rpcmp serve` for a job: where its checkpoints lie, and what its code may reach.

    Raises:
        ConfigError: something that the code is to read is not there.
    """
    options = ["--checkpoints", str(config.checkpoint_folder)]
    if not config.security.confine:
        return options
    for path in config.data_paths:
        if not Path(path).exists():
            raise ConfigError(f"there is no {path} on this machine; see `data.paths` and `init`")
    return [
        *options,
        "--confine",
        *(option for path in config.data_paths for option in ("--data", path)),
    ]


async def _end(process: asyncio.subprocess.Process) -> None:
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signum)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
                return


ANSWER_SECONDS = 2.0
"""How long a server that may be gone has to say that it is not; at once where none listens."""

RETRY_SECONDS = 0.2


class ServerPool:
    """The stage servers of one job.

    Args:
        config: the job.
        connect: addresses of running servers, one a worker; None uses the config's or, where it has
            none, starts servers on this machine.
        report: told of servers that are waited for or replaced.
        forks: where the driver process comes from, and the workers of servers started here; None:
            one of its own.

    Raises:
        ConfigError: not one address a worker, or one that is not on loopback and there are no
            certificates; spares for servers that this run starts by itself.
        SecurityError: the certificate cannot be used.

    Attributes:
        addresses: of the servers, by worker.
        dialer: how they are talked to.
        forks: as given.
        job_id: unique for each run.
        run_folder: the name of the folder of the run's checkpoints; see rpcmp.checkpoint.runs.
    """

    def __init__(
        self,
        config: Config,
        connect: Sequence[str] | None = None,
        report: Callable[[Event], None] = lambda event: None,
        forks: Forks | None = None,
    ) -> None:
        self.addresses = list(config.addresses if connect is None else connect)
        require_one_each(config, self.addresses)
        self.dialer = dialer_of(config, [*self.addresses, *config.recovery.spares])
        self.job_id = uuid.uuid4().hex
        self.run_folder = new_name(self.job_id)
        self._config = config
        self._report = report
        self._spares = list(config.recovery.spares)
        self.forks = forks or forks_for(config, connect)
        self._owns_forks = forks is None
        self._local = None if self.addresses else LocalServers(self.forks, options_for(config))

    @property
    def reach(self) -> Reach | None:
        """What the driver's process may open; None: it is not confined."""
        config, confine = self._config, self._config.security.confine
        if confine is False or (confine is None and self._local is not None):
            return None
        hidden = hidden_by(config.certs_folder, needed=config.folder)
        return Reach(hidden=hidden).reading(config.folder, *config.data_paths)

    async def open(self) -> None:
        """Start servers on this machine, where the job has no others.

        Raises:
            JobError: one does not start.
        """
        if self._local is not None and not self.addresses:
            self.addresses = await self._local.start(self._config.workers)

    async def wait_until_ready(self) -> None:
        """Return when every worker has a server that can take its next generation.

        Raises:
            RecoveryTimeoutError: one did not come back in time.
        """
        tasks = [asyncio.create_task(self._wait_for(i)) for i in range(len(self.addresses))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def client(self, address: str) -> StageClient:
        """A connection to one of the servers, which has to be who it should be."""
        worker = self._config.workers[self.addresses.index(address)]
        return StageClient(worker.label, address, self.dialer, worker.stage_index)

    async def holdings(self) -> dict[str, HeldSnapshots]:
        """Which of the job's snapshots every worker's server holds; nothing where it is gone."""
        names = [worker.label for worker in self._config.workers]
        found = await asyncio.gather(*(answer_of(self.client(at)) for at in self.addresses))
        return {
            name: holdings_of(answer.holdings)
            if answer is not None and answer.holdings_of == self.job_id
            else HeldSnapshots()
            for name, answer in zip(names, found, strict=True)
        }

    async def free(self, generation: int) -> None:
        """Free all servers; stop those that were started here."""
        stop = pb.StopRequest(job_id=self.job_id, generation=generation)
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
        stage, lost = self._config.workers[index].label, time.monotonic()
        told = False
        while not await self._is_ready(index):
            if self._local is not None and self._local.has_ended(index):
                self.addresses[index] = await self._local.restart(index)
                continue
            waited = time.monotonic() - lost
            recovery = self._config.recovery
            if waited >= recovery.replace_after and await self._replace(index):
                continue
            if waited >= recovery.give_up_after:
                raise RecoveryTimeoutError(
                    f"the server of stage {stage!r} at {self.addresses[index]} did not come back "
                    f"within {recovery.give_up_after:.0f} s, and no spare can take its place"
                )
            if not told:
                told = True
                self._report(WaitingEvent(stage=stage, address=self.addresses[index]))
            await asyncio.sleep(RETRY_SECONDS)

    async def _is_ready(self, index: int) -> bool:
        if self._local is not None and self._local.has_ended(index):
            return False
        found = await answer_of(self.client(self.addresses[index]))
        return found is not None and not found.draining

    async def _replace(self, index: int) -> bool:
        """Let a spare that is free take over a stage."""
        worker = self._config.workers[index]
        stage = worker.label
        for spare in list(self._spares):
            client = StageClient(stage, spare, self.dialer, worker.stage_index)
            found = await answer_of(client)
            is_free = found is not None and found.spare and not found.job and not found.draining
            if is_free and spare in self._spares:  # nobody else has taken it meanwhile
                self._spares.remove(spare)
                lost, self.addresses[index] = self.addresses[index], spare
                self._report(ReplacedEvent(stage=stage, lost=lost, address=spare))
                return True
        return False


def forks_for(config: Config, connect: Sequence[str] | None) -> Forks:
    """What forks the processes of a job: its driver's, and its workers where it starts servers."""
    addresses = config.addresses if connect is None else connect
    return Forks([DRIVERS] if addresses else [WORKERS, DRIVERS])


def holdings_of(said: Iterable[pb.Holding]) -> HeldSnapshots:
    """What a server says that it holds."""
    by_name = {holding.stage_name: list(holding.steps) for holding in said}
    return HeldSnapshots(by_name.pop("", []), by_name)


async def answer_of(client: StageClient) -> pb.DescribeResponse | None:
    """Who a server says it is; None where nobody answers. Closes the connection."""
    async with client:
        try:
            return await client.connect(ANSWER_SECONDS, starting=False)
        except UnreachableError:
            return None
