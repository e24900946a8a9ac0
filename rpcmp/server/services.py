"""The services of a stage server behind its one port: gRPC, the relay and link measurements.

Each call becomes one of the stage server, of its current claim or of its snapshot store.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from rpcmp.checkpoint import files
from rpcmp.checkpoint.folder import remove
from rpcmp.errors import BusyError, ConfigError, RelayError
from rpcmp.net.identity import Role
from rpcmp.net.peer_connection import PeerConnection
from rpcmp.net.port import GREETING_SECONDS, IncomingConnection, PortMultiplexer
from rpcmp.process import resources
from rpcmp.process.memory_access import ANNOUNCED
from rpcmp.server.access import OnlyPeers
from rpcmp.server.connection import PEERS_OPTIONS, SERVER_OPTIONS, machine
from rpcmp.server.hardened_grpc import Callers, GrpcServers
from rpcmp.server.link_speed import answer_link_test, measure_link
from rpcmp.server.rendezvous import require_key_count
from rpcmp.server.snapshot_transfer import receive_file
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1 import control_pb2_grpc, doctor_pb2, doctor_pb2_grpc

if TYPE_CHECKING:
    from rpcmp.server.claim import Claim
    from rpcmp.server.snapshot_store import SnapshotStore
    from rpcmp.server.stage_server import StageServer

    GrpcContext = grpc.aio.ServicerContext[Any, Any]
    RendezvousRequest = pb.SetRequest | pb.GetRequest | pb.CompareSetRequest | pb.AddRequest


class ControlServicer(control_pb2_grpc.ControlServicer):
    """See protos/rpcmp/v1/control.proto."""

    def __init__(self, server: StageServer, callers: Callers) -> None:
        self._server, self._callers = server, callers

    async def Describe(
        self, request: pb.DescribeRequest, grpc_context: GrpcContext
    ) -> pb.DescribeResponse:
        role = self._callers.role(grpc_context.peer())
        if role is None or role.is_driver:
            return self._server.describe()
        return pb.DescribeResponse(draining=self._server.draining)

    async def Profile(
        self, request: pb.ProfileRequest, grpc_context: GrpcContext
    ) -> pb.ProfileResponse:
        return pb.ProfileResponse(profile=await self._server.profile(request))

    async def Prepare(
        self, request: pb.PrepareRequest, grpc_context: GrpcContext
    ) -> pb.PrepareResponse:
        driver = self._callers.name(grpc_context.peer())
        claim = await self._server.prepare(request, driver)
        snapshot_store, network = self._server.snapshot_store, await self._server.forks.network()
        return pb.PrepareResponse(
            generation=claim.generation,
            worker_pid=claim.worker_pid,
            holdings=snapshot_store.holdings(),
            machine=machine(),
            device=self._server.device,
            supervisor_pid=os.getpid(),
            snapshot_fds=snapshot_store.slots.fds,
            snapshot_inodes=[os.fstat(fd).st_ino for fd in snapshot_store.slots.fds],
            network=network.name,
            exposed=network.reason,
            host=platform.node(),
            keeps_nothing=snapshot_store.keeps_nothing,
            has_init=claim.has_init,
            weights_key=claim.files.weights_key,
        )

    async def Start(self, request: pb.StartRequest, grpc_context: GrpcContext) -> pb.StartResponse:
        claim = self._server.claimed_by(request.job_id, request.generation)
        await claim.start(request)
        return pb.StartResponse(generation=claim.generation)

    async def Link(self, request: pb.LinkRequest, grpc_context: GrpcContext) -> pb.LinkResponse:
        claim = self._server.claimed_by(request.job_id, request.generation)
        await claim.link(request)
        return pb.LinkResponse(generation=claim.generation)

    async def Watch(
        self, request: pb.WatchRequest, grpc_context: GrpcContext
    ) -> AsyncIterator[pb.WatchResponse]:
        claim = self._server.claimed_by(request.job_id, request.generation)
        async for change in self._server.watch(claim):
            yield change

    async def Record(
        self, requests: AsyncIterator[pb.RecordRequest], grpc_context: GrpcContext
    ) -> pb.RecordResponse:
        async for request in requests:
            self._server.record(request)
        return pb.RecordResponse()

    async def Recall(
        self, request: pb.RecallRequest, grpc_context: GrpcContext
    ) -> pb.RecallResponse:
        return self._server.driver.recall(is_claimed=self._server.claim is not None)

    async def Drain(self, request: pb.DrainRequest, grpc_context: GrpcContext) -> pb.DrainResponse:
        await self._server.drain(request.leaves)
        claim = self._server.claim
        if claim is None:
            return pb.DrainResponse()
        return pb.DrainResponse(job=claim.job, generation=claim.generation)

    async def Join(self, request: pb.JoinRequest, grpc_context: GrpcContext) -> pb.JoinResponse:
        claim = self._server.claim
        if claim is None:
            raise ConfigError("no job runs here that a host could join")
        await claim.take_in(request)
        return pb.JoinResponse(job=claim.job)

    async def Stop(self, request: pb.StopRequest, grpc_context: GrpcContext) -> pb.StopResponse:
        await self._server.end(request)
        return pb.StopResponse(generation=request.generation)

    async def Inspect(
        self, request: pb.InspectRequest, grpc_context: GrpcContext
    ) -> pb.InspectResponse:
        claim = self._server.claimed_by(request.job_id, request.generation)
        claim.receive_pending()
        return pb.InspectResponse(
            generation=claim.generation,
            host=platform.node(),
            doing=pb.Doing(**claim.doing._asdict()),
            stacks=await claim.stacks() if request.stacks else "",
            logs=claim.lines.newest,
        )


class DoctorServicer(doctor_pb2_grpc.DoctorServicer):
    """See protos/rpcmp/v1/doctor.proto."""

    def __init__(self, server: StageServer) -> None:
        self._server = server

    async def Examine(
        self, request: doctor_pb2.ExamineRequest, grpc_context: GrpcContext
    ) -> doctor_pb2.ExamineResponse:
        return doctor_pb2.ExamineResponse(facts=await self._server.examine(request))

    async def Probe(
        self, request: doctor_pb2.ProbeRequest, grpc_context: GrpcContext
    ) -> doctor_pb2.ProbeResponse:
        place = (request.stage_name, request.address, request.stage_index)
        way = await measure_link(self._server.dialer, *place, request.seconds)
        return doctor_pb2.ProbeResponse(**asdict(way))


class RendezvousServicer(control_pb2_grpc.RendezvousServicer):
    """See protos/rpcmp/v1/control.proto. The values go with the claim."""

    def __init__(self, server: StageServer, callers: Callers) -> None:
        self._server, self._callers = server, callers

    def _claim_of(self, job: RendezvousRequest, grpc_context: GrpcContext) -> Claim:
        """Return the current claim; the caller must belong to its group."""
        role = self._callers.role(grpc_context.peer())
        claim = self._server.claimed_by(job.job_id, job.generation)
        claim.group.require_member(role, "use the rendezvous")
        return claim

    def _require_own(self, claim: Claim, key: str, value: bytes, grpc_context: GrpcContext) -> None:
        """Refuse a member that would set another's address, or take another's rank.

        torch's agents store their addresses under "addrs/NAME" and their names under "names/RANK",
        and do not check which agent answers at an address; workers announce their memory.
        """
        if key.startswith("names/"):
            name = value.decode(errors="replace")
        elif of := next((each for each in ("addrs/", ANNOUNCED) if key.startswith(each)), ""):
            name = key.removeprefix(of)
        else:
            return
        claim.group.require_name(self._callers.role(grpc_context.peer()), name)

    async def Set(self, request: pb.SetRequest, grpc_context: GrpcContext) -> pb.SetResponse:
        claim = self._claim_of(request, grpc_context)
        self._require_own(claim, request.key, request.value, grpc_context)
        claim.values.set(request.key, request.value)
        return pb.SetResponse(generation=claim.generation)

    async def Get(self, request: pb.GetRequest, grpc_context: GrpcContext) -> pb.GetResponse:
        claim = self._claim_of(request, grpc_context)
        require_key_count(request.keys)
        await claim.values.wait_for(request.keys)
        values = claim.values.get_all(request.keys)
        return pb.GetResponse(generation=claim.generation, values=values)

    async def CompareSet(
        self, request: pb.CompareSetRequest, grpc_context: GrpcContext
    ) -> pb.CompareSetResponse:
        claim = self._claim_of(request, grpc_context)
        self._require_own(claim, request.key, request.desired, grpc_context)
        held = claim.values.get(request.key)
        if (held or b"") == request.expected:
            held = request.desired
            claim.values.set(request.key, held)
        return pb.CompareSetResponse(generation=claim.generation, value=held or b"")

    async def Add(self, request: pb.AddRequest, grpc_context: GrpcContext) -> pb.AddResponse:
        claim = self._claim_of(request, grpc_context)
        self._require_own(claim, request.key, b"", grpc_context)
        value = claim.values.add(request.key, request.amount)
        return pb.AddResponse(generation=claim.generation, value=value)


MAX_FETCHING, MAX_FETCHING_EACH = 64, 16
"""Fetch calls at a time: by the mirror, and after a fault by each stage that needs what is here. Of
one certificate's role the second number: one that does not read keeps out no other."""


