"""State that outlives a worker: its stage's snapshots, and those of a neighbour.

    worker ──copies──> own slots ──fetched by──> a neighbour's store on another machine
                                 ──opened by───> a neighbour's store on this machine

The store belongs to the server and not to a claim. A claim ends with its worker, or with the
connection to the driver, and a driver that comes back finds here the snapshots to go on from.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from rpcmp.checkpoint import files
from rpcmp.checkpoint.files import Inside
from rpcmp.checkpoint.slots import Slots, Snapshot
from rpcmp.errors import CheckpointError, JobError
from rpcmp.net.dialer import Dialer
from rpcmp.server.client import StageClient
from rpcmp.server.snapshot_saver import Kept, Mirror, SnapshotSaver, file_of, open_memory
from rpcmp.server.snapshot_service import blocks, receive, receive_file
from rpcmp.v1 import control_pb2 as pb

log = logging.getLogger(__name__)

NO_FOLDER = "the job has named no folder of checkpoints"


@dataclass(frozen=True)
class Held:
    slots: Slots
    snapshot: Snapshot


def _nobody() -> None:
    pass


class SnapshotStore:
    """The snapshots that one server holds for one job.

    Args:
        dialer: connects this server to others.

    Attributes:
        job_id: the job; empty if there is none.
        stage_name: of the server's own stage.
        slots: the own stage's snapshots.
        mirror: another stage's snapshots; None if there is no mirror.
        freed: called when a slot can be written again.
    """

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self.job_id = ""
        self.stage_name = ""
        self.slots = Slots.create()
        self.mirror: Mirror | None = None
        self._acknowledged: asyncio.Queue[int] = asyncio.Queue()
        self._last_acknowledged = 0
        self.freed: Callable[[], None] = _nobody
        self._folder: Kept = NO_FOLDER
        self._target: Kept = NO_FOLDER
        self._saves_mirror = False
        self._disk = SnapshotSaver()
        self._saves: set[asyncio.Task[None]] = set()
        self._being_saved: set[int] = set()
        self._changed = asyncio.Condition()

    async def open(self, job_id: str, folder: Kept, run: str = "") -> None:
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
    def keeps_nothing(self) -> str:
        """Why the job's checkpoints cannot lie here; empty if they can."""
        return self._folder if isinstance(self._folder, str) else ""

    @property
    def folder(self) -> Path | None:
        """The folder of the job's checkpoints, without links; None if they cannot lie here."""
        return None if isinstance(self._folder, str) else self._folder.real

    def require_ours(self, path: str) -> Inside:
        """Return the path of a file or folder of the job's checkpoints."""
        if isinstance(self._folder, str):
            raise CheckpointError(self._folder)
        return self._folder.at(path)

    async def clear(self) -> None:
        """Drop everything, once saves that are under way have finished."""
        await self.wait_for_saves()
        if self.mirror is not None:
            await self.mirror.close()
        self.mirror = None
        self.job_id = self.stage_name = ""
        self._folder = self._target = NO_FOLDER
        self.slots.clear()
        await self.notify()

    async def pause(self) -> None:
        """Stop copying, since the group has ended, and keep what is here.

        A save that is under way goes on. A snapshot whose save was not requested before the worker
        ended is not saved.
        """
        if self.mirror is not None:
            await self.mirror.pause()
        for snapshot in self.slots.all():
            if snapshot.step not in self._being_saved:
                self.slots.unpin(snapshot)

    async def wait_for_saves(self) -> None:
        """Wait until no snapshot is being written to a disk.

        Until then its memory must neither hold another snapshot nor go back to the system.
        """
        await asyncio.gather(*self._saves, return_exceptions=True)

    async def notify(self) -> None:
        """Wake up all tasks that wait for a newer snapshot."""
        async with self._changed:
            self._changed.notify_all()

    def holdings(self) -> list[pb.Holding]:
        """Return the steps of each stage that are here."""
        own = pb.Holding(stage_name="", steps=[found.step for found in self.slots.all()])
        if self.mirror is None:
            return [own]
        steps = [found.step for found in self.mirror.slots.all()]
        return [own, pb.Holding(stage_name=self.mirror.stage_name, steps=steps)]

    async def hold(self, request: pb.MirrorRequest) -> None:
        """Mirror the snapshots of another stage."""
        file_of(request.stage_name)
        opened = await open_memory(request, self._dialer)
        before = self.mirror
        kept = before.take_copies() if before and before.stage_name == request.stage_name else None
        self.mirror = Mirror(request, self._arrived, self._dialer, kept, opened)
        self._saves_mirror = request.saves
        if before is not None:
            await before.close()

    async def prepare(
        self, stage_name: str, restore: pb.Restore | None, generation: int
    ) -> list[str]:
        """Prepare the state for a fresh worker; return the files to restore if it is not in memory.

        Args:
            stage_name: the server's own stage.
            restore: the snapshot or files; None: the worker starts from the config.
            generation: of the group that the worker and the servers to fetch from belong to.
        """
        file_of(stage_name)
        self.stage_name = stage_name
        while not self._acknowledged.empty():  # of a time that was undone
            self._acknowledged.get_nowait()
        self._last_acknowledged = 0
        if restore is None:
            self.slots.drop()
            return []
        if restore.files:
            self.slots.drop()
            return [await self._file(file, generation) for file in restore.files]
        if restore.address:
            await self._fetch(restore, generation)
        self.slots.truncate_after(restore.step)
        self._require(stage_name, restore.step)
        return []

    async def stream(self, request: pb.FetchRequest) -> AsyncIterator[pb.FetchResponse]:
        """Yield the description of a snapshot, or of a checkpoint's file, and then its bytes."""
        if request.path:
            async for part in self._file_blocks(self.require_ours(request.path)):
                yield part
            return
        held = await self._wanted(request)
        snapshot = held.snapshot
        yield pb.FetchResponse(
            step=snapshot.step, size=snapshot.length, is_saved=snapshot.is_pinned
        )
        async for part in blocks(held.slots.fd(snapshot.slot), snapshot.length):
            yield part
        if not held.slots.holds(snapshot):
            raise CheckpointError(f"step {snapshot.step} was overwritten while it was read")

    async def acknowledgements(self) -> AsyncIterator[int]:
        """Yield each step that a neighbour has acknowledged."""
        while True:
            yield await self._acknowledged.get()

    def find(self, stage_name: str, step: int) -> Held | None:
        """Return a snapshot; None if it is not here."""
        every = [(self.stage_name, self.slots)]
        if self.mirror is not None:
            every.append((self.mirror.stage_name, self.mirror.slots))
        for name, slots in every:
            if name == stage_name and (found := slots.get(step)) is not None:
                return Held(slots, found)
        return None

    def save_if_pinned(self, step: int, done: Callable[[pb.Saved], Awaitable[None]]) -> None:
        """Write a pinned snapshot into the checkpoint of its step, in the background.

        Saves run one after the other, and to the end even if the claim ends meanwhile: two writers
        would spoil the file.

        Args:
            step: of the own stage's snapshot.
            done: called with the result.
        """
        held = self.find(self.stage_name, step)
        if held is not None and held.snapshot.is_pinned:
            self._being_saved.add(step)
            task = asyncio.create_task(self._save(held, done))
            self._saves.add(task)
            task.add_done_callback(self._saves.discard)

    async def _save(self, held: Held, done: Callable[[pb.Saved], Awaitable[None]]) -> None:
        saved = await self._disk.save(held.slots, held.snapshot, self.stage_name, self._target)
        self._being_saved.discard(held.snapshot.step)
        self.freed()
        await done(saved)

    async def save(self, stage_name: str, step: int) -> pb.Saved:
        """Write a snapshot into the checkpoint of its step."""
        held = self._require(stage_name, step)
        held.slots.pin(held.snapshot.slot)
        return await self._disk.save(held.slots, held.snapshot, stage_name, self._target)

    async def _arrived(self, mirror: Mirror, snapshot: Snapshot) -> None:
        """Save a neighbour's snapshot if the neighbour saves it too."""
        if snapshot.is_pinned and self._saves_mirror:
            name = mirror.stage_name
            saved = await self._disk.save(mirror.slots, snapshot, name, self._target)
            if saved.error:
                log.warning("%s; stage %r has it on its own disk", saved.error, mirror.stage_name)
        mirror.slots.unpin(snapshot)

    @staticmethod
    async def _file_blocks(path: Inside) -> AsyncIterator[pb.FetchResponse]:
        try:
            async for data in files.parts(path):
                yield pb.FetchResponse(data=data)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error

    def _require(self, stage_name: str, step: int) -> Held:
        found = self.find(stage_name, step)
        if found is None:
            raise CheckpointError(f"holds no snapshot of stage {stage_name!r} at step {step}")
        return found

    async def _wanted(self, request: pb.FetchRequest) -> Held:
        if not request.newer:
            return self._require(request.stage_name, request.step)
        self._acknowledge(request.step)
        async with self._changed:
            await self._changed.wait_for(
                lambda: self.job_id != request.job_id or self._newer(request.step) is not None
            )
        newer = self._newer(request.step)
        if newer is None:
            raise JobError("the job has ended")
        return Held(self.slots, newer)

    def _acknowledge(self, step: int) -> None:
        """Record the mirror's acknowledgement of `step`; ignores repeats and unknown steps."""
        if step > self._last_acknowledged and self.slots.get(step) is not None:
            self._last_acknowledged = step
            self._acknowledged.put_nowait(step)

    def _newer(self, step: int) -> Snapshot | None:
        """Return the oldest snapshot after `step`: a neighbour gets all, one after the other."""
        return next((found for found in self.slots.all() if found.step > step), None)

    async def _fetch(self, restore: pb.Restore, generation: int) -> None:
        """Copy a snapshot of this stage from another server."""
        request = pb.FetchRequest(
            job_id=self.job_id,
            generation=generation,
            stage_name=self.stage_name,
            step=restore.step,
        )
        async with StageClient(self.stage_name, restore.address, self._dialer) as client:
            await receive(client.fetch(request), self.slots)

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
