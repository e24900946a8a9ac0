"""The restore point of each generation of a run: in memory, on a disk, or the config.

A checkpoint's files may be on any host: every server reports which of them it has on its disk, and
whether their hashes are right. A stage whose host lacks a file fetches it from a host that has it;
a file that only this host has is sent from here. A stage needs the files with its layers, so it may
be a different partition of the model than the one that wrote them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from rpcmp.checkpoint import files
from rpcmp.checkpoint.folder import CheckpointFolder, require_none_asked_for, whole_runs
from rpcmp.checkpoint.manifest import Manifest, StageFile, check_model
from rpcmp.checkpoint.slots import HeldSnapshots
from rpcmp.config.schema import Config
from rpcmp.errors import CheckpointError
from rpcmp.job.checkpoints import Checkpoints
from rpcmp.job.cuts import HeldStep
from rpcmp.job.server_pool import ServerPool
from rpcmp.job.takeover import LostJob
from rpcmp.observability.events import Event, ResumedEvent, WarningEvent
from rpcmp.v1 import control_pb2 as pb

Start = Literal["resume", "fresh", "either"]
"""Whether a run goes on from the newest checkpoint; or starts from the config, whatever checkpoints
there are; or starts from the config unless there are checkpoints that a config has asked for."""

MAX_NAMED_RUNS = 3
"""How many other runs an error names."""


@dataclass(frozen=True)
class RestorePoint:
    """The state that a generation starts from.

    Attributes:
        step: optimizer steps done.
        restores: the state of each worker, by its label; empty: all start from the config.
        cut: the number of the cut of the model into stages; see rpcmp.job.cuts.
    """

    step: int = 0
    restores: Mapping[str, pb.Restore] = field(default_factory=dict)
    cut: int = 0


ChooseRestorePoint = Callable[[list[str], dict[str, HeldSnapshots]], Awaitable[RestorePoint]]
"""Takes the workers' assignments and the snapshots that their servers hold, by worker."""


async def from_config(assignments: list[str], holdings: dict[str, HeldSnapshots]) -> RestorePoint:
    return RestorePoint()


