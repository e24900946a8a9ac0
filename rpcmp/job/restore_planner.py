"""Where each generation of a run begins: in memory, on a disk, or from the config.

What a generation begins with: the config, or what its servers hold of a step.

Going on from a checkpoint: the newest one that is whole, wherever its files are.

Every host says which of the files it has on its disk and whether their hashes are right. A stage
whose host does not have what it needs fetches it from one that does; what only the driver's host
has is sent from here. Layers decide who needs what, so the stages may be other ones than those that
wrote the files.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rpcmp.checkpoint import files
from rpcmp.checkpoint.folder import CheckpointFolder
from rpcmp.checkpoint.manifest import Manifest, StageFile, check_model
from rpcmp.checkpoint.runs import require_none_asked_for, whole_runs
from rpcmp.config.schema import Config
from rpcmp.errors import CheckpointError
from rpcmp.job.checkpoints import Checkpoints
from rpcmp.job.recovery import CommonSnapshot, HeldSnapshots, newest_common
from rpcmp.job.server_pool import ServerPool
from rpcmp.observability.events.definitions import ResumedEvent, WarningEvent
from rpcmp.observability.events.event import Event
from rpcmp.v1 import control_pb2 as pb


@dataclass(frozen=True)
class RestorePoint:
    """Where a generation begins.

    Attributes:
        step: optimizer steps done.
        restores: what each worker begins with, by its label; empty: all start from the config.
    """

    step: int = 0
    restores: Mapping[str, pb.Restore] = field(default_factory=dict)


Choose = Callable[[list[str], dict[str, HeldSnapshots]], Awaitable[RestorePoint]]
"""Where to begin, given the stages' assignments and what their servers hold."""


async def afresh(assignments: list[str], holdings: dict[str, HeldSnapshots]) -> RestorePoint:
    """From the config."""
    return RestorePoint()


def from_memory(found: CommonSnapshot, config: Config, fleet: ServerPool) -> RestorePoint:
    """Begin with what the servers hold of one step."""
    labels = [worker.label for worker in config.workers]
    addresses = dict(zip(labels, fleet.addresses, strict=True))
    return RestorePoint(
        found.step,
        {
            label: pb.Restore(step=found.step, address="" if holder == label else addresses[holder])
            for label, holder in found.holders.items()
        },
    )


class CheckpointResolver:
    """The checkpoints that a run can go on from.

    Args:
        config: the job.
        fleet: its servers, opened.
        report: told of checkpoints that cannot be used ("warning").
    """

    def __init__(self, config: Config, fleet: ServerPool, report: Callable[[Event], None]) -> None:
        self._config = config
        self._fleet = fleet
        self._report = report
        self._folder = CheckpointFolder(config.checkpoint_folder / fleet.run_folder)

    async def newest(
        self, assignments: Sequence[str], run: str | None
    ) -> tuple[RestorePoint, Manifest] | None:
        """The newest checkpoint that every stage can begin with; None where there is none at all.

        Args:
            assignments: of each worker, JSON of rpcmp.pipelining.assignment.Assignment.
            run: only those of this one; None: of any.

        Raises:
            CheckpointError: there are some, but none of them is whole, or of this model.
        """
        layers = [json.loads(assignment)["layers"] for assignment in assignments]
        unsplit = list(dict.fromkeys(name for of_worker in layers for name in of_worker))
        problems = []
        for found in await asyncio.to_thread(self._folder.found):
            if run is not None and found.manifest is not None and found.manifest.run != run:
                continue
            try:
                if found.manifest is None:
                    raise CheckpointError(found.problem)
                check_model(found.manifest, unsplit)
                begin = await self._begin(found.manifest, layers)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                self._report(WarningEvent(text=f"skipped a checkpoint: {problem}"))
            return begin, found.manifest
        if problems:
            raise CheckpointError("\n  ".join(["no checkpoint can be used:", *problems]))
        return None

    async def _begin(self, manifest: Manifest, layers: Sequence[Sequence[str]]) -> RestorePoint:
        holders = await self._holders(manifest)
        restores = {}
        for index, worker in enumerate(self._config.workers):
            needed = [file for file in manifest.stages if set(file.layers) & set(layers[index])]
            own = self._fleet.addresses[index]
            restores[worker.label] = pb.Restore(step=manifest.step)
            for file in needed:
                found = self._file(manifest, file)
                if not holders[file.file]:
                    await self._send(found, own)
                elif own not in holders[file.file]:
                    found.address = holders[file.file][0]
                restores[worker.label].files.append(found)
        return RestorePoint(manifest.step, restores)

    def _file(self, manifest: Manifest, file: StageFile) -> pb.CheckpointFile:
        path = self._folder.path_of(manifest.step) / file.file
        return pb.CheckpointFile(path=str(path), sha256=file.sha256, size=file.size)

    async def _send(self, file: pb.CheckpointFile, address: str) -> None:
        """Have a server write a file that this host has to its disk."""
        async with self._fleet.client(address) as client:
            try:
                await client.put(_parts(self._fleet.job_id, file))
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # gRPC cancels a call whose messages cannot be had.
                raise CheckpointError(f"cannot read {file.path} any more") from None

    @staticmethod
    async def _look(path: Path, file: StageFile) -> str:
        """What of a file there is on this host's disk."""
        try:
            return await asyncio.to_thread(files.check, path, file.sha256, file.size)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error

    async def _check(self, address: str, request: pb.CheckRequest) -> list[str]:
        async with self._fleet.client(address) as client:
            return await client.check(request)

    async def _holders(self, manifest: Manifest) -> dict[str, list[str]]:
        """The servers that have each file, whole; none where only this host has it.

        Raises:
            CheckpointError: nobody has one of them.
        """
        wanted = [self._file(manifest, file) for file in manifest.stages]
        request = pb.CheckRequest(files=wanted)
        states = await asyncio.gather(*(self._check(a, request) for a in self._fleet.addresses))
        found: dict[str, list[str]] = {}
        for index, file in enumerate(manifest.stages):
            at = dict(zip(self._fleet.addresses, (each[index] for each in states), strict=True))
            found[file.file] = [address for address, state in at.items() if state == "ok"]
            if found[file.file]:
                continue
            path = Path(wanted[index].path)
            ours = await self._look(path, file)
            if ours != "ok":
                said = "damaged" if "damaged" in (ours, *at.values()) else "missing"
                raise CheckpointError(
                    f"step {manifest.step}: {path} of stage {file.name!r}, written on {file.host}, "
                    f"is {said}"
                )
        return found