class SnapshotsServicer(control_pb2_grpc.SnapshotsServicer):
    """See protos/rpcmp/v1/control.proto."""

    def __init__(self, server: StageServer, callers: Callers) -> None:
        self._server, self._callers = server, callers
        self._fetching = Counter[Role | None]()

    async def Fetch(
        self, request: pb.FetchRequest, grpc_context: GrpcContext
    ) -> AsyncIterator[pb.FetchResponse]:
        # A host that was replaced must not speak for its successor.
        claim = self._server.claimed_by(request.job_id, request.generation)
        role = self._callers.role(grpc_context.peer())
        claim.group.require_may_fetch(role, request, claim.mirrored_by, claim.moves_layers)
        snapshot_store = self._store_of(request.job_id)
        with self._one_more(role):
            async for part in snapshot_store.stream(request):
                yield part

    async def Save(self, request: pb.SaveRequest, grpc_context: GrpcContext) -> pb.SaveResponse:
        snapshot_store = self._store_of(request.job_id)
        saved = await snapshot_store.save(request.stage_name, request.step, request.cut)
        return pb.SaveResponse(saved=saved)

    async def Mirror(
        self, request: pb.MirrorRequest, grpc_context: GrpcContext
    ) -> pb.MirrorResponse:
        claim = self._server.claimed_by(request.job_id, request.generation)
        await self._server.snapshot_store.start_mirror(request)
        return pb.MirrorResponse(generation=claim.generation)

    async def Check(self, request: pb.CheckRequest, grpc_context: GrpcContext) -> pb.CheckResponse:
        paths = [self._server.snapshot_store.named(file.path) for file in request.files]
        states = [
            await asyncio.to_thread(files.check, path, file.sha256, file.size)
            for path, file in zip(paths, request.files, strict=True)
        ]
        return pb.CheckResponse(states=states)

    async def Put(
        self, requests: AsyncIterator[pb.PutRequest], grpc_context: GrpcContext
    ) -> pb.PutResponse:
        head = await anext(requests, pb.PutRequest())
        data = (request.data async for request in requests)
        if head.is_init:
            kept = self._server.claimed_by(head.job_id, head.generation).files
            await kept.receive_weights(head.file, data)
            self._server.claimed_by(head.job_id, head.generation)  # it may have taken long
            kept.weights_key = head.file.sha256
        else:
            path = self._store_of(head.job_id).named(head.file.path)
            await receive_file(data, path, head.file.size)
        return pb.PutResponse()

    async def Remove(
        self, request: pb.RemoveRequest, grpc_context: GrpcContext
    ) -> pb.RemoveResponse:
        folder = self._server.snapshot_store.require_ours(request.folder)
        await asyncio.to_thread(remove, folder)
        return pb.RemoveResponse()

    @contextlib.contextmanager
    def _one_more(self, role: Role | None) -> Iterator[None]:
        """Count a Fetch call; each holds a part in memory."""
        if self._fetching.total() >= MAX_FETCHING:
            raise BusyError(f"{MAX_FETCHING} others fetch from this server already")
        if role is not None and self._fetching[role] >= MAX_FETCHING_EACH:
            raise BusyError(f"{role} fetches {MAX_FETCHING_EACH} times from this server already")
        self._fetching[role] += 1
        try:
            yield
        finally:
            self._fetching[role] -= 1

    def _store_of(self, job_id: str) -> SnapshotStore:
        """Return the snapshot store, if it holds the caller's job."""
        if not job_id or self._server.snapshot_store.job_id != job_id:
            raise BusyError("this server holds nothing of the job")
        return self._server.snapshot_store


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

