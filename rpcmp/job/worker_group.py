"""All stage servers in one generation of a job: claimed, told their stages, watched.

What workers say, as the driver hears it from their servers: in order, and what is missing.

Servers number a worker's lines and keep the newest; a gap says that there were more than that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rpcmp.config.schema import Config
from rpcmp.config.topology import DRIVER, Member, member_names
from rpcmp.errors import DrainingError, RpcmpError, from_wire
from rpcmp.job.first_failure import FirstFailure
from rpcmp.job.recovery import HeldSnapshots, holders
from rpcmp.job.server_calls import all_of
from rpcmp.job.server_pool import holdings_of
from rpcmp.job.telemetry import Vitals
from rpcmp.net.dialer import Dialer
from rpcmp.net.relay import RelayPeer
from rpcmp.observability.events.event import WorkerPlace
from rpcmp.process.channel import Message
from rpcmp.process.logging.records import Entry, Line, entry_of
from rpcmp.server.client import StageClient
from rpcmp.server.connection import machine, versions
from rpcmp.v1 import control_pb2 as pb


class LogCollector:
    """The lines of a generation's workers.

    Args:
        labels: of the workers.
        generation: which group they are in.
        log: told of each line.
    """

    def __init__(
        self, labels: Iterable[str], generation: int, log: Callable[[Entry], None]
    ) -> None:
        self._numbers = dict.fromkeys(labels, 0)
        self._generation = generation
        self._log = log
        self._told = asyncio.Condition()

    async def hear(self, label: str, lines: Iterable[pb.LogLine]) -> None:
        """Tell of what a worker has said, and of how much of it nobody has heard."""
        for line in lines:
            missed = line.number - self._numbers[label] - 1
            if missed > 0:
                text = f"{missed:,} lines are missing here: more were said than could be carried"
                self._tell(label, Line("WARNING", "rpcmp.process.logging", text))
            self._numbers[label] = line.number
            self._tell(label, Line(line.level, line.logger, line.text, line.step, line.count))
        async with self._told:
            self._told.notify_all()

    async def up_to(self, label: str, number: int) -> None:
        """Return when a worker's line of this number has been told."""
        async with self._told:
            await self._told.wait_for(lambda: self._numbers[label] >= number)

    def _tell(self, label: str, line: Line) -> None:
        self._log(entry_of(line, label, self._generation))


Result = TypeVar("Result")

LAST_LINES_SECONDS = 0.5
"""How long it may take to hear what workers have said before something went wrong."""


@dataclass(frozen=True)
class Identity:
    """What every message about a job carries.

    Attributes:
        job_id: unique for each run.
        generation: counts the groups of a run, from 1.
    """

    job_id: str
    generation: int


