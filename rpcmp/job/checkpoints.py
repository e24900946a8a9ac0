"""A run's checkpoints: the stages write their files, this process writes the manifest.

    stages ──saved: file, hash──┐
    driver ──progress of a step─┴──> manifest, last ──> older checkpoints are removed

The files of one step arrive in any order, while later steps are computed. If a stage cannot write
its file, the checkpoint is given up with a warning. The run and its older checkpoints go on.

The best checkpoint has a mark in its manifest, which is written again if it was complete before the
evaluation. Marks are never removed: each has a better value than all before it, so the newest one
is the best, and at no moment is the disk without the best checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rpcmp.checkpoint.folder import CheckpointFolder, RunCheckpoints, left_behind, look, remove
from rpcmp.checkpoint.manifest import BestMark, Cursor, Manifest, StageFile
from rpcmp.checkpoint.slots import HeldSnapshots, mirrored_by
from rpcmp.config.schema import Config
from rpcmp.config.stored import changes, stored
from rpcmp.config.topology import Member
from rpcmp.errors import CheckpointError, RpcmpError, SavingError
from rpcmp.job.cuts import Cuts, HeldStep
from rpcmp.job.server_pool import ServerPool
from rpcmp.job.takeover import About, LostJob, driver_state
from rpcmp.observability.events import (
    BestEvent,
    BestStep,
    CheckpointEvent,
    Event,
    StepEvent,
    WarningEvent,
)
from rpcmp.process.channel import Message
from rpcmp.server.connection import software_versions
from rpcmp.v1 import control_pb2 as pb

MAX_FAILED = 3
"""Checkpoints in a row that may fail before the run fails."""

RNG = {"derivation": 1}
"""Generators have no state to save: all are seeded anew, see `rpcmp.pipelining.random_streams`."""


class Checkpoints:
    """Completes checkpoints of the files that the stages have written.

    Attributes:
        cuts: of the model into stages, the current one after `set_assignments`.
        generation: the number of the current group.
        workers: of the next one; hosts may have joined or left.
        run: the id of the run in its manifests; a resumed run keeps it.
        saved: the newest step with a checkpoint.
        remove_elsewhere: removes a checkpoint from the disks of the other machines; None before
            the first group.
    """

    def __init__(self, config: Config, pool: ServerPool, report: Callable[[Event], None]) -> None:
        self._config = config
        self.workers: Sequence[Member] = config.workers
        self._pool = pool
        self._report = report
        self._folder = CheckpointFolder(config.checkpoint_folder / pool.run_folder)
        self._keeps_best = config.checkpoint is not None and config.checkpoint.best is not None
        self._parts: dict[int, dict[str, pb.Saved]] = {}
        self._progress: dict[int, Message] = {}
        self._settled = 0
        self._software = software_versions()
        self.cuts = Cuts()
        self.generation = 1
        self.run = pool.job_id
        self.saved = 0
        self._saved_at = time.monotonic()
        self._started_at: dict[int, float] = {}
        self._is_leaving = False
        self._failed: list[str] = []
        self.remove_elsewhere: Callable[[Path], Awaitable[None]] | None = None

    def set_assignments(self, assignments: Sequence[str]) -> None:
        pairs = zip(self.workers, assignments, strict=True)
        self.cuts.change_to({worker.stage: json.loads(text)["layers"] for worker, text in pairs})

    @property
    def layers(self) -> dict[str, list[str]]:
        """The layers of each stage, after `set_assignments`."""
        return self.cuts.layers

    def newest_held(self, holdings: Mapping[str, HeldSnapshots]) -> HeldStep | None:
        """Return the newest step that servers hold, and whose driver's state is here."""
        of_any = self._config.rebalance == "auto"
        return self.cuts.newest(self.workers, holdings, self._progress, of_any)

    def forget_parts(self) -> None:
        """Give up incomplete checkpoints: the generation that wrote them has ended."""
        self._parts.clear()
        self._started_at.clear()

    async def add_progress(self, progress: Message) -> int | None:
        """Record the driver's state after a step; returns the step that this settles, if any."""
        step = progress["step"]
        if step == self._settled:
            progress = {**progress, "awaits_save": False}
        if progress["awaits_save"]:
            self._started_at.setdefault(step, time.monotonic())
        self._progress[step] = progress
        # At most two steps overlap, and the last snapshot may be lost with a host.
        window = 3 * max(1, self._config.snapshot_every_steps) + 4
        for old in [old for old in self._progress if old <= step - window]:
            if not self._progress[old]["awaits_save"]:
                del self._progress[old]
        return await self._complete(step) or await self._mark_best(progress)

    async def add_part(self, stage: str, saved: pb.Saved) -> int | None:
        """Record a stage's file, or its error; returns the step that this settles, if any."""
        self._started_at.setdefault(saved.step, time.monotonic())
        self._parts.setdefault(saved.step, {})[stage] = saved
        return await self._complete(saved.step)

    def known_steps(self) -> list[int]:
        return list(self._progress)

    def progress_of(self, step: int) -> Message | None:
        """Return the driver's state after a step; None before the first."""
        progress = self._progress.get(step)
        if progress is None:
            return None
        since = time.monotonic() - self._saved_at
        return {**progress, "is_saved": step == self.saved, "since_saved": since}

    def driver_state(self, step: int) -> Message:
        """Return what belongs to the driver's state after a step, and nothing else."""
        return driver_state(self._progress[step])

    def step_events_up_to(self, step: int) -> list[StepEvent]:
        events = [self._progress[each]["told"] for each in sorted(self._progress) if each <= step]
        return [StepEvent.from_json(event, complete=True) for event in events if event is not None]

    def resume_from(self, manifest: Manifest) -> list[str]:
        """Go on from a checkpoint; returns the keys of the config that have changed since."""
        self.run, self.saved = manifest.run, manifest.step
        self.generation = max(self.generation, manifest.generation + 1)
        best = manifest.driver.get("best")
        state = {**manifest.driver, "best": None if self._is_best_gone(best) else best}
        self._progress[manifest.step] = {**state, "told": None, "awaits_save": False}
        return changes(manifest.config, self._config)

    def take_over(self, lost: LostJob) -> list[str]:
        """Go on with another driver's run; returns the keys of the config that have changed."""
        self.run, layers = lost.about.run, self.cuts.layers
        self.cuts = Cuts(lost.about.cuts or [lost.about.layers])
        self.cuts.change_to(layers)
        for step, state in lost.states.items():
            self._progress[step] = {**state, "told": None, "awaits_save": False}
        return changes(lost.about.config, self._config)

    def about(self) -> About:
        """Return what another driver has to know of this run, besides its steps."""
        shares = {i: stage.shares for i, stage in enumerate(self._config.stages) if stage.shares}
        return About(
            run=self.run,
            run_folder=self._pool.run_folder,
            addresses=self._pool.addresses,
            numbers=[place.stage_index for place in self._pool.places],
            layers=self.layers,
            cuts=self.cuts.known,
            shares=shares,
            config=stored(self._config),
            recorded_at=time.time(),
            driver=self._pool.driver_id,
        )

    def resume_at(self, step: int, saved: int) -> None:
        """Go on after a step of that run.

        Args:
            saved: its newest step with a checkpoint; 0: there is none here.
        """
        self.saved = saved
        best: Any = self._progress[step]["best"]
        # The best step may be this one, which the driver process then saves first.
        if best is not None and best["step"] != step and self._is_best_gone(best):
            self._progress[step] = {**self._progress[step], "best": None}

    async def leave(self) -> None:
        """Write a checkpoint of the newest step that the servers hold; warns if that fails."""
        holdings = await self._pool.holdings()
        held = self.newest_held(holdings)
        if held is None or held.common.step <= self.saved:
            return
        self._is_leaving, self.cuts.current = True, held.cut
        self._started_at[held.common.step] = time.monotonic()
        members = self.cuts.members(held.cut, self.workers)
        firsts = [worker for worker in members if worker.replica == 0]
        parts = await asyncio.gather(*(self._save(worker, held, holdings) for worker in firsts))
        for worker, saved in zip(firsts, parts, strict=True):
            await self.add_part(worker.stage, saved)

    async def _complete(self, step: int) -> int | None:
        """Write the manifest if all parts are there; returns the step if it is settled by now."""
        parts, progress = self._parts.get(step, {}), self._progress.get(step)
        if progress is None or not parts or set(parts) != set(self.layers):
            return None
        del self._parts[step]
        started_at = self._started_at.pop(step, time.monotonic())
        self._progress[step] = {**progress, "awaits_save": False}
        self._settled = step
        failed = {stage: part.error for stage, part in parts.items() if part.error}
        try:
            if failed:
                raise CheckpointError("; ".join(f"stage {s!r}: {e}" for s, e in failed.items()))
            manifest = self._manifest(progress, parts)
            await asyncio.to_thread(self._folder.commit, manifest)
        except RpcmpError as error:
            self._failed.append(f"no checkpoint of step {step}: {error}")
            self._report(WarningEvent(text=f"{self._failed[-1]}; the run goes on"))
            return step
        self._failed.clear()
        self.saved, self._saved_at = step, time.monotonic()
        self._report(
            CheckpointEvent(
                step=step,
                path=str(self._folder.path_of(step)),
                seconds=self._saved_at - started_at,
                bytes=sum(part.size for part in parts.values()),
            )
        )
        self._report_if_best(manifest)
        return step

    async def _mark_best(self, progress: Message) -> int | None:
        """Mark the step's checkpoint if it is complete and the best; returns the step if marked."""
        step, mark = progress["step"], mark_of(progress)
        manifest = None if mark is None or step != self.saved else self._read(step)
        if manifest is None or manifest.best == mark:
            return None
        manifest = manifest.model_copy(update={"driver": driver_state(progress), "best": mark})
        try:
            await asyncio.to_thread(self._folder.commit, manifest)
        except RpcmpError as error:
            text = f"step {step} is the best and cannot be marked so: {error}; the run goes on"
            self._report(WarningEvent(text=text))
            return None
        self._report_if_best(manifest)
        return manifest.step

    def _report_if_best(self, manifest: Manifest) -> None:
        if (best := manifest.best) is not None:
            self._report(BestEvent(step=manifest.step, metric=best.metric, value=best.value))

    def _is_best_gone(self, best: Any) -> bool:
        """Return whether a run that goes on here has lost its best checkpoint; warns if so.

        It could not be exported, so the search for the best restarts.
        """
        if best is None or not self._keeps_best:
            return False
        marked = self._read(best["step"])
        if marked is not None and marked.best is not None:
            return False
        text = f"the best checkpoint, of step {best['step']}, is gone: the best begins anew"
        self._report(WarningEvent(text=text))
        return True

    def best(self) -> BestStep | None:
        if not self._keeps_best:
            return None
        try:
            manifest = self._folder.best()
        except RpcmpError as error:
            self._report(WarningEvent(text=f"which checkpoint is the best? {error}"))
            return None
        if manifest is None or (best := manifest.best) is None:
            return None
        path = str(self._folder.path_of(manifest.step))
        return {"step": manifest.step, "metric": best.metric, "value": best.value, "path": path}

    def _read(self, step: int) -> Manifest | None:
        checkpoint = look(self._folder.path_of(step))
        return None if checkpoint is None else checkpoint.manifest

    def _manifest(self, progress: Message, parts: dict[str, pb.Saved]) -> Manifest:
        return Manifest(
            job=self._config.name,
            run=self.run,
            step=progress["step"],
            generation=self.generation,
            cursor=Cursor(epoch=progress["epoch"], batch=progress["batch"]),
            driver=driver_state(progress),
            best=mark_of(progress),
            is_asked_for=self._config.checkpoint is not None and not self._is_leaving,
            rng={"seed": self._config.seed, **RNG},
            versions=self._software,
            config=stored(self._config),
            written=datetime.now(UTC).isoformat(timespec="milliseconds"),
            stages=[
                StageFile(
                    name=stage,
                    layers=self.layers[stage],
                    file=parts[stage].file,
                    sha256=parts[stage].sha256,
                    size=parts[stage].size,
                    host=parts[stage].host,
                    state=parts[stage].state,
                )
                for stage in self.layers
            ],
        )

    def require_saved(self, has_ended: bool) -> None:
        """Raise SavingError if too much training would be lost, unless the config allows that.

        Args:
            has_ended: whether the last checkpoint should be complete.
        """
        section = self._config.checkpoint
        if section is None or section.on_error == "warn" or not self._failed:
            return
        if has_ended or len(self._failed) >= MAX_FAILED:
            how = "the last one" if has_ended else f"{len(self._failed)} in a row"
            kept = f"the newest is of step {self.saved}" if self.saved else "there is none"
            raise SavingError(
                f"checkpoints cannot be written ({how}; {kept}): {self._failed[-1]}; make room, or "
                'set checkpoint.on_error = "warn" to go on without'
            )

    @property
    def is_behind(self) -> bool:
        """Whether steps have been done since the last checkpoint that could be written."""
        return bool(self._failed)

    async def remove_surplus(self) -> None:
        keep = self._config.checkpoint.keep if self._config.checkpoint is not None else 1
        try:
            for folder in await asyncio.to_thread(self._folder.surplus, keep):
                await self._remove(folder)
        except RpcmpError as error:
            self._report(WarningEvent(text=f"old checkpoints stay: {error}"))

    async def left_behind(self) -> list[RunCheckpoints]:
        """Return the checkpoints that runs of this job left when they had to end, newest first."""
        config = self._config
        is_asked_for = config.checkpoint is not None
        folder = config.checkpoint_folder
        return await asyncio.to_thread(left_behind, folder, config.name, is_asked_for)

    def is_too_old(self, run: RunCheckpoints) -> bool:
        return run.is_before(datetime.now(UTC) - timedelta(days=self._config.recovery.keep_days))

    async def remove_left_behind(self, ended_well: bool) -> None:
        """Remove checkpoints that runs of this job left when they had to end.

        Those that are older than `recovery.keep_days`; if this run `ended_well`, also those that it
        has come further than, unless its own last checkpoint could not be written.
        """
        if not self._config.takes_snapshots:
            return
        reached = max(self._progress, default=0) if ended_well and not self._failed else -1
        try:
            for run in await self.left_behind():
                is_old = self.is_too_old(run) and run.folder.path != self._folder.path
                if is_old or run.last_step <= reached:
                    for folder in run.to_remove:
                        await self._remove(folder)
            if self._config.checkpoint is None:
                with contextlib.suppress(OSError):  # it is not there, or not empty
                    self._config.checkpoint_folder.rmdir()
        except RpcmpError as error:
            self._report(WarningEvent(text=f"old checkpoints stay: {error}"))

    async def _remove(self, folder: Path) -> None:
        await asyncio.to_thread(remove, folder)
        if self.remove_elsewhere is not None:
            await self.remove_elsewhere(folder)

    async def _save(
        self, worker: Member, held: HeldStep, holdings: Mapping[str, HeldSnapshots]
    ) -> pb.Saved:
        """Write a stage's file where its snapshot is; and where its copy is, if that is a guest."""
        labels = [each.label for each in self.workers]
        holder, step = held.common.holders[worker.label], held.common.step
        others = [n for n in mirrored_by(worker, step, held.cut, holdings) if n in labels]
        addresses = [self._pool.place(each).address for each in (holder, *others)]
        section = self._config.checkpoint
        if not self._pool.is_guest(addresses[0]) or (section is not None and section.shared):
            addresses = addresses[:1]
        saved = [await self._save_at(address, worker, step, held.cut) for address in addresses]
        return next((each for each in saved if not each.error), saved[0])

    async def _save_at(self, address: str, worker: Member, step: int, cut: int) -> pb.Saved:
        request = pb.SaveRequest(
            job_id=self._pool.job_id, stage_name=worker.stage, step=step, cut=cut
        )
        async with self._pool.client(address) as client:
            try:
                return await client.save(request)
            except RpcmpError as error:
                return pb.Saved(step=step, error=str(error))


def mark_of(progress: Mapping[str, Any]) -> BestMark | None:
    """Return the mark of a step from the driver's state after it; None if it is not the best."""
    best = progress.get("best")
    if best is None or best["step"] != progress["step"]:
        return None
    return BestMark(metric=best["metric"], value=best["value"])
