"""The workers of one generation, each through its stage server: claimed, started, watched.

A worker lives as long as its generation. A lost one is replaced by the worker that its server
starts when the next generation claims it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rpcmp.checkpoint.slots import HeldSnapshots, mirrors_of
from rpcmp.config.device_places import AUTO, Place, on_machine, shared
from rpcmp.config.schema import Config
from rpcmp.config.topology import DRIVER, Member, member_names
from rpcmp.errors import DrainingError, RpcmpError, from_wire
from rpcmp.job.driver_record import DriverRecord, held_seconds, why_not_invited
from rpcmp.job.failure_detection import FirstFailure
from rpcmp.job.restore_point import RestorePoint
from rpcmp.job.server_calls import gather_all, prepare_request
from rpcmp.job.server_pool import ServerPlace, ServerPool
from rpcmp.job.vitals import Vitals
from rpcmp.job.weight_transfer import WeightTransfer
from rpcmp.job.worker_logs import LogCollector
from rpcmp.net.relay import RelayPeer
from rpcmp.observability.events import WorkerPlace
from rpcmp.process.activity import HeartbeatMonitor
from rpcmp.process.channel import Message
from rpcmp.process.logging.records import Entry
from rpcmp.server.client import StageClient
from rpcmp.server.connection import MAX_JOINING
from rpcmp.v1 import control_pb2 as pb

Args = ParamSpec("Args")
Result = TypeVar("Result")

SILENT_SECONDS = 4.0
"""After which a server that says nothing is named; it sends its worker's vitals each second."""

LAST_LINES_SECONDS = 0.5
"""How long to wait for the log lines that workers wrote before something went wrong."""


