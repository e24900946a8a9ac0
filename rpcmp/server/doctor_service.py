"""The Doctor service: what `rpcmp doctor` asks before a run. See protos/rpcmp/v1/doctor.proto."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import grpc

from rpcmp.server.connection import way_to
from rpcmp.server.services import answers_errors
from rpcmp.v1 import doctor_pb2 as pb
from rpcmp.v1 import doctor_pb2_grpc

if TYPE_CHECKING:
    from rpcmp.server.server import StageServer

    GrpcContext = grpc.aio.ServicerContext[Any, Any]


class DoctorServicer(doctor_pb2_grpc.DoctorServicer):
    """See protos/rpcmp/v1/doctor.proto."""

    def __init__(self, server: StageServer) -> None:
        self._server = server

    @answers_errors
    async def Examine(
        self, request: pb.ExamineRequest, grpc_context: GrpcContext
    ) -> pb.ExamineResponse:
        return pb.ExamineResponse(facts=await self._server.examine(request))

    @answers_errors
    async def Probe(self, request: pb.ProbeRequest, grpc_context: GrpcContext) -> pb.ProbeResponse:
        place = (request.stage_name, request.address, request.stage_index)
        way = await way_to(self._server.dialer, *place, request.seconds)
        return pb.ProbeResponse(**asdict(way))