async def _parts(job_id: str, file: pb.CheckpointFile) -> AsyncIterator[pb.PutRequest]:
    yield pb.PutRequest(job_id=job_id, file=file)
    async for data in files.parts(Path(file.path)):
        yield pb.PutRequest(data=data)


Start = Literal["resume", "fresh", "either"]
"""Whether a run goes on from the newest checkpoint, or begins anew, whatever there is; or begins
anew unless a config has asked for what is there."""

MOST_OTHERS = 3
"""Runs that an error names."""


class RestorePlanner:
    """Chooses for one generation after the other.

    Args:
        config: the job.
        fleet: its servers.
        checkpoints: of this run.
        report: told of what cannot be used ("warning") and of a run that is resumed ("resumed").
        start: where the first generation begins.
    """

    def __init__(
        self,
        config: Config,
        fleet: ServerPool,
        checkpoints: Checkpoints,
        report: Callable[[Event], None],
        start: Start,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._checkpoints = checkpoints
        self._report = report
        self._on_disk = CheckpointResolver(config, fleet, report)
        self._start = start
        self._is_first = True

    async def choose(
        self, assignments: list[str], holdings: dict[str, HeldSnapshots]
    ) -> RestorePoint:
        """The newest step that all stages can be brought to.

        Raises:
            CheckpointError: the run has to be resumed, and no checkpoint can be used.
            CheckpointConflictError: it may be that it should have been resumed.
        """
        self._checkpoints.note_assignments(assignments)
        if self._is_first:
            begin = await self._first(assignments)
            self._is_first = False
            return begin
        in_memory = newest_common(self._config.workers, holdings, self._checkpoints.known())
        if self._checkpoints.saved > (0 if in_memory is None else in_memory.step):
            try:
                return await self._from_disk(assignments, run=self._checkpoints.run)
            except CheckpointError as error:
                if in_memory is None:
                    raise
                self._report(WarningEvent(text=str(error)))
        return (
            RestorePoint()
            if in_memory is None
            else from_memory(in_memory, self._config, self._fleet)
        )

    async def _first(self, assignments: list[str]) -> RestorePoint:
        if self._start == "resume":
            try:
                return await self._from_disk(assignments, run=None)
            except CheckpointError as error:
                raise CheckpointError(f"{error}{await self._other_runs()}") from error
        if self._start == "either" and self._config.takes_snapshots:
            if self._config.checkpoint is not None:
                folder = self._config.checkpoint_folder
                await asyncio.to_thread(require_none_asked_for, folder)
            every = await self._checkpoints.left_behind()
            if left := [run for run in every if not self._checkpoints.is_too_old(run)]:
                text = (
                    f"an earlier run left a checkpoint in {left[0]}; --resume goes on from it, a "
                    "run that ends well removes it"
                )
                self._report(WarningEvent(text=text))
        return RestorePoint()

    async def _other_runs(self) -> str:
        """The runs that one could go on from instead, a line each."""
        folder, job = self._config.checkpoint_folder, self._config.name
        found = await asyncio.to_thread(whole_runs, folder, job)
        others = [run for run in found if run.name not in ("", self._fleet.run_folder)]
        return "".join(
            f"\n  an earlier run left {run}; "
            f"--resume --set checkpoint.dir={run.folder.path} goes on from it"
            for run in others[:MOST_OTHERS]
        )

    async def _from_disk(self, assignments: list[str], run: str | None) -> RestorePoint:
        found = await self._on_disk.newest(assignments, run)
        if found is None:
            self._report(ResumedEvent(step=0, changed=[]))
            return RestorePoint()
        begin, manifest = found
        changed = self._checkpoints.take_over(manifest)
        if run is None:
            self._report(ResumedEvent(step=begin.step, run=manifest.run, changed=changed))
        return begin
