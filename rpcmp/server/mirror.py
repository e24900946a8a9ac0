"""A neighbour's snapshots, so that they outlive its host, or at least its server.

On the same machine the neighbour's memory is opened, which costs nothing and keeps it alive when
the neighbour is gone. From another machine they are copied one after the other; to ask for the next
one tells the neighbour that this one has arrived.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable

from rpcmp.control.client import StageClient
from rpcmp.control.options import machine
from rpcmp.errors import RpcmpError, SecurityError
from rpcmp.sealed import is_sealed
from rpcmp.server.stream import receive
from rpcmp.snapshot.slots import NUM_SLOTS, Slots, Snapshot, memory_name
from rpcmp.v1 import control_pb2 as pb
from rpcmp.wire.credentials import GRPC
from rpcmp.wire.dialer import Dialer
from rpcmp.wire.localpeer import is_process

RETRY_SECONDS = 1.0

log = logging.getLogger(__name__)

Arrived = Callable[["Mirror", Snapshot], Awaitable[None]]


class Mirror:
    """The snapshots of one neighbour.

    Args:
        request: which neighbour.
        arrived: told of each snapshot that has been copied.
        dialer: how this server talks to others.
        kept: copies that there are already; owned from now on.
        opened: the neighbour's own memory; owned from now on; None: copy it.

    Attributes:
        stage_name: the neighbour's stage.
        slots: its snapshots.
        is_copy: whether they are on this machine because of us.
    """

    def __init__(
        self,
        request: pb.MirrorRequest,
        arrived: Arrived,
        dialer: Dialer,
        kept: Slots | None = None,
        opened: Slots | None = None,
    ) -> None:
        self.stage_name = request.stage_name
        self._request = request
        self._arrived = arrived
        self._dialer = dialer
        self.is_copy = opened is None
        self.slots = opened or kept or Slots.create()
        if opened is not None and kept is not None:
            kept.close()
        self.slots.truncate_after(request.step)
        self._copying = asyncio.create_task(self._copy()) if self.is_copy else None

    def take_copies(self) -> Slots | None:
        """Hand over the copies, where these are copies; nothing is left here."""
        if not self.is_copy:
            return None
        for snapshot in self.slots.all():
            self.slots.unpin(snapshot)
        copies, self.slots = self.slots, Slots.create()
        return copies

    async def pause(self) -> None:
        """Copy nothing more."""
        if self._copying is not None:
            self._copying.cancel()
            await asyncio.gather(self._copying, return_exceptions=True)

    async def close(self) -> None:
        """Let go of them."""
        await self.pause()
        self.slots.close()

    async def _copy(self) -> None:
        """Copy every snapshot until told to stop; a neighbour may be away for a while."""
        snapshots = self.slots.all()
        have = snapshots[-1].step if snapshots else 0
        async with StageClient(self.stage_name, self._request.address, self._dialer) as client:
            while True:
                try:
                    have = await self._copy_next(client, have)
                except (
                    SecurityError
                ) as error:  # the worker there waits, and its host cannot say why
                    log.warning("cannot hold the snapshots of stage %r: %s", self.stage_name, error)
                    await asyncio.sleep(RETRY_SECONDS)
                except RpcmpError:  # gone, or between two generations: the driver sees to it
                    await asyncio.sleep(RETRY_SECONDS)
                except Exception:  # no memory: the neighbour waits, and must not wait in silence
                    log.exception("cannot hold the snapshots of stage %r", self.stage_name)
                    await asyncio.sleep(RETRY_SECONDS)

    async def _copy_next(self, client: StageClient, have: int) -> int:
        request = pb.FetchRequest(
            job_id=self._request.job_id,
            generation=self._request.generation,
            stage_name=self.stage_name,
            step=have,
            newer=True,
        )
        step = await receive(client.fetch(request), self.slots, pin=True)
        if (found := self.slots.get(step)) is not None:
            await self._arrived(self, found)
        return step


async def open_memory(request: pb.MirrorRequest, dialer: Dialer) -> Slots | None:
    """The memory of a server on this machine; None where this process may not, as in containers.

    Which process it is, and what of it, is the neighbour's word. So it has to be the one that
    answers at the neighbour's address, or it could be that of another job.

    Args:
        request: which neighbour.
        dialer: how this server talks to others.
    """
    if request.machine != machine():
        return None
    if not dialer.security.insecure:  # else everybody is believed
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
    """What the numbers lead to, if it is memory that was made for snapshots and is as it was made.

    No file, and nothing else that the process has open.
    """
    fds: list[int] = []
    try:
        if len(request.snapshot_fds) != 1 + NUM_SLOTS:
            raise OSError("not as many as there are")
        for fd, inode in zip(request.snapshot_fds, request.snapshot_inodes, strict=True):
            path = f"/proc/{request.supervisor_pid}/fd/{fd}"
            name = memory_name(len(fds))
            if os.readlink(path) != f"/memfd:{name} (deleted)":  # before it is opened
                raise OSError("not memory of snapshots")
            fds.append(os.open(path, os.O_RDWR))
            found = os.fstat(fds[-1])
            opened = os.readlink(f"/proc/self/fd/{fds[-1]}")
            if found.st_ino != inode or found.st_nlink or opened != f"/memfd:{name} (deleted)":
                raise OSError("not the memory that was meant")
        if not is_sealed(fds[0]):
            raise OSError("what is mapped could be cut off")
        if os.stat(f"/proc/{request.supervisor_pid}").st_uid != os.geteuid():
            raise OSError("not a process of this user")
        return Slots(fds)
    except (OSError, ValueError):
        for fd in fds:
            os.close(fd)
        return None