class WorkerGroup:
    """The workers of one generation of one job.

    Args:
        report: called when a server is being stopped ("draining"), when a spare is to serve a
            further stage ("joining"), and when a server has saved ("saved").
        record: what the servers keep of the driver, so that another one can take the job over.
    """

    def __init__(
        self,
        config: Config,
        pool: ServerPool,
        generation: int,
        failure: FirstFailure,
        report: Callable[[Message], None],
        vitals: Vitals,
        log: Callable[[Entry], None],
        record: DriverRecord | None = None,
    ) -> None:
        self._config = config
        self._pool, self._record = pool, record
        self._identity: dict[str, Any] = {"job_id": pool.job_id, "generation": generation}
        self._run_folder = pool.run_folder
        self._failure = failure
        self._report = report
        self._vitals = vitals
        self._workers = config.workers
        self._logs = LogCollector(generation, log)
        self._clients = [
            StageClient(worker.label, place.address, pool.dialer, place.stage_index)
            for worker, place in zip(config.workers, pool.places, strict=True)
        ]
        self._servers = pool.places
        self._agent_addresses: dict[str, str] = {}
        self._devices: dict[str, str] = {}
        self._claims: list[pb.PrepareResponse] = []
        self._running: set[str] = set()
        self._draining: set[str] = set()
        self._num_joining: defaultdict[str, int] = defaultdict(int)
        self._saved: defaultdict[str, int] = defaultdict(int)
        self._all_running = asyncio.Event()
        self._may_drain = asyncio.Event()

    async def claim(self, code: list[pb.CodeFile]) -> None:
        """Claim every server, which spawns its worker, and start to watch it."""
        await gather_all(_naming_stage(client, client.connect) for client in self._clients)
        self._claims = await gather_all(
            _naming_stage(client, self._claim, index, code)
            for index, client in enumerate(self._clients)
        )

    def _claimed(self) -> zip[tuple[StageClient, pb.PrepareResponse]]:
        """Pair the clients with their claims; empty before `claim`."""
        return zip(self._clients, self._claims, strict=False)

    @property
    def holdings(self) -> dict[str, HeldSnapshots]:
        """The snapshots that each worker's server held when it was claimed."""
        return {
            client.name: HeldSnapshots.from_proto(claim.holdings)
            for client, claim in self._claimed()
        }

    @property
    def places(self) -> dict[str, WorkerPlace]:
        """Server address, host, pid and device of every worker by its label; empty before `claim`.

        The device is empty until the worker runs.
        """
        return {
            client.name: {
                "address": client.address,
                "host": claim.host,
                "pid": claim.worker_pid,
                "device": self._devices.get(client.name, ""),
            }
            for client, claim in self._claimed()
        }

    @property
    def rendezvous(self) -> ServerPlace:
        """The server where the members find each other."""
        return self._servers[0]

    @property
    def exposed(self) -> dict[str, str]:
        """Workers that other users of their hosts can reach, and why."""
        return {client.name: claim.exposed for client, claim in self._claimed() if claim.exposed}

    @property
    def checkpoint_problems(self) -> list[str]:
        """Why hosts cannot write a checkpoint when the run gives up."""
        return sorted({claim.keeps_nothing for claim in self._claims if claim.keeps_nothing})

    def membership(self, rank: int) -> dict[str, Any]:
        return {"members": member_names(self._workers), "rank": rank}

    def elsewhere(self, network: str, driver_network: str) -> list[str]:
        """Return the names of the members that are in other networks than `network`."""
        networks = [*(claim.network for claim in self._claims), driver_network]
        members = zip(member_names(self._workers), networks, strict=True)
        return [name for name, other in members if other != network]

    async def link(self, network: str, driver_address: str) -> list[RelayPeer]:
        """Let every server relay its worker's connections to members in other networks.

        Args:
            network: the driver process's network.
            driver_address: where the driver's RPC agent listens.

        Returns:
            The workers that the driver process cannot reach directly.
        """
        workers = [
            (
                claim.network,
                RelayPeer(
                    worker.name,
                    self._agent_addresses[client.name],
                    client.address,
                    server.stage_index,
                ),
            )
            for worker, server, (client, claim) in zip(
                self._workers, self._servers, self._claimed(), strict=True
            )
        ]
        members = [*workers, (network, RelayPeer(DRIVER, driver_address))]
        await gather_all(
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
                        for other, peer in members
                        if other != claim.network
                    ],
                )
            )
            for client, claim in self._claimed()
        )
        return [peer for other, peer in workers if other != network]

    async def start(
        self,
        assignments: Sequence[str],
        weights: Sequence[Sequence[str] | None],
        restore_point: RestorePoint,
        driver_network: str,
    ) -> None:
        """Give every worker its stage, which it builds before it joins the group.

        Args:
            assignments: of each worker, JSON of rpcmp.pipelining.assignment.Assignment.
            weights: the names of each worker's tensors in `init`; None if they are not known here.
            driver_network: of the driver process.
        """
        sent = await self._send_weights(weights)
        machines = [claim.machine for claim in self._claims]
        is_guest = [self._pool.is_guest(client.address) for client in self._clients]
        mirrors = mirrors_of(self._config, machines, is_guest)
        wanted = self._devices_wanted()
        neighbours = [on_machine(wanted, machines, rank) for rank in range(len(machines))]
        await gather_all(
            client.start(
                pb.StartRequest(
                    **self._identity,
                    **self.membership(rank),
                    rendezvous=self.rendezvous.address,
                    rendezvous_stage=self.rendezvous.stage_index,
                    stage_name=self._workers[rank].stage,
                    assignment=assignments[rank],
                    restore=restore_point.restores.get(client.name),
                    cut=restore_point.cut,
                    is_mirrored=mirror is not None and machines[mirror] != machines[rank],
                    mirrored_by=None if mirror is None else self._servers[mirror].stage_index,
                    saves=self._workers[rank].replica == 0,
                    reads_sent_init=sent[rank],
                    devices_here=neighbours[rank][0],
                    place_here=neighbours[rank][1],
                    elsewhere=self.elsewhere(self._claims[rank].network, driver_network),
                )
            )
            for rank, (client, mirror) in enumerate(zip(self._clients, mirrors, strict=True))
        )
        await gather_all(
            self._clients[mirror].mirror(self._mirror_request(rank, restore_point.step))
            for rank, mirror in enumerate(mirrors)
            if mirror is not None
        )

    def _devices_wanted(self) -> list[str]:
        """Return each worker's device in the config, or its server's if that is left open."""
        stages = [self._config.stage(worker.stage_index) for worker in self._workers]
        return [
            (claim.device if stage.device == AUTO else "") or stage.device
            for stage, claim in zip(stages, self._claims, strict=True)
        ]

    @property
    def shared_devices(self) -> list[str]:
        """Which workers share a device because their hosts have too few, in a sentence each."""
        pairs = zip(self._claimed(), self._devices_wanted(), strict=True)
        return shared(
            Place(client.name, claim.machine, claim.host, wanted, self._devices[client.name])
            for (client, claim), wanted in pairs
        )

    async def _send_weights(self, weights: Sequence[Sequence[str] | None]) -> list[bool]:
        """Send the parts of `init` that hosts lack; returns who has to read what was sent."""

        say = functools.partial(self._logs.add_own, level="INFO")
        transfer = WeightTransfer(self._config.init_path, **self._identity, say=say)
        return await gather_all(
            _naming_stage(client, transfer.send, client, claim, names)
            for (client, claim), names in zip(self._claimed(), weights, strict=True)
        )

    async def wait_until_running(self) -> None:
        await self._all_running.wait()

    async def inspect(self) -> dict[str, pb.InspectResponse]:
        """Return every worker's current action and stacks, without workers that are gone."""
        request = pb.InspectRequest(**self._identity, stacks=True)
        answers = await asyncio.gather(
            *(client.inspect(request) for client in self._clients), return_exceptions=True
        )
        return {
            client.name: answer
            for client, answer in zip(self._clients, answers, strict=True)
            if isinstance(answer, pb.InspectResponse)
        }

    async def drain_logs(self) -> None:
        """Return when all lines that the workers have written by now are logged, or after a moment.

        A server that does not answer has no more lines; one that answers may have to catch up.
        """
        if not self._claims:
            return
        request = pb.InspectRequest(**self._identity)

        async def catch_up(client: StageClient) -> None:
            await self._logs.wait_for_line(client.name, (await client.inspect(request)).logs)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_LINES_SECONDS):
                await asyncio.gather(*map(catch_up, self._clients), return_exceptions=True)

    async def remove_checkpoint(self, folder: Path) -> None:
        """Remove a checkpoint from the folders of all servers.

        Those of one machine are asked one after the other: most have one folder, some their own.
        """
        request = pb.RemoveRequest(folder=str(folder))
        by_machine: dict[str, list[StageClient]] = {}
        for client, claim in self._claimed():
            by_machine.setdefault(claim.machine, []).append(client)

        async def ask(clients: Sequence[StageClient]) -> None:
            for client in clients:
                await client.remove(request)

        await asyncio.gather(*map(ask, by_machine.values()))

    def release_draining(self) -> None:
        """Release the servers that are being stopped: the group has ended."""
        self._may_drain.set()

    async def close(self) -> None:
        """Close the connections; servers that are not watched free themselves, with snapshots."""
        await asyncio.gather(*(client.close() for client in self._clients))

    def _mirror_request(self, rank: int, step: int) -> pb.MirrorRequest:
        claim = self._claims[rank]
        section = self._config.checkpoint
        return pb.MirrorRequest(
            **self._identity,
            stage_name=self._workers[rank].stage,
            address=self._clients[rank].address,
            machine=claim.machine,
            supervisor_pid=claim.supervisor_pid,
            snapshot_fds=claim.snapshot_fds,
            snapshot_inodes=claim.snapshot_inodes,
            step=step,
            saves=section is not None and not section.shared,
        )

    async def _claim(self, index: int, code: list[pb.CodeFile]) -> pb.PrepareResponse:
        client, worker = self._clients[index], self._workers[index]
        claim = await client.prepare(
            prepare_request(
                self._config,
                worker,
                self._servers[index].stage_index,
                code,
                **self._identity,
                driver_id=self._pool.driver_id,
                supersedes=self._pool.supersedes,
                drops_held=self._pool.drops_held and self._identity["generation"] == 1,
                keep_s=held_seconds(self._config, self._record),
                heartbeat_timeout=self._config.recovery.heartbeat_timeout,
                checkpoint_folder=str(self._config.checkpoint_folder),
                relative_checkpoint_folder=self._config.relative_checkpoint_folder,
                checkpoint_run=self._run_folder,
                group=[
                    pb.GroupStage(
                        name=member.stage,
                        replicas=member.num_replicas,
                        stage_index=server.stage_index,
                    )
                    for member, server in zip(self._workers, self._servers, strict=True)
                    if member.replica == 0
                ],
                may_keep_nothing=self._config.checkpoint is None,
            )
        )
        self._failure.supervise(_naming_stage(client, self._watch, client, worker))
        if self._record is not None:
            self._failure.supervise(self._send_record(client, self._record))
        return claim

    async def _send_record(self, client: StageClient, record: DriverRecord) -> None:
        with contextlib.suppress(RpcmpError):  # `_watch` says why
            await client.record(record.requests(self._identity["generation"]))

    def _report_invited(self, client: StageClient, joining: pb.JoinRequest) -> None:
        security = self._pool.dialer.security
        if why := why_not_invited(self._pool.job_id, joining, security):
            text = f"no driver has invited {joining.address[:256]} to join the run: {why}"
            self._logs.add_own(client.name, text)
            return
        self._report({"event": "joining", "address": joining.address})

    async def _warn_if_silent(self, client: StageClient, pulse: HeartbeatMonitor) -> None:
        """Log, long before the connection counts as lost, that a server says nothing."""
        await pulse.silent()
        text = (
            f"the server of stage {client.name!r} at {client.address} has said nothing for "
            f"{SILENT_SECONDS:.0f} s: it or its host is stopped or very busy, or the link is cut"
        )
        self._logs.add_own(client.name, text)

    async def _watch(self, client: StageClient, worker: Member) -> None:
        pulse = HeartbeatMonitor(SILENT_SECONDS)
        pulse.begin()
        listening = asyncio.create_task(self._warn_if_silent(client, pulse))
        try:
            async for change in client.watch(pb.WatchRequest(**self._identity)):
                pulse.beat()
                await self._receive(change, client, worker)
        finally:
            listening.cancel()
        raise DrainingError(f"stage {client.name!r} at {client.address} ended the job")

    async def _receive(self, change: pb.WatchResponse, client: StageClient, worker: Member) -> None:
        self._vitals.update_worker(client.name, change)
        if change.logs:
            await self._logs.add(client.name, change.logs)
        if change.error:
            raise from_wire(change.error)
        if change.draining and client.name not in self._draining:
            self._draining.add(client.name)
            self._report({"event": "draining", "stage": client.name, "leaves": change.leaves})
            self._failure.supervise(self._release_when_ended(client))
        # However many a server says there are.
        for joining in change.joining[self._num_joining[client.name] : MAX_JOINING]:
            self._num_joining[client.name] += 1
            self._report_invited(client, joining)
        for one in change.saved:
            if one.step > self._saved[client.name]:
                self._saved[client.name] = one.step
                self._report({"event": "saved", "stage": worker.stage, "saved": one})
        if change.state == pb.SERVER_STATE_RUNNING:
            self._running.add(client.name)
            self._agent_addresses[client.name] = change.listens
            self._devices[client.name] = change.device
        if len(self._running) == len(self._clients):
            self._all_running.set()

    async def _release_when_ended(self, client: StageClient) -> None:
        await self._may_drain.wait()
        await client.close()


async def _naming_stage(
    client: StageClient,
    call: Callable[Args, Awaitable[Result]],
    *args: Args.args,
    **more: Args.kwargs,
) -> Result:
    """Return the result of a call; an error that it raises names the stage."""
    try:
        return await call(*args, **more)
    except RpcmpError as error:
        error.stage = error.stage or client.name
        raise
