"""The Control service: messages in, calls of the stage server, messages out.

An error of ours travels as the status's details, in the JSON of `rpcmp.errors`, so that the driver
raises the very error that the server did.

Measuring a job's layers on this host: a child as a worker is, for the length of one call.

The Rendezvous service: the key-value store of the job that has claimed this server.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import platform
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from rpcmp.errors import JobError, RpcmpError, one_line, to_wire
from rpcmp.process.child import Child
from rpcmp.process.confinement import Reach
from rpcmp.process.fork_client import Forks
from rpcmp.process.interpreter import compute_environment
from rpcmp.server import claim_log
from rpcmp.server.connection import machine
from rpcmp.server.hardened_grpc import Callers
from rpcmp.server.kv_store import require_askable
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1 import control_pb2_grpc


async def profile(
    request: pb.ProfileRequest,
    forks: Forks,
    allowed: Sequence[str] | None,
    reach: Reach | None = None,
) -> str:
    """JSON of what was measured; the child ends where the caller goes away.

    Args:
        forks: where the child comes from.
        allowed: see StageServer.
        reach: what the child may open beyond the job's files; None: it is not confined.

    Raises:
        RpcmpError: what a layer failed with, or why the child ended.
    """
    with claim_log.unpacked(request.job.code) as folder:
        environment = compute_environment(request.job.threads)
        child = await Child.spawn(
            "rpcmp.worker.profiler", environment, forks=forks, reach=reach and reach.reading(folder)
        )
        answer = await child.ask(
            {
                "op": "profile",
                "order": request.order,
                "code_folder": str(folder or ""),
                "allowed": allowed,
                "sample": base64.b64encode(request.sample).decode(),
            }
        )
    return json.dumps(answer["profile"])


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

    def __init__(self, server: StageServer, callers: Callers) -> None:
        self._server, self._callers = server, callers

    @answers_errors
    async def Describe(
        self, request: pb.DescribeRequest, grpc_context: GrpcContext
    ) -> pb.DescribeResponse:
        role = self._callers.role(grpc_context.peer())
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


if TYPE_CHECKING:
    from rpcmp.server.claim import Claim
    from rpcmp.server.server import StageServer

    Job = pb.SetRequest | pb.GetRequest | pb.CompareSetRequest | pb.AddRequest


class RendezvousServicer(control_pb2_grpc.RendezvousServicer):
    """See protos/rpcmp/v1/control.proto. The values go with the claim."""

    def __init__(self, server: StageServer, callers: Callers) -> None:
        self._server, self._callers = server, callers

    def _claim_of(self, job: Job, grpc_context: GrpcContext) -> Claim:
        """The current claim, whose group the caller must belong to."""
        role = self._callers.role(grpc_context.peer())
        claim = self._server.claimed_by(job.job_id, job.generation)
        claim.group.require_member(role, "use the rendezvous")
        return claim

    def _require_own(self, claim: Claim, key: str, value: bytes, grpc_context: GrpcContext) -> None:
        """Refuse a member that would give another's address, or be at another's rank.

        No agent asks who it has reached at an address: torch's agents store theirs under
        "addrs/NAME", and their names under "names/RANK".

        Raises:
            SecurityError: the caller's certificate is for neither that member nor the driver.
        """
        kind, _, rest = key.partition("/")
        if kind in ("addrs", "names"):
            name = rest if kind == "addrs" else value.decode(errors="replace")
            claim.group.require_name(self._callers.role(grpc_context.peer()), name)

    @answers_errors
    async def Set(self, request: pb.SetRequest, grpc_context: GrpcContext) -> pb.SetResponse:
        claim = self._claim_of(request, grpc_context)
        self._require_own(claim, request.key, request.value, grpc_context)
        claim.values.set(request.key, request.value)
        return pb.SetResponse(generation=claim.generation)

    @answers_errors
    async def Get(self, request: pb.GetRequest, grpc_context: GrpcContext) -> pb.GetResponse:
        claim = self._claim_of(request, grpc_context)
        require_askable(request.keys)
        await claim.values.wait_for(request.keys)
        value = claim.values.get(request.keys[0])
        return pb.GetResponse(generation=claim.generation, value=value or b"")

    @answers_errors
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

    @answers_errors
    async def Add(self, request: pb.AddRequest, grpc_context: GrpcContext) -> pb.AddResponse:
        claim = self._claim_of(request, grpc_context)
        self._require_own(claim, request.key, b"", grpc_context)
        value = claim.values.add(request.key, request.amount)
        return pb.AddResponse(generation=claim.generation, value=value)