class WorkerGroup:
    """The stage servers of one generation of one job.

    Args:
        config: the job.
        identity: which generation of which run.
        addresses: of the servers, one a worker.
        run_folder: the name of the folder of the run's checkpoints.
        dialer: how they are talked to.
        failure: told what goes wrong at a stage.
        report: told when a server is being stopped ("draining") and when one has saved ("saved").
        vitals: told how the workers are.
        log: told of each line that a worker says.
    """

    def __init__(
        self,
        config: Config,
        identity: Identity,
        addresses: Sequence[str],
        run_folder: str,
        dialer: Dialer,
        failure: FirstFailure,
        report: Callable[[Message], None],
        vitals: Vitals,
        log: Callable[[Entry], None],
    ) -> None:
        self._config = config
        self._identity: dict[str, Any] = vars(identity)
        self._addresses = list(addresses)
        self._run_folder = run_folder
        self._failure = failure
        self._report = report
        self._vitals = vitals
        labels = [worker.label for worker in config.workers]
        self._lines = LogCollector(labels, identity.generation, log)
        self._clients = [
            StageClient(worker.label, address, dialer, worker.stage_index)
            for worker, address in zip(config.workers, addresses, strict=True)
        ]
        self._workers = config.workers
        self._listens: dict[str, str] = {}
        self._devices: dict[str, str] = {}
        self._claims: list[pb.PrepareResponse] = []
        self._running: set[str] = set()
        self._all_running = asyncio.Event()
        self._ended = asyncio.Event()

    async def claim(self, code: list[pb.CodeFile]) -> None:
        """Claim every server, which spawns the workers, and watch them from now on.

        Raises:
            UnavailableError, VersionError, ConfigError: a server cannot be had.
        """
        await all_of(_named(client, client.connect()) for client in self._clients)
        self._claims = await all_of(
            _named(client, self._claim(index, code)) for index, client in enumerate(self._clients)
        )

    @property
    def holdings(self) -> dict[str, HeldSnapshots]:
        """Which snapshots every worker's server holds, before it is told to go on."""
        pairs = zip(self._clients, self._claims, strict=True)
        return {client.name: holdings_of(claim.holdings) for client, claim in pairs}

    @property
    def places(self) -> dict[str, WorkerPlace]:
        """Where every worker's process is, by its label; nothing before `claim`.

        The device is known once it runs, and empty until then.
        """
        return {
            client.name: {
                "address": client.address,
                "host": claim.host,
                "pid": claim.worker_pid,
                "device": self._devices.get(client.name, ""),
            }
            for client, claim in zip(self._clients, self._claims, strict=False)
        }

    @property
    def rendezvous(self) -> str:
        """The address of the server where the members find each other."""
        return self._addresses[0]

    @property
    def exposed(self) -> dict[str, str]:
        """Why other users of its host could reach a stage's worker, of those that they could."""
        pairs = zip(self._clients, self._claims, strict=True)
        return {client.name: claim.exposed for client, claim in pairs if claim.exposed}

    @property
    def keep_nothing(self) -> list[str]:
        """Why hosts would keep no checkpoint, of those that would not."""
        return sorted({claim.keeps_nothing for claim in self._claims if claim.keeps_nothing})

    def place(self, rank: int) -> dict[str, Any]:
        """Where in the group the process with `rank` is."""
        return {"members": member_names(self._workers), "rank": rank}

    async def link(self, network: str, listens: str) -> list[RelayPeer]:
        """Have every server carry its worker's connections to members that are in other networks.

        Args:
            network, listens: the driver process's network, and where its agent listens.

        Returns:
            the stages that the driver process cannot reach by itself.

        Raises:
            WorkerDiedError: an address is taken on a host that cannot make networks.
        """
        stages = [
            (
                claim.network,
                RelayPeer(
                    worker.name, self._listens[client.name], client.address, worker.stage_index
                ),
            )
            for worker, client, claim in zip(
                self._workers, self._clients, self._claims, strict=True
            )
        ]
        everybody = [*stages, (network, RelayPeer(DRIVER, listens))]
        await all_of(
            client.link(
                pb.LinkRequest(
                    **self._identity,
                    peers=[
                        pb.Peer(
                            name=peer.name,
                            listens=peer.listens,
                            server=peer.server,
                            stage_index=peer.stage_index or 0,
                        )
                        for other, peer in everybody
                        if other != claim.network
                    ],
                )
            )
            for client, claim in zip(self._clients, self._claims, strict=True)
        )
        return [peer for other, peer in stages if other != network]

    async def start(
        self, assignments: Sequence[str], restores: Mapping[str, pb.Restore], step: int
    ) -> None:
        """Give every worker its stage; they build it and join the group.

        Args:
            assignments: of each worker, JSON of rpcmp.pipelining.assignment.Assignment.
            restores: what each worker begins with, by its label; those that are missing start from
                the config.
            step: that they then have done.

        Raises:
            CheckpointError, UnavailableError: what a stage begins with is not to be had.
        """
        is_mirrored, holders = self._is_copied(), self._holders()
        await all_of(
            client.start(
                pb.StartRequest(
                    **self._identity,
                    **self.place(rank),
                    rendezvous=self.rendezvous,
                    stage_name=self._workers[rank].stage,
                    label=client.name,
                    assignment=assignments[rank],
                    restore=restores.get(client.name),
                    is_mirrored=is_mirrored[rank],
                    mirrored_by=self._stage_of(holders[rank]),
                    saves=self._workers[rank].replica == 0,
                )
            )
            for rank, client in enumerate(self._clients)
        )
        await all_of(
            self._clients[holder].mirror(self._mirror(index, step))
            for index, holder in enumerate(holders)
            if holder is not None
        )

    async def wait_until_running(self) -> None:
        """Return when every worker has joined the group."""
        await self._all_running.wait()

    async def inspect(self) -> dict[str, pb.InspectResponse]:
        """What every worker does, and where in its code it is."""
        request = pb.InspectRequest(**self._identity, stacks=True)
        found = await asyncio.gather(
            *(client.inspect(request) for client in self._clients), return_exceptions=True
        )
        return {
            client.name: answer
            for client, answer in zip(self._clients, found, strict=True)
            if isinstance(answer, pb.InspectResponse)
        }

    async def hear_out(self) -> None:
        """Return when all that the workers have said by now has been told, or after a moment.

        Servers that do not answer have nothing to say; those that do may have to catch up.
        """
        if not self._claims:
            return
        request = pb.InspectRequest(**self._identity)

        async def hear(client: StageClient) -> None:
            await self._lines.up_to(client.name, (await client.inspect(request)).logs)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_LINES_SECONDS):
                await asyncio.gather(*map(hear, self._clients), return_exceptions=True)

    async def remove(self, folder: Path) -> None:
        """Remove a checkpoint from the disks of other machines than this one.

        Raises:
            CheckpointError: one cannot.
        """
        request, here = pb.RemoveRequest(folder=str(folder)), machine()
        pairs = zip(self._clients, self._claims, strict=True)
        away = {claim.machine: client for client, claim in pairs if claim.machine != here}
        await asyncio.gather(*(client.remove(request) for client in away.values()))

    def end(self) -> None:
        """Hear that nobody wants anything of the group; servers that have to stop are let go."""
        self._ended.set()

    async def close(self) -> None:
        """Hang up; servers that are watched free themselves and keep what they hold."""
        await asyncio.gather(*(client.close() for client in self._clients))

    def _holders(self) -> list[int | None]:
        """Which worker's server holds each worker's snapshots as well."""
        return holders(self._config, [claim.machine for claim in self._claims])

    def _is_copied(self) -> list[bool]:
        """Whether each stage's snapshots travel to another machine, which it has to wait for."""
        machines = [claim.machine for claim in self._claims]
        return [
            holder is not None and machines[holder] != machines[index]
            for index, holder in enumerate(self._holders())
        ]

    def _stage_of(self, rank: int | None) -> int | None:
        return None if rank is None else self._workers[rank].stage_index

    def _mirror(self, index: int, step: int) -> pb.MirrorRequest:
        """The order to hold the snapshots of one stage."""
        claim = self._claims[index]
        section = self._config.checkpoint
        return pb.MirrorRequest(
            **self._identity,
            stage_name=self._workers[index].stage,
            address=self._addresses[index],
            machine=claim.machine,
            supervisor_pid=claim.supervisor_pid,
            snapshot_fds=claim.snapshot_fds,
            snapshot_inodes=claim.snapshot_inodes,
            step=step,
            saves=section is not None and not section.shared,
        )

    async def _claim(self, index: int, code: list[pb.CodeFile]) -> pb.PrepareResponse:
        client, worker = self._clients[index], self._workers[index]
        claimed = await client.prepare(
            pb.PrepareRequest(
                **self._identity,
                job=self._config.name,
                versions=versions(),
                stage_index=worker.stage_index,
                replica=worker.replica,
                threads=self._config.stage(worker.stage_index).threads,
                code=code,
                heartbeat_timeout=self._config.recovery.heartbeat_timeout,
                checkpoint_folder=str(self._config.checkpoint_folder),
                checkpoint_run=self._run_folder,
                group=[
                    pb.GroupStage(name=member.stage, replicas=member.num_replicas)
                    for member in self._workers
                    if member.replica == 0
                ],
                may_keep_nothing=self._config.checkpoint is None,
                data_paths=self._config.data_paths,
            )
        )
        self._failure.follow(_named(client, self._watch(client, worker)))
        return claimed

    async def _watch(self, client: StageClient, worker: Member) -> None:
        saved, stops = 0, False
        async for change in client.watch(pb.WatchRequest(**self._identity)):
            self._vitals.hear(client.name, change)
            if change.logs:
                await self._lines.hear(client.name, change.logs)
            if change.error:
                raise from_wire(change.error)
            if change.draining and not stops:
                stops = True
                self._report({"event": "draining", "stage": client.name})
                self._failure.follow(self._let_go(client))
            for one in change.saved:
                if one.step > saved:
                    saved = one.step
                    self._report({"event": "saved", "stage": worker.stage, "saved": one})
            if change.state == pb.SERVER_STATE_RUNNING:
                self._running.add(client.name)
                self._listens[client.name] = change.listens
                self._devices[client.name] = change.device
            if len(self._running) == len(self._clients):
                self._all_running.set()
        raise DrainingError(f"stage {client.name!r} at {client.address} ended the job")

    async def _let_go(self, client: StageClient) -> None:
        """Free a server that is being stopped as soon as nothing runs there any more."""
        await self._ended.wait()
        await client.close()


async def _named(client: StageClient, work: Awaitable[Result]) -> Result:
    """What `work` gives; what it raises says of which stage it is."""
    try:
        return await work
    except RpcmpError as error:
        error.stage = error.stage or client.name
        raise
