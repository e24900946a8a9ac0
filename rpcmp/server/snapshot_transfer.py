"""Snapshots and checkpoints' files on their way between hosts, and mirrors.

A mirror lets a neighbour's snapshots outlive its host, or at least its server. On the same machine
the neighbour's memory is opened, which costs nothing and keeps it alive when the neighbour is gone.
From another machine snapshots are copied one after the other; the request for the next one
acknowledges the last.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from rpcmp.checkpoint import files
from rpcmp.checkpoint.files import Inside
from rpcmp.checkpoint.slots import NUM_SLOTS, Slots, Snapshot, memory_name
from rpcmp.errors import CheckpointError, RpcmpError, SecurityError, UnreachableError
from rpcmp.net.identity import GRPC
from rpcmp.net.local_peer import is_process
from rpcmp.net.peer_connection import Dialer
from rpcmp.process.memory_access import open_descriptor
from rpcmp.process.resources import is_sealed
from rpcmp.server.client import StageClient
from rpcmp.server.connection import machine
from rpcmp.server.moved_layers import fill
from rpcmp.v1 import control_pb2 as pb

RETRY_SECONDS = 1.0

log = logging.getLogger(__name__)


async def blocks(fd: int, length: int) -> AsyncIterator[pb.FetchResponse]:
    """Yield the first `length` bytes of a snapshot's memory."""
    for offset in range(0, length, files.PART):
        data = await asyncio.to_thread(os.pread, fd, min(files.PART, length - offset), offset)
        yield pb.FetchResponse(data=data)


async def receive(
    stream: AsyncIterator[pb.FetchResponse],
    slots: Slots,
    pin: bool = False,
    after: int = -1,
    exactly: tuple[int, int] | None = None,
) -> Snapshot:
    """Write the snapshot of `stream` into `slots`.

    Args:
        pin: keep it until it is saved, if the sender saves it too.
        after: it has to be of a later step than this.
        exactly: it has to be of this step and cut. Another one could drop those that are held.

    Raises:
        UnreachableError: it is of another.
    """
    head = await anext(stream, pb.FetchResponse())
    if head.step <= after:
        raise UnreachableError(f"step {head.step} has arrived, and one after {after} was asked for")
    if exactly not in (None, (head.step, head.cut)):
        raise UnreachableError(
            f"(step, cut) {(head.step, head.cut)} has arrived, and {exactly} was asked for"
        )
    slot = slots.reserve()
    if slot is None:
        raise AssertionError("a mirror pins nothing for longer than a save takes")
    await fill(slots.fd(slot), head, stream)
    return slots.commit(slot, head.step, head.size, pin=pin and head.is_saved, cut=head.cut)


async def receive_file(parts: AsyncIterator[bytes], path: Inside, size: int) -> None:
    """Write a file of `size` bytes to the disk, without holding it in memory as a whole.

    Raises:
        UnreachableError: it is longer or shorter, of which nothing is left.
        CheckpointError: there is no room for it, or it cannot be written.
    """
    loop = asyncio.get_running_loop()

    async def next_part() -> bytes:
        return await anext(parts, b"")

    def content() -> Iterator[bytes]:
        files.require_room(path, size)
        arrived = 0
        while part := asyncio.run_coroutine_threadsafe(next_part(), loop).result():
            arrived += len(part)
            if arrived > size:
                raise UnreachableError(f"more than {size} bytes of {path} have arrived")
            yield part
        if arrived != size:
            raise UnreachableError(f"only {arrived} of {size} bytes of {path} have arrived")

    try:
        await asyncio.to_thread(files.write_durably, path, content())
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


