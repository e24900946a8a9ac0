"""The Snapshots service: what a server holds in memory and on its disk, for others to have."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import grpc

from rpcmp.checkpoint import files
from rpcmp.checkpoint.folder import remove
from rpcmp.errors import BusyError, RpcmpError, to_wire
from rpcmp.server.control import answers_errors
from rpcmp.server.stream import receive_file
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1 import control_pb2_grpc
from rpcmp.wire.inner import Inner

if TYPE_CHECKING:
    from rpcmp.server.server import StageServer
    from rpcmp.server.vault import Vault

    GrpcContext = grpc.aio.ServicerContext[Any, Any]


MAX_FETCHING = 64
"""A stage's neighbour is one, and after a fault each stage whose snapshot or file is here."""


class SnapshotsServicer(control_pb2_grpc.SnapshotsServicer):
    """See protos/rpcmp/v1/control.proto."""

    def __init__(self, server: StageServer, inner: Inner) -> None:
        self._server, self._inner = server, inner
        self._fetching = 0

    async def Fetch(
        self, request: pb.FetchRequest, grpc_context: GrpcContext
    ) -> AsyncIterator[pb.FetchResponse]:
        try:
            # A host that was replaced must not speak for its successor.
            claim = self._server.claimed_by(request.job_id, request.generation)
            claim.require_may_fetch(self._inner.role(grpc_context.peer()), request)
            vault = self._vault_of(request.job_id)
            with self._one_more():
                async for part in vault.stream(request):
                    yield part
        except RpcmpError as error:
            await grpc_context.abort(grpc.StatusCode.FAILED_PRECONDITION, to_wire(error))

    @answers_errors
    async def Save(self, request: pb.SaveRequest, grpc_context: GrpcContext) -> pb.SaveResponse:
        vault = self._vault_of(request.job_id)
        saved = await vault.save(request.stage_name, request.step)
        return pb.SaveResponse(saved=saved)

    @answers_errors
    async def Mirror(
        self, request: pb.MirrorRequest, grpc_context: GrpcContext
    ) -> pb.MirrorResponse:
        claim = self._server.claimed_by(request.job_id, request.generation)
        await self._server.vault.hold(request)
        return pb.MirrorResponse(generation=claim.generation)

    @answers_errors
    async def Check(self, request: pb.CheckRequest, grpc_context: GrpcContext) -> pb.CheckResponse:
        paths = [self._server.vault.require_ours(file.path) for file in request.files]
        states = [
            await asyncio.to_thread(files.check, path, file.sha256, file.size)
            for path, file in zip(paths, request.files, strict=True)
        ]
        return pb.CheckResponse(states=states)

    @answers_errors
    async def Put(
        self, requests: AsyncIterator[pb.PutRequest], grpc_context: GrpcContext
    ) -> pb.PutResponse:
        head = await anext(requests, pb.PutRequest())
        place = self._vault_of(head.job_id).require_ours(head.file.path)
        await receive_file((request.data async for request in requests), place, head.file.size)
        return pb.PutResponse()

    @answers_errors
    async def Remove(
        self, request: pb.RemoveRequest, grpc_context: GrpcContext
    ) -> pb.RemoveResponse:
        folder = self._server.vault.require_ours(request.folder)
        await asyncio.to_thread(remove, folder)
        return pb.RemoveResponse()

    @contextlib.contextmanager
    def _one_more(self) -> Iterator[None]:
        """Count those who fetch: each has a part of what he gets in memory."""
        if self._fetching >= MAX_FETCHING:
            raise BusyError(f"{MAX_FETCHING} others fetch from this server already")
        self._fetching += 1
        try:
            yield
        finally:
            self._fetching -= 1

    def _vault_of(self, job_id: str) -> Vault:
        """The vault, which must hold what is the caller's."""
        if not job_id or self._server.vault.job_id != job_id:
            raise BusyError("this server holds nothing of the job")
        return self._server.vault
