"""The stage servers of a job, over all its generations: found or started, awaited, replaced, freed.

A generation ends with whatever went wrong; the servers are the job's until it ends. One that is
gone is started again where the job has started it, and else waited for: by hand or by systemd it
comes back to the same address, or a spare takes its stage.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Sequence

from rpcmp.checkpoint.runs import new_name
from rpcmp.config import Config
from rpcmp.control.client import StageClient
from rpcmp.errors import ExhaustedError, RpcmpError, UnreachableError
from rpcmp.job.calls import require_one_each
from rpcmp.job.dialing import dialer_of
from rpcmp.job.localservers import LocalServers, options_for
from rpcmp.job.restore import Holdings
from rpcmp.process.channel import Message
from rpcmp.process.confinement import Reach, hidden_by
from rpcmp.process.forking import DRIVERS, WORKERS, Forks
from rpcmp.v1 import control_pb2 as pb

ANSWER_SECONDS = 2.0
"""How long a server that may be gone has to say that it is not; at once where none listens."""

RETRY_SECONDS = 0.2


class Fleet:
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
        report: Callable[[Message], None] = lambda event: None,
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
            ExhaustedError: one did not come back in time.
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

    async def holdings(self) -> dict[str, Holdings]:
        """Which of the job's snapshots every worker's server holds; nothing where it is gone."""
        names = [worker.label for worker in self._config.workers]
        found = await asyncio.gather(*(answer_of(self.client(at)) for at in self.addresses))
        return {
            name: holdings_of(answer.holdings)
            if answer is not None and answer.holdings_of == self.job_id
            else Holdings()
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
                raise ExhaustedError(
                    f"the server of stage {stage!r} at {self.addresses[index]} did not come back "
                    f"within {recovery.give_up_after:.0f} s, and no spare can take its place"
                )
            if not told:
                told = True
                self._report({"event": "waiting", "stage": stage, "address": self.addresses[index]})
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
                self._report({"event": "replaced", "stage": stage, "lost": lost, "address": spare})
                return True
        return False


def forks_for(config: Config, connect: Sequence[str] | None) -> Forks:
    """What forks the processes of a job: its driver's, and its workers where it starts servers."""
    addresses = config.addresses if connect is None else connect
    return Forks([DRIVERS] if addresses else [WORKERS, DRIVERS])


def holdings_of(said: Iterable[pb.Holding]) -> Holdings:
    """What a server says that it holds."""
    by_name = {holding.stage_name: list(holding.steps) for holding in said}
    return Holdings(by_name.pop("", []), by_name)


async def answer_of(client: StageClient) -> pb.DescribeResponse | None:
    """Who a server says it is; None where nobody answers. Closes the connection."""
    async with client:
        try:
            return await client.connect(ANSWER_SECONDS, starting=False)
        except UnreachableError:
            return None
