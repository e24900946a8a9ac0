"""Client of a stage server: typed calls that raise rpcmp's errors instead of gRPC's."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from rpcmp.errors import RpcmpError, SecurityError, UnreachableError, from_wire
from rpcmp.net.peer_connection import Dialer
from rpcmp.net.tunnel import Tunnel
from rpcmp.server.connection import CHANNEL_OPTIONS, IS_IT_RUNNING
from rpcmp.server.link_speed import MEASURE_SECONDS, LinkSpeed
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1 import doctor_pb2
from rpcmp.v1.control_pb2_grpc import ControlStub, RendezvousStub, SnapshotsStub
from rpcmp.v1.doctor_pb2_grpc import DoctorStub

if TYPE_CHECKING:
    from rpcmp.v1.control_pb2_grpc import ControlAsyncStub, RendezvousAsyncStub, SnapshotsAsyncStub
    from rpcmp.v1.doctor_pb2_grpc import DoctorAsyncStub

CONNECT_SECONDS = 6.0
"""Time limit for a server's first answer."""

PREPARE_SECONDS = 300.0
"""Time limit for Prepare: a server's first worker has to import torch, from whatever disk."""

CALL_SECONDS = 30.0
"""Time limit for any other call; the server never computes."""

CLOSED = re.compile("Stream removed|Socket closed|Connection reset by peer|Broken pipe")
"""gRPC's details of a call whose connection the server has closed, as when it is killed."""

Answer = TypeVar("Answer")