SERVICES = (
    "",
    *(f"rpcmp.v1.{name}" for name in ("Control", "Rendezvous", "Snapshots", "Doctor")),
)
"""Names that the health service knows; "" is the server as a whole."""

MAX_MEASURING = 4
"""Measurements at a time: each uses the link and a core as much as it can."""

PREFIX = "rpcmp-server-"
"""Prefix of the folder for gRPC's sockets."""


class Endpoints:
    """Services that listen from `open` to `close`; `server` answers their calls."""

    def __init__(self, server: StageServer) -> None:
        self._server = server
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._folder = resources.create_folder(PREFIX)
        self._callers = Callers()
        self._grpc = GrpcServers(self._folder, self._callers)
        self._add_services()
        self._port = PortMultiplexer(
            server.security, self._serve_grpc, self._carry, server.works_for
        )
        self._measuring = 0

    async def open(self, host: str, port: int) -> int:
        """Listen; return the port, which is a free one for port 0."""
        try:
            self._grpc.require_room_for_sockets()
            bound = await self._port.start(host, port)
        except ConfigError:
            await self.close()
            raise
        await self.set_health(SERVING)
        return bound

    async def close(self) -> None:
        """Close all connections, after a moment for answers, such as the one to Drain."""
        await self._grpc.stop(grace=0.5)
        await self._port.stop()  # carries the answers, so it goes last
        resources.remove_folder(self._folder)

    async def set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in SERVICES:
            await self._health.set(service, status)

    def _add_services(self) -> None:
        server, callers, services = self._server, self._callers, self._grpc.services
        health_pb2_grpc.add_HealthServicer_to_server(self._health, services)
        control_pb2_grpc.add_ControlServicer_to_server(ControlServicer(server, callers), services)
        control_pb2_grpc.add_RendezvousServicer_to_server(
            RendezvousServicer(server, callers), services
        )
        control_pb2_grpc.add_SnapshotsServicer_to_server(
            SnapshotsServicer(server, callers), services
        )
        doctor_pb2_grpc.add_DoctorServicer_to_server(DoctorServicer(server), services)

    async def _serve_grpc(self, connection: IncomingConnection) -> None:
        if connection.role is None or connection.role.is_driver:
            await self._grpc.serve(connection, [], SERVER_OPTIONS)
        else:
            await self._grpc.serve(connection, [OnlyPeers(self._callers)], PEERS_OPTIONS)

    async def _carry(self, incoming: IncomingConnection) -> None:
        """Serve a connection for tensors, or for a measurement."""
        async with asyncio.timeout(GREETING_SECONDS):
            greeting = await incoming.end.read_message()
        if greeting.get("op") == "measure":
            await self._measure(incoming.end)
            return
        if self._server.claim is None:
            raise RelayError("no group runs here")
        await self._server.claim.relay.handle(incoming, greeting)

    async def _measure(self, end: PeerConnection) -> None:
        """Answer a measurement, unless too many are under way."""
        if self._measuring >= MAX_MEASURING:
            raise RelayError(f"{self._measuring} others measure the way here already")
        self._measuring += 1
        try:
            await answer_link_test(end)
        finally:
            self._measuring -= 1
