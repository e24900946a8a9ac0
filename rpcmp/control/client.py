"""A stage server as others see it: typed calls, our errors instead of gRPC's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from rpcmp.control.options import CHANNEL_OPTIONS
from rpcmp.errors import RpcmpError, UnreachableError, from_wire
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1.control_pb2_grpc import ControlStub, SnapshotsStub

if TYPE_CHECKING:
    from rpcmp.v1.control_pb2_grpc import ControlAsyncStub, SnapshotsAsyncStub

CONNECT_SECONDS = 6.0
"""How long a server may take to answer for the first time."""

PREPARE_SECONDS = 300.0
"""A server's first worker is there only when torch is imported, from whatever disk."""

CALL_SECONDS = 30.0
"""How long a server may take for any one call; it never computes."""

Answer = TypeVar("Answer")


class StageClient:
    """A connection to one stage server; closed by `close`, or as an async context manager.

    Args:
        name: the stage's, for errors.
        address: HOST:PORT.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub: ControlAsyncStub = ControlStub(self._channel)
        self._snapshots: SnapshotsAsyncStub = SnapshotsStub(self._channel)

    async def connect(self, seconds: float = CONNECT_SECONDS) -> pb.DescribeResponse:
        """Wait until the server answers, and say who it is.

        Raises:
            UnreachableError: nobody answers within so many seconds.
        """
        request = pb.DescribeRequest()
        try:
            async with asyncio.timeout(seconds):
                return await self._stub.Describe(request, wait_for_ready=True)
        except TimeoutError as error:
            raise UnreachableError(
                f"stage {self.name!r} at {self.address} does not answer within "
                f"{seconds:.0f} s; is `rpcmp serve` running there?"
            ) from error
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error

    async def health(self) -> str:
        """What the server's health service says: "SERVING" or "NOT_SERVING"."""
        check = HealthStub(self._channel).Check(HealthCheckRequest(), timeout=CALL_SECONDS)
        answer: HealthCheckResponse = await self._call(check)
        return str(HealthCheckResponse.ServingStatus.Name(answer.status))

    async def profile(self, request: pb.ProfileRequest) -> pb.ProfileResponse:
        """Measure a job's layers; takes as long as it takes."""
        return await self._call(self._stub.Profile(request))

    async def prepare(self, request: pb.PrepareRequest) -> pb.PrepareResponse:
        """Claim the server."""
        return await self._call(self._stub.Prepare(request, timeout=PREPARE_SECONDS))

    async def start(self, request: pb.StartRequest) -> pb.StartResponse:
        """Hand the worker its stage; takes as long as it takes to fetch what it begins with."""
        return await self._call(self._stub.Start(request))

    async def stop(self, request: pb.StopRequest) -> pb.StopResponse:
        """Free the server."""
        return await self._call(self._stub.Stop(request, timeout=CALL_SECONDS))

    async def drain(self) -> str:
        """Tell the server to stop; the name of the job that has to end first, if any."""
        request = pb.DrainRequest()
        answer: pb.DrainResponse = await self._call(self._stub.Drain(request, timeout=CALL_SECONDS))
        return answer.job

    async def inspect(self, request: pb.InspectRequest) -> pb.InspectResponse:
        """What the worker does at this moment."""
        return await self._call(self._stub.Inspect(request, timeout=CALL_SECONDS))

    async def mirror(self, request: pb.MirrorRequest) -> pb.MirrorResponse:
        """Have the server hold another stage's snapshots as well."""
        return await self._call(self._snapshots.Mirror(request, timeout=CALL_SECONDS))

    async def save(self, request: pb.SaveRequest) -> pb.Saved:
        """Have a snapshot written to the server's disk; takes as long as that takes."""
        answer: pb.SaveResponse = await self._call(self._snapshots.Save(request))
        return answer.saved

    async def check(self, request: pb.CheckRequest) -> list[str]:
        """Which of a checkpoint's files are on the server's disk; reads all of them."""
        answer: pb.CheckResponse = await self._call(self._snapshots.Check(request))
        return list(answer.states)

    async def put(self, requests: AsyncIterator[pb.PutRequest]) -> None:
        """Write a checkpoint's file to the server's disk; takes as long as that takes."""
        await self._call(self._snapshots.Put(requests))

    async def remove(self, request: pb.RemoveRequest) -> None:
        """Remove a checkpoint from the server's disk."""
        await self._call(self._snapshots.Remove(request, timeout=CALL_SECONDS))

    async def fetch(self, request: pb.FetchRequest) -> AsyncIterator[pb.FetchResponse]:
        """A snapshot, or a file of a checkpoint, in parts.

        Raises:
            RpcmpError: the server does not have it, or is gone.
        """
        async for part in self._stream(self._snapshots.Fetch(request)):
            yield part

    async def watch(self, request: pb.WatchRequest) -> AsyncIterator[pb.WatchResponse]:
        """What happens to the worker, until the claim ends.

        Raises:
            UnreachableError: the server is gone.
        """
        async for change in self._stream(self._stub.Watch(request)):
            yield change

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

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
        """The error that the server raised, with its place; else that it is unreachable."""
        where = f"stage {self.name!r} at {self.address}"
        details = error.details() or ""
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION and details.startswith("{"):
            data = json.loads(details)
            if set(data["fields"]) == {"message"}:
                data["fields"]["message"] = f"{where}: {data['fields']['message']}"
            return from_wire(json.dumps(data))
        return UnreachableError(f"lost {where}: {error.code().name}: {details}")