class StageClient:
    """A connection to one stage server; close it, or use it as an async context manager.

    Args:
        name: the stage's, for errors; empty if it is not known.
        address: HOST:PORT.
        dialer: opens the connection.
        stage_index: the stage that the server's certificate has to be for; None: any.
    """

    def __init__(
        self, name: str, address: str, dialer: Dialer, stage_index: int | None = None
    ) -> None:
        self.name = name
        self.address = address
        self._dialer = dialer
        # With certificates the tunnel has the TLS; without, it looks whose the server is.
        is_open = dialer.security.insecure
        self._tunnel = None if is_open else Tunnel(dialer, address, stage_index)
        target = address if self._tunnel is None else self._tunnel.target
        self._channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._stub: ControlAsyncStub = ControlStub(self._channel)
        self._snapshots: SnapshotsAsyncStub = SnapshotsStub(self._channel)
        self._rendezvous: RendezvousAsyncStub = RendezvousStub(self._channel)
        self._doctor: DoctorAsyncStub = DoctorStub(self._channel)

    async def connect(
        self, seconds: float = CONNECT_SECONDS, *, starting: bool = True
    ) -> pb.DescribeResponse:
        """Wait until the server answers, and return its description.

        Args:
            seconds: time limit.
            starting: the server may still be starting, so a refused connection is retried.

        Raises:
            UnreachableError: no answer within the limit, or the connection was refused.
            SecurityError: the server is not the expected one, or refuses our certificate.
        """
        request = pb.DescribeRequest()
        try:
            async with asyncio.timeout(seconds):
                waits = starting or self._tunnel is not None  # a tunnel always listens
                described = self._stub.Describe(request, wait_for_ready=waits)
                return await self._unless_refused(described, starting)
        except TimeoutError as error:
            silent = UnreachableError(
                f"{self._where} does not answer within {seconds:.0f} s; {IS_IT_RUNNING}"
            )
            raise await self._understood(silent) from error
        except grpc.aio.AioRpcError as error:
            raise await self._understood(self._translate(error)) from error

    async def health(self) -> str:
        """Return the status of the server's health service: "SERVING" or "NOT_SERVING"."""
        check = HealthStub(self._channel).Check(HealthCheckRequest(), timeout=CALL_SECONDS)
        answer: HealthCheckResponse = await self._call(check)
        return str(HealthCheckResponse.ServingStatus.Name(answer.status))

    async def profile(self, request: pb.ProfileRequest) -> pb.ProfileResponse:
        """Measure a job's layers; no time limit."""
        return await self._call(self._stub.Profile(request))

    async def prepare(self, request: pb.PrepareRequest) -> pb.PrepareResponse:
        return await self._call(self._stub.Prepare(request, timeout=PREPARE_SECONDS))

    async def start(self, request: pb.StartRequest) -> pb.StartResponse:
        """Send the worker its stage. No time limit: the server may have to fetch its state."""
        return await self._call(self._stub.Start(request))

    async def link(self, request: pb.LinkRequest) -> pb.LinkResponse:
        """Send the addresses of the other members' agents."""
        return await self._call(self._stub.Link(request, timeout=CALL_SECONDS))

    async def examine(self, request: doctor_pb2.ExamineRequest) -> str:
        """Return the facts about the server's host: JSON of HostFacts."""
        examined = self._doctor.Examine(request, timeout=PREPARE_SECONDS)
        answer: doctor_pb2.ExamineResponse = await self._call(examined)
        return answer.facts

    async def probe(self, request: doctor_pb2.ProbeRequest) -> LinkSpeed:
        """Have the server measure the link to another one."""
        probed = self._doctor.Probe(request, timeout=MEASURE_SECONDS + CALL_SECONDS)
        found: doctor_pb2.ProbeResponse = await self._call(probed)
        return LinkSpeed(found.latency_s, found.clock_ahead_s, found.there, found.back)

    async def record(self, requests: AsyncIterator[pb.RecordRequest]) -> None:
        """Have the server keep the driver's own state, until `requests` ends."""
        await self._call(self._stub.Record(requests))

    async def recall(self) -> pb.RecallResponse:
        """Return what the driver of the server's job has recorded."""
        return await self._call(self._stub.Recall(pb.RecallRequest(), timeout=CALL_SECONDS))

    async def stop(self, request: pb.StopRequest) -> pb.StopResponse:
        return await self._call(self._stub.Stop(request, timeout=CALL_SECONDS))

    async def join(self, request: pb.JoinRequest) -> str:
        """Have the driver of the server's job take in a spare; return the job's name."""
        answer: pb.JoinResponse = await self._call(self._stub.Join(request, timeout=CALL_SECONDS))
        return answer.job

    async def drain(self, leaves: bool = False) -> str:
        """Drain the server; return the name of the job that has to end first, or "".

        Args:
            leaves: whether it will not come back, so that its job need not wait for it.
        """
        request = pb.DrainRequest(leaves=leaves)
        answer: pb.DrainResponse = await self._call(self._stub.Drain(request, timeout=CALL_SECONDS))
        return answer.job

    async def inspect(self, request: pb.InspectRequest) -> pb.InspectResponse:
        """Return the worker's current action."""
        return await self._call(self._stub.Inspect(request, timeout=CALL_SECONDS))

    async def mirror(self, request: pb.MirrorRequest) -> pb.MirrorResponse:
        """Have the server hold another stage's snapshots as well."""
        return await self._call(self._snapshots.Mirror(request, timeout=CALL_SECONDS))

    async def save(self, request: pb.SaveRequest) -> pb.Saved:
        """Have a snapshot written to the server's disk; no time limit."""
        answer: pb.SaveResponse = await self._call(self._snapshots.Save(request))
        return answer.saved

    async def check(self, request: pb.CheckRequest) -> list[str]:
        """Return the states of a checkpoint's files on the server's disk; reads all of them."""
        answer: pb.CheckResponse = await self._call(self._snapshots.Check(request))
        return list(answer.states)

    async def put(self, requests: AsyncIterator[pb.PutRequest]) -> None:
        """Write a checkpoint's file, or weights, to the server's disk; no time limit.

        Raises what `requests` raises, for which gRPC only cancels the call.
        """
        raised: list[Exception] = []

        async def watched() -> AsyncIterator[pb.PutRequest]:
            try:
                async for request in requests:
                    yield request
            except Exception as error:
                raised.append(error)
                raise

        try:
            await self._call(self._snapshots.Put(watched()))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not raised or task is None or task.cancelling():
                raise
            raise raised[0]  # noqa: B904  # it has its own cause

    async def remove(self, request: pb.RemoveRequest) -> None:
        """Remove a checkpoint from the server's disk."""
        await self._call(self._snapshots.Remove(request, timeout=CALL_SECONDS))

    async def fetch(self, request: pb.FetchRequest) -> AsyncIterator[pb.FetchResponse]:
        """Yield the parts of a snapshot, or of a checkpoint's file."""
        async for part in self._stream(self._snapshots.Fetch(request)):
            yield part

    async def store_set(self, job: Mapping[str, Any], key: str, value: bytes) -> bytes:
        await self._call(self._rendezvous.Set(pb.SetRequest(**job, key=key, value=value)))
        return b""

    async def store_get(self, job: Mapping[str, Any], keys: Sequence[str]) -> list[bytes]:
        """Wait until all keys are set; return their values."""
        answer = await self._call(self._rendezvous.Get(pb.GetRequest(**job, keys=keys)))
        return list(answer.values)

    async def store_compare_set(
        self, job: Mapping[str, Any], key: str, expected: bytes, desired: bytes
    ) -> bytes:
        """Set a key if it has the value `expected`; return its value afterwards."""
        request = pb.CompareSetRequest(**job, key=key, expected=expected, desired=desired)
        answer = await self._call(self._rendezvous.CompareSet(request))
        value: bytes = answer.value
        return value

    async def store_add(self, job: Mapping[str, Any], key: str, amount: int) -> bytes:
        """Add to a counter; return its value afterwards, in decimal."""
        request = pb.AddRequest(**job, key=key, amount=amount)
        answer = await self._call(self._rendezvous.Add(request))
        return str(answer.value).encode()

    async def watch(self, request: pb.WatchRequest) -> AsyncIterator[pb.WatchResponse]:
        """Yield the states of the worker until the claim ends."""
        async for change in self._stream(self._stub.Watch(request)):
            yield change

    async def close(self) -> None:
        await self._channel.close(None)
        if self._tunnel is not None:
            await self._tunnel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def _unless_refused(self, call: Awaitable[Answer], starting: bool) -> Answer:
        """Return the server's answer; stop waiting if it is the wrong server, or not running."""
        if self._tunnel is None:
            return await call
        answer = asyncio.ensure_future(call)
        refused, absent = self._tunnel.refused, self._tunnel.absent
        either: list[asyncio.Future[Any]] = [answer, refused]
        if not starting:
            either.append(absent)
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return await answer
            if refused.done():
                raise self._place(refused.result())
            raise UnreachableError(f"{self._placed(absent.result())}; {IS_IT_RUNNING}")
        finally:
            answer.cancel()

    @property
    def _where(self) -> str:
        return f"stage {self.name!r} at {self.address}" if self.name else self.address

    async def _understood(self, error: RpcmpError) -> RpcmpError:
        """Return `error`, or a SecurityError if the server wants TLS and we spoke without."""
        if not isinstance(error, UnreachableError):
            return error
        wants_tls = await self._dialer.tls_required_error(self.address)
        return error if wants_tls is None else self._place(wants_tls)

    def _place(self, error: SecurityError) -> SecurityError:
        return SecurityError(self._placed(error))

    def _placed(self, error: RpcmpError) -> str:
        return f"stage {self.name!r}: {error}" if self.name else str(error)

    async def _stream(self, stream: Any) -> AsyncIterator[Any]:
        try:
            async for message in stream:
                yield message
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error
        finally:
            stream.cancel()

    async def _call(self, call: Awaitable[Answer]) -> Answer:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error

    def _translate(self, error: grpc.aio.AioRpcError) -> RpcmpError:
        """Return the error that the server has raised, with its address, or an UnreachableError."""
        where = self._where
        details = error.details() or ""
        refused = self._tunnel.refused if self._tunnel is not None else None
        if refused is not None and refused.done() and not refused.cancelled():
            return self._place(refused.result())
        if error.code() is grpc.StatusCode.PERMISSION_DENIED:
            return SecurityError(f"{where}: {details}")
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION and details.startswith("{"):
            known = from_wire(details)
            if set(known.fields) == {"message"}:
                return type(known)(f"{where}: {known}")
            return known
        if error.code() is grpc.StatusCode.UNAVAILABLE and CLOSED.search(details):
            return UnreachableError(f"lost {where}: the server closed the connection")
        return UnreachableError(f"lost {where}: {error.code().name}: {details}")