class RestorePlanner:
    """Chooses the restore point of each generation of a run."""

    def __init__(
        self,
        config: Config,
        pool: ServerPool,
        checkpoints: Checkpoints,
        report: Callable[[Event], None],
        start: Start,
        lost: LostJob | None = None,
    ) -> None:
        self._config = config
        self._pool = pool
        self._checkpoints = checkpoints
        self._report = report
        self._folder = CheckpointFolder(config.checkpoint_folder / pool.run_folder)
        self._start = start
        self._lost = lost
        self._is_first = True

    async def choose(
        self, assignments: list[str], holdings: dict[str, HeldSnapshots]
    ) -> RestorePoint:
        """Return the newest step that all stages can restore; see ChooseRestorePoint.

        Raises CheckpointError if a run cannot be resumed, and CheckpointConflictError if there are
        checkpoints that it may have to be resumed from.
        """
        self._checkpoints.set_assignments(assignments)
        chosen = await self._choose(holdings)
        return replace(chosen, cut=self._checkpoints.cuts.current)

    async def _choose(self, holdings: dict[str, HeldSnapshots]) -> RestorePoint:
        if self._is_first:
            first = await self._choose_first(holdings)
            self._is_first = False
            return first
        in_memory = self._checkpoints.newest_held(holdings)
        if self._checkpoints.saved > (0 if in_memory is None else in_memory.common.step):
            try:
                return await self._from_disk(run=self._checkpoints.run)
            except CheckpointError as error:
                if in_memory is None:
                    raise
                self._report(WarningEvent(text=str(error)))
        if in_memory is None:
            return RestorePoint()
        return self._in_memory(in_memory)

    def _in_memory(self, held: HeldStep) -> RestorePoint:
        workers, addresses = self._checkpoints.workers, self._pool.addresses
        restores = self._checkpoints.cuts.restores(held, workers, addresses)
        return RestorePoint(held.common.step, restores)

    async def _choose_first(self, holdings: dict[str, HeldSnapshots]) -> RestorePoint:
        if self._lost is not None and (taken := await self._take_over(self._lost, holdings)):
            return taken
        if self._start == "resume":
            try:
                return await self._from_disk(run=None)
            except CheckpointError as error:
                raise CheckpointError(f"{error}{await self._other_runs()}") from error
        if self._start == "either" and self._config.takes_snapshots:
            if self._config.checkpoint is not None:
                folder = self._config.checkpoint_folder
                await asyncio.to_thread(require_none_asked_for, folder)
            runs = await self._checkpoints.left_behind()
            if left := [run for run in runs if not self._checkpoints.is_too_old(run)]:
                text = (
                    f"an earlier run left a checkpoint in {left[0]}; --resume continues from it; "
                    "a run that ends well and gets as far removes it"
                )
                self._report(WarningEvent(text=text))
        return RestorePoint()

    async def _take_over(
        self, lost: LostJob, holdings: dict[str, HeldSnapshots]
    ) -> RestorePoint | None:
        """Return the newest step of a lost driver's run that servers or a disk here have.

        None if servers do not have any. The run is the same in any case, so that its checkpoints
        stay together.
        """
        changed, run = self._checkpoints.take_over(lost), lost.about.run
        held = self._checkpoints.newest_held(holdings)
        if held is None or lost.about.layers != self._checkpoints.layers:
            why = "its stages had other layers"
            if lost.about.layers == self._checkpoints.layers:
                why = "the servers do not hold the same step of all stages any more"
            text = f"what the servers hold of the run cannot be used, since {why}"
            self._report(
                WarningEvent(text=f"{text}; it goes on from a checkpoint, if there is one")
            )
            return None
        common = held.common
        manifests = await asyncio.to_thread(self._folder.valid)
        saved = max((each.step for each in manifests if each.run == run), default=0)
        if saved > common.step:
            try:
                on_disk = await self._from_disk(run=run)
            except CheckpointError as error:
                self._report(WarningEvent(text=str(error)))
            else:
                if on_disk.step > common.step:
                    self._report(ResumedEvent(step=on_disk.step, run=run, changed=changed))
                    return on_disk
        self._checkpoints.resume_at(common.step, saved)
        self._report(ResumedEvent(step=common.step, run=run, changed=changed, from_memory=True))
        return self._in_memory(held)

    async def _other_runs(self) -> str:
        folder, job = self._config.checkpoint_folder, self._config.name
        runs = await asyncio.to_thread(whole_runs, folder, job)
        others = [run for run in runs if run.name not in ("", self._pool.run_folder)]
        return "".join(
            f"\n  an earlier run left {run}; "
            f"--resume --set checkpoint.dir={run.folder.path} goes on from it"
            for run in others[:MAX_NAMED_RUNS]
        )

    async def _from_disk(self, run: str | None) -> RestorePoint:
        """Return the newest checkpoint that all stages can restore; the config if there are none.

        Raises CheckpointError if there are checkpoints, but none is complete and of this model.

        Args:
            run: only checkpoints of this run; None: of any.
        """
        layers = [name for names in self._checkpoints.layers.values() for name in names]
        problems = []
        for checkpoint in await asyncio.to_thread(self._folder.found):
            manifest = checkpoint.manifest
            if run is not None and manifest is not None and manifest.run != run:
                continue
            try:
                if manifest is None:
                    raise CheckpointError(checkpoint.problem)
                check_model(manifest, layers)
                restore_point = await self._resolve(manifest)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                self._report(WarningEvent(text=f"skipped a checkpoint: {problem}"))
            changed = self._checkpoints.resume_from(manifest)
            if run is None:
                self._report(ResumedEvent(step=manifest.step, run=manifest.run, changed=changed))
            return restore_point
        if problems:
            raise CheckpointError("\n  ".join(["no checkpoint can be used:", *problems]))
        self._report(ResumedEvent(step=0, changed=[]))
        return RestorePoint()

    async def _resolve(self, manifest: Manifest) -> RestorePoint:
        """Choose where each worker gets the files from that have its layers."""
        holders = await self._holders(manifest)
        restores = {}
        pairs = zip(self._checkpoints.workers, self._pool.addresses, strict=True)
        for worker, address in pairs:
            layers = set(self._checkpoints.layers[worker.stage])
            restores[worker.label] = pb.Restore(step=manifest.step)
            for file in manifest.stages:
                if layers.isdisjoint(file.layers):
                    continue
                source = self._file(manifest, file)
                if not holders[file.file]:
                    await self._send(source, address)
                elif address not in holders[file.file]:
                    source.address = holders[file.file][0]
                restores[worker.label].files.append(source)
        return RestorePoint(manifest.step, restores)

    async def _holders(self, manifest: Manifest) -> dict[str, list[str]]:
        """Return the servers that have each complete file, or none if only this host has it."""
        addresses = self._pool.addresses
        request = pb.CheckRequest(files=[self._file(manifest, file) for file in manifest.stages])
        states = await asyncio.gather(*(self._check(address, request) for address in addresses))
        holders = {}
        for index, file in enumerate(manifest.stages):
            on_servers = [states_of_server[index] for states_of_server in states]
            holders[file.file] = [
                address
                for address, state in zip(addresses, on_servers, strict=True)
                if state == "ok"
            ]
            if holders[file.file]:
                continue
            path = Path(request.files[index].path)
            on_this_host = await _check_on_this_host(path, file)
            if on_this_host != "ok":
                is_damaged = "damaged" in (on_this_host, *on_servers)
                raise CheckpointError(
                    f"step {manifest.step}: {path} of stage {file.name!r}, written on {file.host}, "
                    f"is {'damaged' if is_damaged else 'missing'}"
                )
        return holders

    async def _check(self, address: str, request: pb.CheckRequest) -> list[str]:
        async with self._pool.client(address) as client:
            return await client.check(request)

    def _file(self, manifest: Manifest, file: StageFile) -> pb.CheckpointFile:
        path = self._folder.path_of(manifest.step) / file.file
        return pb.CheckpointFile(path=str(path), sha256=file.sha256, size=file.size)

    async def _send(self, file: pb.CheckpointFile, address: str) -> None:
        async with self._pool.client(address) as client:
            await client.put(_parts(self._pool.job_id, file))


async def _check_on_this_host(path: Path, file: StageFile) -> str:
    try:
        return await asyncio.to_thread(files.check, path, file.sha256, file.size)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


async def _parts(job_id: str, file: pb.CheckpointFile) -> AsyncIterator[pb.PutRequest]:
    yield pb.PutRequest(job_id=job_id, file=file)
    try:
        async for data in files.parts(Path(file.path)):
            yield pb.PutRequest(data=data)
    except OSError as error:
        raise CheckpointError(f"cannot read {file.path} any more") from error