class Mirror:
    """The snapshots of one neighbour, in `slots`.

    Args:
        request: names the neighbour, whose stage is `stage_name`.
        on_copy: called with each snapshot that has been copied.
        copies: snapshots that were copied before; owned by the mirror.
        opened: the neighbour's own memory, owned by the mirror; None: copy the snapshots.
    """

    def __init__(
        self,
        request: pb.MirrorRequest,
        on_copy: Callable[[Mirror, Snapshot], Awaitable[None]],
        dialer: Dialer,
        copies: Slots | None,
        opened: Slots | None,
    ) -> None:
        self.stage_name = request.stage_name
        self._request = request
        self._on_copy = on_copy
        self._dialer = dialer
        self.slots = opened or copies or Slots.create()
        if opened is not None and copies is not None:
            copies.close()
        self.slots.truncate_after(request.step)
        self._copying = asyncio.create_task(self._copy()) if opened is None else None

    def take_copies(self) -> Slots | None:
        """Hand over the copies, if these are copies; the mirror is empty afterwards."""
        if self._copying is None:
            return None
        for snapshot in self.slots.all():
            self.slots.unpin(snapshot)
        copies, self.slots = self.slots, Slots.create()
        return copies

    async def pause(self) -> None:
        """Stop copying."""
        if self._copying is not None:
            self._copying.cancel()
            await asyncio.gather(self._copying, return_exceptions=True)

    async def close(self) -> None:
        await self.pause()
        self.slots.close()

    async def _copy(self) -> None:
        """Copy each snapshot until cancelled; the neighbour may be away for a while."""
        snapshots = self.slots.all()
        last = snapshots[-1].step if snapshots else 0
        async with StageClient(self.stage_name, self._request.address, self._dialer) as client:
            while True:
                try:
                    last = await self._copy_next(client, last)
                    continue
                except SecurityError as error:  # the neighbour waits, and cannot say why
                    log.warning("cannot hold the snapshots of stage %r: %s", self.stage_name, error)
                except RpcmpError:  # gone, or between two generations: the driver sees to it
                    pass
                except Exception:  # no memory: the neighbour waits, and must not wait in silence
                    log.exception("cannot hold the snapshots of stage %r", self.stage_name)
                await asyncio.sleep(RETRY_SECONDS)

    async def _copy_next(self, client: StageClient, last: int) -> int:
        request = pb.FetchRequest(
            job_id=self._request.job_id,
            generation=self._request.generation,
            stage_name=self.stage_name,
            step=last,
            newer=True,
        )
        snapshot = await receive(client.fetch(request), self.slots, pin=True, after=last)
        if self.slots.holds(snapshot):
            await self._on_copy(self, snapshot)
        return snapshot.step


async def open_memory(request: pb.MirrorRequest, dialer: Dialer) -> Slots | None:
    """Open the snapshots of a server on this machine; None if not permitted, as in containers.

    The process id and the descriptors are the neighbour's claim. So the process has to be the one
    that answers at the neighbour's address: otherwise it could be another job's.
    """
    if request.machine != machine():
        return None
    if not dialer.security.insecure:  # else every process of this user is trusted
        try:
            connection = await dialer.open(request.address, GRPC, stage_index=None)
        except RpcmpError:  # it cannot be asked for copies either, now; that is tried again
            return None
        try:
            if not await is_process(connection.socket, request.supervisor_pid):
                return None
        except (OSError, SecurityError):  # the kernel does not say
            return None
        finally:
            connection.close()
    return _open(request)


def _open(request: pb.MirrorRequest) -> Slots | None:
    """Open a process's descriptors, if they are unchanged memory that was made for snapshots.

    Refuses files, and everything else that the process has open.
    """
    fds: list[int] = []
    try:
        if len(request.snapshot_fds) != 1 + NUM_SLOTS:
            raise OSError("another number of descriptors")
        for fd, inode in zip(request.snapshot_fds, request.snapshot_inodes, strict=True):
            fds.append(open_descriptor(request.supervisor_pid, fd, memory_name(len(fds))))
            status = os.fstat(fds[-1])
            if status.st_ino != inode or status.st_nlink:
                raise OSError("not the memory that was meant")
        if not is_sealed(fds[0]):
            raise OSError("what is mapped could be cut off")
        return Slots(fds)
    except (OSError, ValueError):
        for fd in fds:
            os.close(fd)
        return None
