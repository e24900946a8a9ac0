"""The Control service: messages in, calls of the stage server, messages out.

An error of ours travels as the status's details, in the JSON of `rpcmp.errors`, so that the driver
raises the very error that the server did.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from rpcmp.control.options import machine
from rpcmp.errors import JobError, RpcmpError, one_line, to_wire
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1 import control_pb2_grpc
from rpcmp.wire.inner import Inner

if TYPE_CHECKING:
    from rpcmp.server.server import StageServer

    GrpcContext = grpc.aio.ServicerContext[Any, Any]

Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])


def answers_errors(method: Method) -> Method:
    """Turn an RpcmpError into a failed call that carries it."""

    @functools.wraps(method)
    async def wrapper(self: Any, request: Any, grpc_context: GrpcContext) -> Any:
        try:
            return await method(self, request, grpc_context)
        except RpcmpError as error:
            await grpc_context.abort(grpc.StatusCode.FAILED_PRECONDITION, to_wire(error))
        except OSError as error:  # a full disk, no more processes
            failure = JobError(one_line(error))
            await grpc_context.abort(grpc.StatusCode.FAILED_PRECONDITION, to_wire(failure))

    return wrapper  # type: ignore[return-value]


class ControlServicer(control_pb2_grpc.ControlServicer):
    """See protos/rpcmp/v1/control.proto."""

    def __init__(self, server: StageServer, inner: Inner) -> None:
        self._server, self._inner = server, inner

    @answers_errors
    async def Describe(
        self, request: pb.DescribeRequest, grpc_context: GrpcContext
    ) -> pb.DescribeResponse:
        role = self._inner.role(grpc_context.peer())
        if role is None or role.is_driver:
            return self._server.describe()
        return pb.DescribeResponse(draining=self._server.draining)

    @answers_errors
    async def Profile(
        self, request: pb.ProfileRequest, grpc_context: GrpcContext
    ) -> pb.ProfileResponse:
        return pb.ProfileResponse(profile=await self._server.profile(request))

    @answers_errors
    async def Prepare(
        self, request: pb.PrepareRequest, grpc_context: GrpcContext
    ) -> pb.PrepareResponse:
        claim = await self._server.prepare(request)
        vault, network = self._server.vault, await claim.network()
        return pb.PrepareResponse(
            generation=claim.generation,
            worker_pid=claim.worker_pid,
            holdings=vault.holdings(),
            machine=machine(),
            supervisor_pid=os.getpid(),
            snapshot_fds=vault.slots.fds,
            snapshot_inodes=[os.fstat(fd).st_ino for fd in vault.slots.fds],
            network=network.name,
            exposed=network.reason,
            host=platform.node(),
            keeps_nothing=vault.keeps_nothing,
        )

    @answers_errors
    async def Start(self, request: pb.StartRequest, grpc_context: GrpcContext) -> pb.StartResponse:
        claim = self._server.claimed_by(request.job_id, request.generation)
        await claim.start(request)
        return pb.StartResponse(generation=claim.generation)

    @answers_errors
    async def Link(self, request: pb.LinkRequest, grpc_context: GrpcContext) -> pb.LinkResponse:
        claim = self._server.claimed_by(request.job_id, request.generation)
        await claim.link(request)
        return pb.LinkResponse(generation=claim.generation)

    async def Watch(
        self, request: pb.WatchRequest, grpc_context: GrpcContext
    ) -> AsyncIterator[pb.WatchResponse]:
        try:
            claim = self._server.claimed_by(request.job_id, request.generation)
            async for change in self._server.watch(claim):
                yield change
        except RpcmpError as error:
            await grpc_context.abort(grpc.StatusCode.FAILED_PRECONDITION, to_wire(error))

    async def Drain(self, request: pb.DrainRequest, grpc_context: GrpcContext) -> pb.DrainResponse:
        await self._server.drain()
        claim = self._server.claim
        if claim is None:
            return pb.DrainResponse()
        return pb.DrainResponse(job=claim.job, generation=claim.generation)

    @answers_errors
    async def Stop(self, request: pb.StopRequest, grpc_context: GrpcContext) -> pb.StopResponse:
        await self._server.end(request.job_id, request.generation)
        return pb.StopResponse(generation=request.generation)

    @answers_errors
    async def Inspect(
        self, request: pb.InspectRequest, grpc_context: GrpcContext
    ) -> pb.InspectResponse:
        claim = self._server.claimed_by(request.job_id, request.generation)
        claim.hear_all()
        return pb.InspectResponse(
            generation=claim.generation,
            host=platform.node(),
            doing=pb.Doing(**claim.doing._asdict()),
            stacks=await claim.stacks() if request.stacks else "",
            logs=claim.lines.newest,
        )
