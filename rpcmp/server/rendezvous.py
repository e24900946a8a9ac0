"""The Rendezvous service: the key-value store of the job that has claimed this server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from rpcmp.server.control import answers_errors
from rpcmp.server.values import require_askable
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1 import control_pb2_grpc
from rpcmp.wire.inner import Inner

if TYPE_CHECKING:
    from rpcmp.server.claim import Claim
    from rpcmp.server.server import StageServer

    Job = pb.SetRequest | pb.GetRequest | pb.CompareSetRequest | pb.AddRequest
    GrpcContext = grpc.aio.ServicerContext[Any, Any]


class RendezvousServicer(control_pb2_grpc.RendezvousServicer):
    """See protos/rpcmp/v1/control.proto. The values go with the claim."""

    def __init__(self, server: StageServer, inner: Inner) -> None:
        self._server, self._inner = server, inner

    def _claim_of(self, job: Job, grpc_context: GrpcContext) -> Claim:
        """The current claim, whose group the caller must belong to."""
        role = self._inner.role(grpc_context.peer())
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
            claim.group.require_name(self._inner.role(grpc_context.peer()), name)

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
