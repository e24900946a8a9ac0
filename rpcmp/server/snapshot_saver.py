"""Write snapshots from memory to a disk, and mirror those of a neighbour.

Snapshots are written one after the other, while the worker goes on; the slot is pinned meanwhile.
The thread that writes yields to all others: a disk is never as urgent as the stages that compute on
the same cores.

A mirror lets a neighbour's snapshots outlive its host, or at least its server. On the same machine
the neighbour's memory is opened, which costs nothing and keeps it alive when the neighbour is gone.
From another machine snapshots are copied one after the other; the request for the next one
acknowledges the last.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from rpcmp.checkpoint import files
from rpcmp.checkpoint.files import Inside, require_plain
from rpcmp.checkpoint.folder import name_of
from rpcmp.checkpoint.safetensors_header import read_metadata
from rpcmp.checkpoint.slots import NUM_SLOTS, Slots, Snapshot, memory_name
from rpcmp.errors import CheckpointError, RpcmpError, SecurityError, one_line
from rpcmp.net.dialer import Dialer
from rpcmp.net.identity import GRPC
from rpcmp.net.local_peer import is_process
from rpcmp.process.descriptors import is_sealed
from rpcmp.server.client import StageClient
from rpcmp.server.connection import machine
from rpcmp.server.snapshot_service import receive
from rpcmp.v1 import control_pb2 as pb

Kept = Inside | str
"""The folder of a job's checkpoints, or the reason why there is none on this host."""


class SnapshotSaver:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "rpcmp-saving", initializer=_yield_to_others)

    async def save(
        self, slots: Slots, snapshot: Snapshot, stage_name: str, folder: Kept
    ) -> pb.Saved:
        """Write a snapshot into the checkpoint of its step, unpin it, and return the result.

        Args:
            folder: of the run's checkpoints, or the reason why there is none.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, _save, slots, snapshot, stage_name, folder)


def file_of(stage_name: str) -> str:
    """Return the name of a stage's file in a step folder."""
    name = f"{stage_name}.safetensors"
    require_plain(name)
    return name


def _yield_to_others() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _save(slots: Slots, snapshot: Snapshot, stage_name: str, folder: Kept) -> pb.Saved:
    saved = pb.Saved(step=snapshot.step, file=file_of(stage_name), host=platform.node())
    path = f"{folder}/{name_of(snapshot.step)}/{saved.file}"
    try:
        if isinstance(folder, str):
            raise CheckpointError(folder)
        place = folder / name_of(snapshot.step) / saved.file
        memory = slots.fd(snapshot.slot)
        saved.state = _about(memory)
        written = files.copy_durably(place, memory, snapshot.length)
        saved.sha256, saved.size = written.sha256, written.size
        if not slots.holds(snapshot):
            saved.error = f"{path} was overwritten in memory while it was written"
    except OSError as error:
        saved.error = f"cannot write {path}: {error.strerror or error}"
    except CheckpointError as error:
        saved.error = str(error)
    except Exception as error:  # the caller waits for a result
        saved.error = f"cannot save {path}: {one_line(error)}"
    finally:
        slots.unpin(snapshot)
    return saved


def _about(memory: int) -> str:
    """Return the learning rates and scheduler in the metadata of a snapshot's safetensors header.

    Args:
        memory: descriptor of the snapshot.
    """
    about = json.loads(read_metadata(memory)["rpcmp"])
    return json.dumps({key: about[key] for key in ("groups", "scheduler")})


RETRY_SECONDS = 1.0

log = logging.getLogger(__name__)

Arrived = Callable[["Mirror", Snapshot], Awaitable[None]]


class Mirror:
    """The snapshots of one neighbour.

    Args:
        request: names the neighbour.
        arrived: called with each snapshot that has been copied.
        dialer: connects this server to others.
        kept: copies that exist already; owned by the mirror.
        opened: the neighbour's own memory, owned by the mirror; None: copy the snapshots.

    Attributes:
        stage_name: the neighbour's stage.
        slots: its snapshots.
        is_copy: whether the snapshots are copies.
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
        """Hand over the copies, if these are copies; the mirror is empty afterwards."""
        if not self.is_copy:
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
    """Open the snapshots of a server on this machine; None if not permitted, as in containers.

    The process id and the descriptors are the neighbour's claim. So the process has to be the one
    that answers at the neighbour's address: otherwise it could be another job's.

    Args:
        request: names the neighbour.
        dialer: connects this server to others.
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
    """Open a process's descriptors, if they are unchanged memory that was made for snapshots.

    Refuses files, and everything else that the process has open.
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
