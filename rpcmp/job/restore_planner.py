"""The restore point of each generation of a run: in memory, on a disk, or the config.

`RestorePlanner` chooses. `CheckpointResolver` finds the newest complete checkpoint, wherever its
files are: every host reports which of them it has on its disk, and whether their hashes are right.
A stage whose host lacks a file fetches it from a host that has it; a file that only this host has
is sent from here. A stage needs the files with its layers, so it may be a different partition of
the model than the one that wrote them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Literal

from rpcmp.checkpoint import files
from rpcmp.checkpoint.folder import CheckpointFolder, require_none_asked_for, whole_runs
from rpcmp.checkpoint.manifest import Manifest, StageFile, check_model
from rpcmp.config.schema import Config
from rpcmp.errors import CheckpointError
from rpcmp.job.checkpoints import Checkpoints
from rpcmp.job.restore_point import HeldSnapshots, RestorePoint, newest_common
from rpcmp.job.server_pool import ServerPool
from rpcmp.observability.events import Event, ResumedEvent, WarningEvent
from rpcmp.v1 import control_pb2 as pb


class CheckpointResolver:
    """Finds the checkpoint that a run can go on from.

    Args:
        report: called with a "warning" for each checkpoint that cannot be used.
    """

    def __init__(self, config: Config, pool: ServerPool, report: Callable[[Event], None]) -> None:
        self._config = config
        self._pool = pool
        self._report = report
        self._folder = CheckpointFolder(config.checkpoint_folder / pool.run_folder)

    async def newest(
        self, assignments: Sequence[str], run: str | None
    ) -> tuple[RestorePoint, Manifest] | None:
        """Return the newest checkpoint that all stages can restore, or None if there are none.

        Args:
            assignments: of each worker, JSON of rpcmp.pipelining.assignment.Assignment.
            run: only checkpoints of this run; None: of any.

        Raises:
            CheckpointError: there are checkpoints, but none is complete and of this model.
        """
        layers = [json.loads(assignment)["layers"] for assignment in assignments]
        unsplit = list(dict.fromkeys(name for of_worker in layers for name in of_worker))
        problems = []
        for checkpoint in await asyncio.to_thread(self._folder.found):
            manifest = checkpoint.manifest
            if run is not None and manifest is not None and manifest.run != run:
                continue
            try:
                if manifest is None:
                    raise CheckpointError(checkpoint.problem)
                check_model(manifest, unsplit)
                restore_point = await self._resolve(manifest, layers)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                self._report(WarningEvent(text=f"skipped a checkpoint: {problem}"))
            return restore_point, manifest
        if problems:
            raise CheckpointError("\n  ".join(["no checkpoint can be used:", *problems]))
        return None

    async def _resolve(self, manifest: Manifest, layers: Sequence[Sequence[str]]) -> RestorePoint:
        """Choose where each worker gets the files from that have its layers."""
        holders = await self._holders(manifest)
        restores = {}
        for index, worker in enumerate(self._config.workers):
            needed = [file for file in manifest.stages if set(file.layers) & set(layers[index])]
            own = self._pool.addresses[index]
            restores[worker.label] = pb.Restore(step=manifest.step)
            for file in needed:
                source = self._file(manifest, file)
                if not holders[file.file]:
                    await self._send(source, own)
                elif own not in holders[file.file]:
                    source.address = holders[file.file][0]
                restores[worker.label].files.append(source)
        return RestorePoint(manifest.step, restores)

    def _file(self, manifest: Manifest, file: StageFile) -> pb.CheckpointFile:
        path = self._folder.path_of(manifest.step) / file.file
        return pb.CheckpointFile(path=str(path), sha256=file.sha256, size=file.size)

    async def _send(self, file: pb.CheckpointFile, address: str) -> None:
        async with self._pool.client(address) as client:
            try:
                await client.put(_parts(self._pool.job_id, file))
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # gRPC cancels a call if reading its messages fails.
                raise CheckpointError(f"cannot read {file.path} any more") from None

    @staticmethod
    async def _check_here(path: Path, file: StageFile) -> str:
        try:
            return await asyncio.to_thread(files.check, path, file.sha256, file.size)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error

    async def _check(self, address: str, request: pb.CheckRequest) -> list[str]:
        async with self._pool.client(address) as client:
            return await client.check(request)

    async def _holders(self, manifest: Manifest) -> dict[str, list[str]]:
        """Return the servers that have each complete file, or none if only this host has it."""
        wanted = [self._file(manifest, file) for file in manifest.stages]
        request = pb.CheckRequest(files=wanted)
        states = await asyncio.gather(*(self._check(a, request) for a in self._pool.addresses))
        holders: dict[str, list[str]] = {}
        for index, file in enumerate(manifest.stages):
            states_by_server = {
                address: each[index]
                for address, each in zip(self._pool.addresses, states, strict=True)
            }
            holders[file.file] = [at for at, state in states_by_server.items() if state == "ok"]
            if holders[file.file]:
                continue
            path = Path(wanted[index].path)
            here = await self._check_here(path, file)
            if here != "ok":
                problem = (
                    "damaged" if "damaged" in (here, *states_by_server.values()) else "missing"
                )
                raise CheckpointError(
                    f"step {manifest.step}: {path} of stage {file.name!r}, written on {file.host}, "
                    f"is {problem}"
                )
        return holders


async def _parts(job_id: str, file: pb.CheckpointFile) -> AsyncIterator[pb.PutRequest]:
    yield pb.PutRequest(job_id=job_id, file=file)
    async for data in files.parts(Path(file.path)):
        yield pb.PutRequest(data=data)


Start = Literal["resume", "fresh", "either"]
"""Whether a run goes on from the newest checkpoint; or starts from the config, whatever checkpoints
there are; or starts from the config unless there are checkpoints that a config has asked for."""

MOST_OTHERS = 3
"""How many other runs an error names."""


class RestorePlanner:
    """Chooses the restore point of each generation of a run."""

    def __init__(
        self,
        config: Config,
        pool: ServerPool,
        checkpoints: Checkpoints,
        report: Callable[[Event], None],
        start: Start,
    ) -> None:
        self._config = config
        self._pool = pool
        self._checkpoints = checkpoints
        self._report = report
        self._on_disk = CheckpointResolver(config, pool, report)
        self._start = start
        self._is_first = True

    async def choose(
        self, assignments: list[str], holdings: dict[str, HeldSnapshots]
    ) -> RestorePoint:
        """Return the newest step that all stages can restore; see ChooseRestorePoint.

        Raises:
            CheckpointError: the run has to be resumed, and no checkpoint can be used.
            CheckpointConflictError: there are checkpoints that it may have to be resumed from.
        """
        self._checkpoints.set_assignments(assignments)
        if self._is_first:
            first = await self._choose_first(assignments)
            self._is_first = False
            return first
        workers = self._config.workers
        in_memory = newest_common(workers, holdings, self._checkpoints.known_steps())
        if self._checkpoints.saved > (0 if in_memory is None else in_memory.step):
            try:
                return await self._from_disk(assignments, run=self._checkpoints.run)
            except CheckpointError as error:
                if in_memory is None:
                    raise
                self._report(WarningEvent(text=str(error)))
        if in_memory is None:
            return RestorePoint()
        return RestorePoint.in_memory(in_memory, workers, self._pool.addresses)

    async def _choose_first(self, assignments: list[str]) -> RestorePoint:
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
        """Return other runs that could be resumed instead, one line per run."""
        folder, job = self._config.checkpoint_folder, self._config.name
        runs = await asyncio.to_thread(whole_runs, folder, job)
        others = [run for run in runs if run.name not in ("", self._pool.run_folder)]
        return "".join(
            f"\n  an earlier run left {run}; "
            f"--resume --set checkpoint.dir={run.folder.path} goes on from it"
            for run in others[:MOST_OTHERS]
        )

    async def _from_disk(self, assignments: list[str], run: str | None) -> RestorePoint:
        newest = await self._on_disk.newest(assignments, run)
        if newest is None:
            self._report(ResumedEvent(step=0, changed=[]))
            return RestorePoint()
        restore_point, manifest = newest
        changed = self._checkpoints.resume_from(manifest)
        if run is None:
            step, run = restore_point.step, manifest.run
            self._report(ResumedEvent(step=step, run=run, changed=changed))
        return restore_point
