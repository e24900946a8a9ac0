"""The Snapshots service: streams snapshots and checkpoint files from and to this host."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import grpc

from rpcmp.checkpoint import files
from rpcmp.checkpoint.files import Inside
from rpcmp.checkpoint.folder import remove
from rpcmp.checkpoint.slots import Slots
from rpcmp.errors import BusyError, CheckpointError, UnreachableError
from rpcmp.server.hardened_grpc import Callers
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1 import control_pb2_grpc

MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""Bytes of memory that this host has."""


async def blocks(fd: int, length: int) -> AsyncIterator[pb.FetchResponse]:
    """Yield the first `length` bytes of a snapshot's memory."""
    for offset in range(0, length, files.PART):
        data = await asyncio.to_thread(os.pread, fd, min(files.PART, length - offset), offset)
        yield pb.FetchResponse(data=data)


async def receive(stream: AsyncIterator[pb.FetchResponse], slots: Slots, pin: bool = False) -> int:
    """Write the snapshot of `stream` into `slots`; return its step.

    Args:
        pin: keep it until it is saved, if it is to be saved.
    """
    head = await anext(stream)
    slot = slots.begin()
    if slot is None:
        raise AssertionError("a mirror pins nothing for longer than a save takes")
    if head.size > MEMORY:
        raise UnreachableError(f"a snapshot of {head.size} bytes is more than this host's memory")
    fd = slots.fd(slot)
    os.ftruncate(fd, head.size)
    offset = 0
    async for part in stream:
        if offset + len(part.data) > head.size:
            raise UnreachableError(f"more than {head.size} bytes of a snapshot have arrived")
        offset += os.pwrite(fd, part.data, offset)
    if offset != head.size:
        raise UnreachableError(f"only {offset} of {head.size} bytes of a snapshot have arrived")
    slots.commit(slot, head.step, head.size, pin=pin and head.is_saved)
    return head.step


async def receive_file(parts: AsyncIterator[bytes], place: Inside, size: int) -> None:
    """Write the file of `parts` to the disk, without holding it in memory as a whole.

    Args:
        place: path of the file.
        size: its expected size in bytes.
    """
    loop = asyncio.get_running_loop()

    async def next_part() -> bytes:
        return await anext(parts, b"")

    def content() -> Iterator[bytes]:
        arrived = 0
        while part := asyncio.run_coroutine_threadsafe(next_part(), loop).result():
            arrived += len(part)
            yield part
        if arrived != size:
            raise UnreachableError(f"only {arrived} of {size} bytes of {place} have arrived")

    try:
        await asyncio.to_thread(files.write_durably, place, content())
    except OSError as error:
        raise CheckpointError(f"cannot write {place}: {error.strerror or error}") from error


if TYPE_CHECKING:
    from rpcmp.server.snapshot_store import SnapshotStore
    from rpcmp.server.stage_server import StageServer

    GrpcContext = grpc.aio.ServicerContext[Any, Any]


MAX_FETCHING = 64
"""Fetch calls at a time: by the mirror, and after a fault by each stage that needs what is here."""


class SnapshotsServicer(control_pb2_grpc.SnapshotsServicer):
    """See protos/rpcmp/v1/control.proto."""

    def __init__(self, server: StageServer, callers: Callers) -> None:
        self._server, self._callers = server, callers
        self._fetching = 0

    async def Fetch(
        self, request: pb.FetchRequest, grpc_context: GrpcContext
    ) -> AsyncIterator[pb.FetchResponse]:
        # A host that was replaced must not speak for its successor.
        claim = self._server.claimed_by(request.job_id, request.generation)
        claim.require_may_fetch(self._callers.role(grpc_context.peer()), request)
        snapshot_store = self._store_of(request.job_id)
        with self._one_more():
            async for part in snapshot_store.stream(request):
                yield part

    async def Save(self, request: pb.SaveRequest, grpc_context: GrpcContext) -> pb.SaveResponse:
        snapshot_store = self._store_of(request.job_id)
        saved = await snapshot_store.save(request.stage_name, request.step)
        return pb.SaveResponse(saved=saved)

    async def Mirror(
        self, request: pb.MirrorRequest, grpc_context: GrpcContext
    ) -> pb.MirrorResponse:
        claim = self._server.claimed_by(request.job_id, request.generation)
        await self._server.snapshot_store.hold(request)
        return pb.MirrorResponse(generation=claim.generation)

    async def Check(self, request: pb.CheckRequest, grpc_context: GrpcContext) -> pb.CheckResponse:
        paths = [self._server.snapshot_store.require_ours(file.path) for file in request.files]
        states = [
            await asyncio.to_thread(files.check, path, file.sha256, file.size)
            for path, file in zip(paths, request.files, strict=True)
        ]
        return pb.CheckResponse(states=states)

    async def Put(
        self, requests: AsyncIterator[pb.PutRequest], grpc_context: GrpcContext
    ) -> pb.PutResponse:
        head = await anext(requests, pb.PutRequest())
        place = self._store_of(head.job_id).require_ours(head.file.path)
        await receive_file((request.data async for request in requests), place, head.file.size)
        return pb.PutResponse()

    async def Remove(
        self, request: pb.RemoveRequest, grpc_context: GrpcContext
    ) -> pb.RemoveResponse:
        folder = self._server.snapshot_store.require_ours(request.folder)
        await asyncio.to_thread(remove, folder)
        return pb.RemoveResponse()

    @contextlib.contextmanager
    def _one_more(self) -> Iterator[None]:
        """Count a Fetch call; each holds a part in memory."""
        if self._fetching >= MAX_FETCHING:
            raise BusyError(f"{MAX_FETCHING} others fetch from this server already")
        self._fetching += 1
        try:
            yield
        finally:
            self._fetching -= 1

    def _store_of(self, job_id: str) -> SnapshotStore:
        """Return the snapshot store, if it holds the caller's job."""
        if not job_id or self._server.snapshot_store.job_id != job_id:
            raise BusyError("this server holds nothing of the job")
        return self._server.snapshot_store
