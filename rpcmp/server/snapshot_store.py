"""State that outlives a worker: its stage's snapshots, and a neighbour's.

    worker ──copies──> own slots ──fetched by──> a neighbour's store on another machine
                                 ──opened by───> a neighbour's store on this machine

The store belongs to the server and not to a claim. A claim ends with its worker, or with the
connection to the driver, and a driver that comes back finds here the snapshots to resume from.

Snapshots are written to a disk one after the other, while the worker computes; the slot is pinned
meanwhile. The thread that writes yields to all others: a disk is never as urgent as the stages that
compute on the same cores.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rpcmp.checkpoint import files
from rpcmp.checkpoint.files import Inside, require_plain
from rpcmp.checkpoint.folder import name_of, require_name
from rpcmp.checkpoint.slots import MIRRORED_BY_ALL, Slots, Snapshot
from rpcmp.errors import CheckpointError, JobError, one_line
from rpcmp.net.peer_connection import Dialer
from rpcmp.server.client import StageClient
from rpcmp.server.moved_layers import PartMemory
from rpcmp.server.snapshot_transfer import Mirror, blocks, open_memory, receive, receive_file
from rpcmp.v1 import control_pb2 as pb

log = logging.getLogger(__name__)

AHEAD = 2
"""Checkpoints' files that a mirror writes more than its own stage, which may be a step behind."""

FolderOrReason = Inside | str
"""The folder of a job's checkpoints, or the reason why there is none on this host."""

NO_FOLDER = "the job has named no folder of checkpoints"


