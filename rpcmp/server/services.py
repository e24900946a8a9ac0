"""The Control and Doctor services: each call becomes a call of the stage server."""

from __future__ import annotations

import base64
import json
import os
import platform
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import grpc

from rpcmp.process.fork_client import Forks
from rpcmp.process.interpreter import compute_environment
from rpcmp.process.sandbox.confinement import Reach
from rpcmp.process.task import run_task
from rpcmp.server import claim_log
from rpcmp.server.connection import machine, measure_link
from rpcmp.server.hardened_grpc import Callers
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1 import control_pb2_grpc, doctor_pb2, doctor_pb2_grpc


async def profile(
    request: pb.ProfileRequest,
    forks: Forks,
    allowed: Sequence[str] | None,
    reach: Reach | None = None,
) -> str:
    """Measure a job's layers in a child process; return the profile as JSON.

    The child is killed if the caller cancels the call.

    Args:
        forks: starts the child.
        allowed: see StageServer.
        reach: files that the child may open beyond the job's own; None: it is not confined.

    Raises:
        RpcmpError: a layer failed, or the child ended.
    """
    with claim_log.unpacked(request.job.code) as folder:
        environment = compute_environment(request.job.threads)
        answer = await run_task(
            {
                "op": "profile",
                "order": request.order,
                "code_folder": str(folder or ""),
                "allowed": allowed,
                "sample": base64.b64encode(request.sample).decode(),
            },
            environment,
            forks,
            reach and reach.reading(folder),
        )
    return json.dumps(answer["profile"])


if TYPE_CHECKING:
    from rpcmp.server.stage_server import StageServer

    GrpcContext = grpc.aio.ServicerContext[Any, Any]


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
        claim = await self._server.prepare(request)
        snapshot_store, network = self._server.snapshot_store, await claim.network()
        return pb.PrepareResponse(
            generation=claim.generation,
            worker_pid=claim.worker_pid,
            holdings=snapshot_store.holdings(),
            machine=machine(),
            supervisor_pid=os.getpid(),
            snapshot_fds=snapshot_store.slots.fds,
            snapshot_inodes=[os.fstat(fd).st_ino for fd in snapshot_store.slots.fds],
            network=network.name,
            exposed=network.reason,
            host=platform.node(),
            keeps_nothing=snapshot_store.keeps_nothing,
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

    async def Drain(self, request: pb.DrainRequest, grpc_context: GrpcContext) -> pb.DrainResponse:
        await self._server.drain()
        claim = self._server.claim
        if claim is None:
            return pb.DrainResponse()
        return pb.DrainResponse(job=claim.job, generation=claim.generation)

    async def Stop(self, request: pb.StopRequest, grpc_context: GrpcContext) -> pb.StopResponse:
        await self._server.end(request.job_id, request.generation)
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
