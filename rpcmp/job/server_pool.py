"""The stage servers of a job, over all its generations: found or started, awaited, replaced, freed.

This is where a lost server is replaced. If the job started it, it is started again. Any other is
waited for: an operator or systemd restarts it at the same address, or a spare takes over its stage,
or the servers of the other stages do, if their run can do without it (`rpcmp.job.membership`).
Workers are replaced by their servers, which start new ones for each generation; see `worker_group`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from rpcmp.checkpoint.folder import new_name
from rpcmp.checkpoint.slots import HeldSnapshots
from rpcmp.config.schema import Config
from rpcmp.config.topology import Member
from rpcmp.errors import (
    RecoveryTimeoutError,
    RpcmpError,
    SecurityError,
)
from rpcmp.job.driver_record import end_of, signed
from rpcmp.job.failure_detection import task_group
from rpcmp.job.local_servers import LocalServers, serve_options
from rpcmp.job.server_calls import (
    ANSWER_SECONDS,
    code_access,
    describe,
    dialer_for,
    is_free_spare,
    server_addresses,
)
from rpcmp.net.identity import NO_TLS
from rpcmp.net.peer_connection import Dialer
from rpcmp.observability.events import Event, ReplacedEvent, WaitingEvent, WarningEvent
from rpcmp.process.fork_client import DRIVERS, WORKERS, Forks
from rpcmp.process.sandbox.confinement import FileAccess
from rpcmp.server.client import StageClient
from rpcmp.v1 import control_pb2 as pb

RETRY_SECONDS = 0.2


async def _cannot(stages: Sequence[str]) -> bool:
    return False


class ServerPlace(NamedTuple):
    """Where a worker is, and the number of the stage that its server's certificate is for."""

    address: str
    stage_index: int