class SnapshotStore:
    """The snapshots that one server holds for one job.

    Attributes:
        job_id: the job; empty if there is none.
        stage_name: of the server's own stage.
        slots: the own stage's snapshots.
        parts: other stages', while a fresh worker takes layers over from them.
        mirror: another stage's snapshots; None if there is no mirror.
        former_mirrors: those of stages that other servers mirror now, until these can do without.
        freed: called when a slot can be written again.
        acknowledged: called with each step that the mirror has acknowledged.
    """

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self.job_id = ""
        self.stage_name = ""
        self.slots = Slots.create()
        self.parts = PartMemory()
        self.mirror: Mirror | None = None
        self.former_mirrors: list[Mirror] = []
        self._num_written, self._mirrors_none = 0, True
        self.freed: Callable[[], None] = lambda: None
        self.acknowledged: Callable[[int], None] = lambda step: None
        self._last_acknowledged = self._cut = 0
        self._folder: FolderOrReason = NO_FOLDER
        self._named: set[Path] = set()
        self._target: FolderOrReason = NO_FOLDER
        self._saves_mirror = False
        self._copies_ahead = 0
        self._disk = ThreadPoolExecutor(1, "rpcmp-saving", initializer=_yield_to_others)
        self._saves: set[asyncio.Task[None]] = set()
        self._being_saved: set[int] = set()
        self._changed = asyncio.Condition()

    async def open(self, job_id: str, folder: FolderOrReason, run: str = "") -> None:
        """Hold snapshots of this job, and none of any other.

        Args:
            folder: of its checkpoints; all paths in messages have to lie in it.
            run: name of the folder in it for new ones; empty: itself.
        """
        target = folder if isinstance(folder, str) or not run else folder / run
        if job_id != self.job_id:
            await self.clear()
            self.job_id = job_id
        self._folder, self._target = folder, target

    @property
    def inherited(self) -> tuple[int, ...]:
        """The descriptors that a worker gets."""
        return (*self.slots.fds, *self.parts.fds)

    @property
    def keeps_nothing(self) -> str:
        """Why the job's checkpoints cannot lie here; empty if they can."""
        return self._folder if isinstance(self._folder, str) else ""

    @property
    def folder(self) -> Path | None:
        """The folder of the job's checkpoints, without links; None if they cannot lie here."""
        return None if isinstance(self._folder, str) else self._folder.real

    def require_ours(self, path: str) -> Inside:
        """Return the path of a file or folder, which must be one of the job's checkpoints."""
        if isinstance(self._folder, str):
            raise CheckpointError(self._folder)
        place = self._folder.at(path)
        require_name(place.parts[len(self._folder.parts) :])
        return place

    def named(self, path: str) -> Inside:
        """Return the path of a file that the driver names, which its peers may read from now on."""
        place = self.require_ours(path)
        self._named.add(place.real)
        return place

    async def clear(self) -> None:
        """Drop everything, once saves that are under way have finished."""
        # Until then its memory must neither hold another snapshot nor go back to the system.
        await asyncio.gather(*self._saves, return_exceptions=True)
        for mirror in self._mirrors:
            await mirror.close()
        self.mirror, self.former_mirrors = None, []
        self.job_id = self.stage_name = ""
        self._folder = self._target = NO_FOLDER
        self._named.clear()
        self.slots.free_memory()
        self.parts.free()
        await self.notify()

    async def pause(self) -> None:
        """Stop copying, since the group has ended, and keep what is here.

        A save that is under way continues. A snapshot whose save was not requested before the
        worker ended is not saved.
        """
        self.parts.free()
        if self.mirror is not None:
            await self.mirror.pause()
        for snapshot in self.slots.all():
            if snapshot.step not in self._being_saved:
                self.slots.unpin(snapshot)

    async def add_written(self) -> None:
        """Note that the worker has written a snapshot."""
        self._num_written += 1
        if self._num_written >= MIRRORED_BY_ALL:
            formers, self.former_mirrors = self.former_mirrors, []
            if self.mirror is not None and self._mirrors_none:
                formers.append(self.mirror)
                self.mirror = None
            await asyncio.gather(*(former.close() for former in formers))
        await self.notify()

    async def notify(self) -> None:
        """Wake up all tasks that wait for a newer snapshot."""
        async with self._changed:
            self._changed.notify_all()

    def holdings(self) -> list[pb.Holding]:
        """Return the steps of each stage that are here."""
        held = [("", self.slots), *((mirror.stage_name, mirror.slots) for mirror in self._mirrors)]
        return [
            pb.Holding(stage_name=name, cut=cut, steps=of_cut)
            for name, slots in held
            for cut, of_cut in slots.by_cut().items()
        ]

    @property
    def _mirrors(self) -> list[Mirror]:
        return [*filter(None, [self.mirror]), *self.former_mirrors]

    async def start_mirror(self, request: pb.MirrorRequest) -> None:
        """Hold the snapshots of another stage as well."""
        file_of(request.stage_name)
        opened = await open_memory(request, self._dialer)
        of_it = [each for each in self._mirrors if each.stage_name == request.stage_name]
        others = [each for each in self._mirrors if each not in of_it]
        copies = of_it[0].take_copies() if of_it else None
        self.mirror = Mirror(request, self._save_copy, self._dialer, copies, opened)
        self._saves_mirror, self._mirrors_none = request.saves, False
        # What it has mirrored so far may be all that is left of a host, and no other mirror has
        # anything yet.
        self.former_mirrors = others
        for each in others:
            await each.pause()
        for each in of_it:
            await each.close()

    async def prepare(
        self, stage_name: str, restore: pb.Restore | None, generation: int, cut: int = 0
    ) -> tuple[list[str], list[int]]:
        """Prepare the state for a fresh worker.

        Returns:
            The files to restore if it is not in memory, and the places of the snapshots among what
            the worker inherits if they are of another cut.

        Args:
            stage_name: the server's own stage.
            restore: the snapshot or files; None: the worker starts from the config.
            generation: of the group that the worker and the servers to fetch from belong to.
            cut: of that group.
        """
        file_of(stage_name)
        self.stage_name, self._cut = stage_name, cut
        self._last_acknowledged = self._num_written = 0
        self._copies_ahead = 0
        self._mirrors_none = True  # until it is told otherwise
        if restore is None:
            self.slots.drop_all()
            return [], []
        if restore.files:
            self.slots.drop_all()
            return [await self._file(file, generation) for file in restore.files], []
        self.slots.truncate_after(restore.step)
        if restore.parts:
            step = restore.step
            return [], [await self._part(part, step, generation) for part in restore.parts]
        if restore.address:
            await self._fetch(restore, generation, cut)
        self._require(stage_name, restore.step, cut)
        return [], []

    async def stream(self, request: pb.FetchRequest) -> AsyncIterator[pb.FetchResponse]:
        """Yield the description of a snapshot, and then its bytes; or a checkpoint's file."""
        if request.path:
            path = self.require_ours(request.path)
            if path.real not in self._named:  # such as another run's, which may be secret
                raise CheckpointError(f"the driver has named no file {path} for others to read")
            try:
                async for data in files.parts(path):
                    yield pb.FetchResponse(data=data)
            except OSError as error:
                raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
            return
        if request.newer:
            slots, snapshot = self.slots, await self._next(request)
        else:
            slots, snapshot = self._require(request.stage_name, request.step, request.cut)
        yield pb.FetchResponse(
            step=snapshot.step,
            size=snapshot.length,
            is_saved=snapshot.is_pinned,
            cut=snapshot.cut,
        )
        async for part in blocks(slots.fd(snapshot.slot), snapshot.length):
            yield part
        if not slots.holds(snapshot):
            raise CheckpointError(f"step {snapshot.step} was overwritten while it was read")

    async def _next(self, request: pb.FetchRequest) -> Snapshot:
        """Wait for the snapshot that follows the mirror's last one, which it acknowledges."""
        step = request.step
        if step > self._last_acknowledged and self.slots.get(step) is not None:
            self._last_acknowledged = step
            self.acknowledged(step)

        def following() -> Snapshot | None:  # a mirror gets all, one after the other
            newer = [each for each in self.slots.all() if each.step > step]
            return min(newer, key=lambda each: (each.step, each.cut != self._cut), default=None)

        async with self._changed:
            await self._changed.wait_for(
                lambda: self.job_id != request.job_id or following() is not None
            )
        snapshot = following()
        if snapshot is None:
            raise JobError("the job has ended")
        return snapshot

    def _require(self, stage_name: str, step: int, cut: int) -> tuple[Slots, Snapshot]:
        held = [(self.stage_name, self.slots)]
        held += [(mirror.stage_name, mirror.slots) for mirror in self._mirrors]
        for name, slots in held:
            snapshot = slots.get(step, cut) if name == stage_name else None
            if snapshot is not None:
                return slots, snapshot
        raise CheckpointError(f"holds no snapshot of stage {stage_name!r} at step {step}")

    def save_if_pinned(self, step: int, on_saved: Callable[[pb.Saved], Awaitable[None]]) -> None:
        """Write the own stage's snapshot into the checkpoint of its step, in the background.

        Saves run one after the other, and to the end even if the claim ends meanwhile: two writers
        would spoil the file.
        """
        snapshot = self.slots.get(step, self._cut)
        if snapshot is not None and snapshot.is_pinned:
            self._being_saved.add(step)
            self._copies_ahead -= 1
            task = asyncio.create_task(self._save_own(snapshot, on_saved))
            self._saves.add(task)
            task.add_done_callback(self._saves.discard)

    async def _save_own(
        self, snapshot: Snapshot, on_saved: Callable[[pb.Saved], Awaitable[None]]
    ) -> None:
        saved = await self._save(self.slots, snapshot, self.stage_name)
        self._being_saved.discard(snapshot.step)
        self.freed()
        await on_saved(saved)

    async def save(self, stage_name: str, step: int, cut: int) -> pb.Saved:
        """Write a snapshot into the checkpoint of its step, and return the result."""
        slots, snapshot = self._require(stage_name, step, cut)
        slots.pin(snapshot.slot)
        return await self._save(slots, snapshot, stage_name)

    async def _save_copy(self, mirror: Mirror, snapshot: Snapshot) -> None:
        """Save a neighbour's snapshot if the neighbour saves it too."""
        is_due = snapshot.is_pinned and self._saves_mirror
        if is_due and self._copies_ahead >= AHEAD:
            text = "stage %r saves more often than this one, and step %d of it is not saved here"
            log.warning(text, mirror.stage_name, snapshot.step)
        elif is_due:
            self._copies_ahead += 1
            saved = await self._save(mirror.slots, snapshot, mirror.stage_name)
            if saved.error:
                log.warning("%s; stage %r has it on its own disk", saved.error, mirror.stage_name)
        mirror.slots.unpin(snapshot)

    async def _save(self, slots: Slots, snapshot: Snapshot, stage_name: str) -> pb.Saved:
        loop = asyncio.get_running_loop()
        arguments = slots, snapshot, stage_name, self._target
        return await loop.run_in_executor(self._disk, save_snapshot, *arguments)

    async def _fetch(self, restore: pb.Restore, generation: int, cut: int) -> None:
        """Copy a snapshot of this stage from another server."""
        request = self._request(self.stage_name, restore.step, cut, generation)
        async with StageClient(self.stage_name, restore.address, self._dialer) as client:
            await receive(client.fetch(request), self.slots, exactly=(restore.step, cut))

    def _request(self, stage_name: str, step: int, cut: int, generation: int) -> pb.FetchRequest:
        return pb.FetchRequest(
            job_id=self.job_id, generation=generation, stage_name=stage_name, step=step, cut=cut
        )

    async def _part(self, part: pb.Part, step: int, generation: int) -> int:
        """Have a snapshot of another cut where the worker finds it; return where that is."""
        request = self._request(part.stage_name, step, part.cut, generation)
        if part.address:
            async with StageClient(self.stage_name, part.address, self._dialer) as client:
                return await self.parts.add(client.fetch(request), step, part.cut)
        slots, snapshot = self._require(part.stage_name, step, part.cut)
        if slots is self.slots:
            return 1 + snapshot.slot
        return await self.parts.add(self.stream(request), step, part.cut)

    async def _file(self, file: pb.CheckpointFile, generation: int) -> str:
        """Return the path of a checkpoint's file on this host's disk; fetch it if necessary."""
        path = self.require_ours(file.path)
        if file.address:
            request = pb.FetchRequest(job_id=self.job_id, generation=generation, path=file.path)
            async with StageClient(self.stage_name, file.address, self._dialer) as client:
                parts = (part.data async for part in client.fetch(request))
                await receive_file(parts, path, file.size)
        state = await asyncio.to_thread(files.check, path, file.sha256, file.size)
        if state != "ok":
            raise CheckpointError(f"{path} is {state}")
        return str(path.real)


def file_of(stage_name: str) -> str:
    """Return the name of a stage's file in a step folder; it must not lead elsewhere."""
    name = f"{stage_name}.safetensors"
    require_plain(name)
    return name


def _yield_to_others() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def save_snapshot(
    slots: Slots, snapshot: Snapshot, stage_name: str, folder: FolderOrReason
) -> pb.Saved:
    """Write a snapshot into the checkpoint of its step in `folder`, and unpin it."""
    from rpcmp.checkpoint.safetensors_header import read_metadata  # pydantic

    saved = pb.Saved(step=snapshot.step, file=file_of(stage_name), host=platform.node())
    path = f"{folder}/{name_of(snapshot.step)}/{saved.file}"
    try:
        if isinstance(folder, str):
            raise CheckpointError(folder)
        memory = slots.fd(snapshot.slot)
        about = json.loads(read_metadata(memory)["rpcmp"])
        saved.state = json.dumps({key: about[key] for key in ("groups", "scheduler")})
        file = folder / name_of(snapshot.step) / saved.file
        written = files.copy_durably(file, memory, snapshot.length)
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