class ServerPool:
    """The stage servers of one job.

    Args:
        connect: addresses of running servers, one per worker; None uses the config's or, if it has
            none, starts servers on this machine.

    Raises:
        ConfigError, SecurityError: see `server_addresses` and `dialer_for`.

    Attributes:
        is_local: whether the job has started its servers itself.
        can_do_without: whether the run can do without the stages of these names.
        leaving: addresses of servers that do not come back.
        left: the stages that the next generation has to do without.
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
        addresses = server_addresses(config, connect)
        self.dialer = dialer_for(config, [*addresses, *config.recovery.spares])
        self._own_addresses = {*addresses}
        self._places: dict[str, ServerPlace] = {}
        self._settle(config.workers, addresses)
        self.job_id, self.driver_id = uuid.uuid4().hex, uuid.uuid4().hex
        self.supersedes: list[str] = []
        self.drops_held = False
        self.run_folder = new_name(self.job_id)
        self._config = config
        self._report = report
        self._spares = list(config.recovery.spares)
        self.forks = forks or forks_for(config, connect)
        self._owns_forks = forks is None
        self._local = None if addresses else LocalServers(self.forks, serve_options(config))
        self.can_do_without: Callable[[Sequence[str]], Awaitable[bool]] = _cannot
        self._deciding = asyncio.Lock()
        self.leaving: set[str] = set()
        self.left: list[str] = []
        self._departed: list[tuple[str, ServerPlace]] = []

    def _settle(self, workers: Sequence[Member], addresses: Sequence[str]) -> None:
        for worker, address in zip(workers, addresses, strict=bool(addresses)):
            self._places[worker.label] = ServerPlace(address, worker.stage_index)

    @property
    def addresses(self) -> list[str]:
        """Of the servers, by worker; empty before `open` if the job starts them itself."""
        return [place.address for place in self.places]

    @property
    def places(self) -> list[ServerPlace]:
        """Of the workers; empty before `open` if the job starts its servers itself."""
        labels = [worker.label for worker in self._config.workers]
        return [self._places[label] for label in labels] if self._places else []

    @property
    def known_places(self) -> Mapping[str, ServerPlace]:
        """Of all workers that there ever were, by label."""
        return self._places

    def is_guest(self, address: str) -> bool:
        """Whether a server is a spare, or has joined: a run that is resumed may not know it."""
        return not self.is_local and address not in self._own_addresses

    def place(self, label: str) -> ServerPlace:
        return self._places[label]

    def add(self, joined: Mapping[str, ServerPlace]) -> None:
        """Note where the workers of further stages will be; see `use`."""
        self._places.update(joined)
        self.leaving -= {place.address for place in joined.values()}  # one may have come back

    def use(self, config: Config) -> None:
        """Let the job have the stages of this config from now on."""
        self._config = config
        self.left.clear()

    async def dismiss(self, labels: Iterable[str], generation: int) -> None:
        """Free the servers of workers that the job has no longer."""
        places = [(label, self._places[label]) for label in labels]
        await self._stop(places, generation, dismisses=True)

    @property
    def has_departed(self) -> bool:
        """Whether servers have left that wait until the job needs them no longer."""
        return bool(self._departed)

    async def dismiss_departed(self, generation: int) -> None:
        here = self.addresses  # one may have joined again meanwhile
        departed = [each for each in self._departed if each[1].address not in here]
        self._departed.clear()
        await self._stop(departed, generation, dismisses=True)

    async def _stop(
        self, places: Iterable[tuple[str, ServerPlace]], generation: int, dismisses: bool = False
    ) -> None:
        stop = pb.StopRequest(
            job_id=self.job_id,
            generation=generation,
            driver_id=self.driver_id,
            dismisses=dismisses,
            ended_signature=None
            if dismisses
            else signed(self.dialer.security, end_of(self.job_id, self.driver_id)),
        )
        await asyncio.gather(*(self._try_stop(*place, stop) for place in places))

    def _move(self, index: int, address: str) -> None:
        """Note that a worker's server is at another address now."""
        label = self._config.workers[index].label
        self._places[label] = self._places[label]._replace(address=address)

    def take_over(
        self, job_id: str, drivers: list[str], config: Config, places: Sequence[ServerPlace]
    ) -> None:
        """Go on with another driver's job, at the servers that it had last.

        Args:
            config: with its stages.
            places: of its workers.
        """
        self.job_id, self.supersedes = job_id, drivers
        if len(places) != len(config.workers):
            return
        self.dialer.security.require_allowed([place.address for place in places])
        self._config = config
        for index, (worker, theirs) in enumerate(zip(config.workers, places, strict=True)):
            ours = self._places.setdefault(worker.label, theirs)  # it may have joined
            if theirs.address in self._spares:
                self._spares.remove(theirs.address)
                self._move(index, theirs.address)
                self._report(
                    ReplacedEvent(stage=worker.label, lost=ours.address, address=theirs.address)
                )

    @property
    def is_local(self) -> bool:
        return self._local is not None

    @property
    def file_access(self) -> FileAccess | None:
        """The files that the driver process may open; None: it is not confined."""
        return code_access(self._config, [] if self.is_local else self.addresses)

    async def open(self) -> None:
        if self._local is not None and not self.addresses:
            self._settle(self._config.workers, await self._local.start(self._config.workers))

    async def wait_until_ready(self) -> None:
        """Wait for all servers; `left` has the stages of those that are not waited for."""
        self.left.clear()
        async with task_group() as tasks:
            for index in range(len(self.addresses)):
                tasks.create_task(self._wait_for(index))

    def client(self, address: str) -> StageClient:
        """Return a client of one server, which has to present the certificate of its stage."""
        index = self.addresses.index(address)
        label, place = self._config.workers[index].label, self.places[index]
        return StageClient(label, address, self.dialer, place.stage_index)

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
        try:
            await self._stop([*self._places.items(), *self._departed], generation)
            if self._local is not None:
                await self._local.stop()
        finally:
            if self._owns_forks:
                await self.forks.close()

    async def _try_stop(self, label: str, place: ServerPlace, request: pb.StopRequest) -> None:
        async with StageClient(label, place.address, self.dialer, place.stage_index) as client:
            with contextlib.suppress(RpcmpError):  # gone, free already, or another job's
                await client.connect(ANSWER_SECONDS, starting=False)
                await client.stop(request)

    async def _wait_for(self, index: int) -> None:
        stage, lost_at = self._config.workers[index].label, time.monotonic()
        recovery, is_reported, last_problem = self._config.recovery, False, ""
        while True:
            if self._local is not None and self._local.has_ended(index):
                self._move(index, await self._local.restart(index))
            server, problem = None, ""
            try:
                server = await describe(self.client(self.addresses[index]))
            except SecurityError as error:
                if NO_TLS not in (problem := str(error)):
                    raise
            address = self.addresses[index]
            if server is not None and not server.draining:
                self.leaving.discard(address)
                return
            if server is not None and server.leaves:
                self.leaving.add(address)
            waited, is_leaving = time.monotonic() - lost_at, address in self.leaving
            if waited >= recovery.replace_after or is_leaving:
                if await self._replace(index):
                    continue
                async with self._deciding:  # of one after the other
                    if await self.can_do_without([*self.left, stage]):
                        self.left.append(stage)
                        self._departed.append((stage, self.places[index]))
                        return
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
        label, place = self._config.workers[index].label, self.places[index]
        for spare in list(self._spares):
            client = StageClient(label, spare, self.dialer, place.stage_index)
            server = await describe(client)
            # Another stage may have taken it meanwhile.
            if server is not None and is_free_spare(server) and spare in self._spares:
                self._spares.remove(spare)
                self._move(index, spare)
                self._departed.append((label, place))
                self._report(ReplacedEvent(stage=label, lost=place.address, address=spare))
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
