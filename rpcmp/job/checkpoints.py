"""A run's checkpoints as its driver sees them: the stages write files, then it the manifest.

    stages ──saved: file, hash──┐
    driver ──progress of a step─┴──> manifest, last ──> older checkpoints are removed

The files of one step arrive in any order, while later steps are computed. A checkpoint that a stage
could not write is given up with a warning; the run and the checkpoints before it are as they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rpcmp.checkpoint.folder import CheckpointFolder, remove
from rpcmp.checkpoint.manifest import Cursor, Manifest, StageFile
from rpcmp.checkpoint.runs import RunCheckpoints, left_behind
from rpcmp.config.redaction import redacted
from rpcmp.config.schema import Config
from rpcmp.config.topology import Member
from rpcmp.errors import CheckpointError, RpcmpError, SavingError
from rpcmp.job.best import BestCheckpoint, mark_of
from rpcmp.job.recovery import CommonSnapshot, newest_common
from rpcmp.job.server_pool import ServerPool
from rpcmp.observability.events.definitions import CheckpointEvent, StepEvent, WarningEvent
from rpcmp.observability.events.event import Event
from rpcmp.process.channel import Message
from rpcmp.server.connection import versions
from rpcmp.v1 import control_pb2 as pb

DRIVERS_OWN = {
    "step",
    "epoch",
    "batch",
    "loss",
    "epoch_loss",
    "metrics",
    "stopping",
    "best",
    "has_ended_epoch",
    "evaluated_after",
    "scaler",
}
"""What of a progress event is the driver's state: rpcmp.driver.progress.TrainingProgress."""

MOST_FAILED = 3
"""Checkpoints in a row that may fail before the run does."""

RNG = {"derivation": 1}
"""No generator has a state: numbers are drawn from the seed, see `rpcmp.pipelining.layers`."""


class Checkpoints:
    """Makes checkpoints of what the stages have written.

    Args:
        config: the job.
        fleet: its servers.
        report: told of each that is there ("checkpoint") or could not be made ("warning").

    Attributes:
        layers: of each stage, once they are known.
        generation: of the group that runs.
        run: what the checkpoints are of; the same when it is resumed.
        saved: the newest step that has one.
        best: the one with the best evaluation, where the config wants it kept.
        remove_elsewhere: removes a checkpoint from the disks of other machines.
    """

    def __init__(self, config: Config, fleet: ServerPool, report: Callable[[Event], None]) -> None:
        self._config = config
        self._fleet = fleet
        self._report = report
        self._folder = CheckpointFolder(config.checkpoint_folder / fleet.run_folder)
        self.best = BestCheckpoint(config, self._folder, report)
        self._parts: dict[int, dict[str, pb.Saved]] = {}
        self._progress: dict[int, Message] = {}
        self._settled = 0
        self._software = _software()
        self.layers: dict[str, list[str]] = {}
        self.generation = 1
        self.run = fleet.job_id
        self.saved = 0
        self._saved_at = time.monotonic()
        self._began: dict[int, float] = {}
        self._is_leaving = False
        self._failed: list[str] = []
        self.remove_elsewhere: Callable[[Path], Awaitable[None]] = _nowhere

    def note_assignments(self, assignments: Sequence[str]) -> None:
        """Hear which layers each stage has."""
        found = [json.loads(assignment)["layers"] for assignment in assignments]
        workers = self._config.workers
        self.layers = {w.stage: layers for w, layers in zip(workers, found, strict=True)}

    def forget_parts(self) -> None:
        """What was under way is not any more: the generation has ended."""
        self._parts.clear()
        self._began.clear()

    async def note_progress(self, progress: Message) -> int | None:
        """Hear what the driver was right after a step; a step whose checkpoint ends by it."""
        step = progress["step"]
        if step == self._settled:
            progress = {**progress, "awaits_save": False}
        if progress["awaits_save"]:
            self._began.setdefault(step, time.monotonic())
        self._progress[step] = progress
        # Two steps are under way at most, and a lost host takes the last snapshot along.
        window = 3 * max(1, self._config.snapshot_every_steps) + 4
        for old in [old for old in self._progress if old <= step - window]:
            if not self._progress[old]["awaits_save"]:
                del self._progress[old]
        return await self._end(step) or await self._mark(progress)

    async def note_saved(self, stage: str, saved: pb.Saved) -> int | None:
        """Hear what became of a stage's part; the step, if its checkpoint ends by it."""
        self._began.setdefault(saved.step, time.monotonic())
        self._parts.setdefault(saved.step, {})[stage] = saved
        return await self._end(saved.step)

    def known(self) -> list[int]:
        """The steps of which the driver knows what it was."""
        return list(self._progress)

    def progress_of(self, step: int) -> Message | None:
        """What the driver was right after a step; None before the first."""
        found = self._progress.get(step)
        if found is None:
            return None
        since = time.monotonic() - self._saved_at
        return {**found, "is_saved": step == self.saved, "since_saved": since}

    def reported_up_to(self, step: int) -> list[StepEvent]:
        """Return the events of the steps up to `step`, with what the driver knew of each."""
        known = [self._progress[each]["told"] for each in sorted(self._progress) if each <= step]
        return [StepEvent.from_json(told, complete=True) for told in known if told is not None]

    def take_over(self, manifest: Manifest) -> list[str]:
        """Go on from a checkpoint; the keys of the config that have changed since."""
        self.run, self.saved = manifest.run, manifest.step
        self.generation = max(self.generation, manifest.generation + 1)
        own = {**manifest.driver, **self.best.known_to(manifest)}
        self._progress[manifest.step] = {**own, "told": None, "awaits_save": False}
        return differences(redacted(manifest.config), _told_of(self._config))

    async def leave(self) -> None:
        """Make a checkpoint of what the servers still hold.

        Where that cannot be done a warning says so: the run ends for a reason of its own, which is
        what its user has to hear.
        """
        holdings = await self._fleet.holdings()
        found = newest_common(self._config.workers, holdings, self.known())
        if found is None or found.step <= self.saved:
            return
        self._is_leaving = True
        self._began[found.step] = time.monotonic()
        firsts = [worker for worker in self._config.workers if worker.replica == 0]
        answers = await asyncio.gather(*(self._save(worker, found) for worker in firsts))
        for worker, saved in zip(firsts, answers, strict=True):
            await self.note_saved(worker.stage, saved)

    async def _end(self, step: int) -> int | None:
        parts, progress = self._parts.get(step, {}), self._progress.get(step)
        if progress is None or set(parts) != set(self._config.stage_names):
            return None
        del self._parts[step]
        began = self._began.pop(step, time.monotonic())
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
                seconds=self._saved_at - began,
                bytes=sum(part.size for part in parts.values()),
            )
        )
        self.best.tell(manifest)
        return step

    async def _mark(self, progress: Message) -> int | None:
        """Mark the step's checkpoint, if it is there already and is the best; its step."""
        step: int = progress["step"]
        mark = mark_of(progress)
        if mark is None or step != self.saved:
            return None
        return step if await self.best.mark(step, mark, _drivers_own(progress)) else None

    def _manifest(self, progress: Message, parts: dict[str, pb.Saved]) -> Manifest:
        return Manifest(
            job=self._config.name,
            run=self.run,
            step=progress["step"],
            generation=self.generation,
            cursor=Cursor(epoch=progress["epoch"], batch=progress["batch"]),
            driver=_drivers_own(progress),
            best=mark_of(progress),
            is_asked_for=self._config.checkpoint is not None and not self._is_leaving,
            rng={"seed": self._config.seed, **RNG},
            versions=self._software,
            config=_told_of(self._config),
            written=datetime.now(UTC).isoformat(timespec="seconds"),
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
                for stage in self._config.stage_names
            ],
        )

    def require_saved(self, has_ended: bool) -> None:
        """Fail where what was trained would be lost, unless the config says that it may be.

        Args:
            has_ended: this was the last one.

        Raises:
            SavingError: too many in a row could not be written, or the last one.
        """
        section = self._config.checkpoint
        if section is None or section.on_error == "warn" or not self._failed:
            return
        if has_ended or len(self._failed) >= MOST_FAILED:
            how = "the last one" if has_ended else f"{len(self._failed)} in a row"
            kept = f"the newest is of step {self.saved}" if self.saved else "there is none"
            raise SavingError(
                f"checkpoints cannot be written ({how}; {kept}): {self._failed[-1]}; make room, or "
                'set checkpoint.on_error = "warn" to go on without'
            )

    async def remove_surplus(self) -> None:
        """Remove the checkpoints that are not kept any more."""
        keep = self._config.checkpoint.keep if self._config.checkpoint is not None else 1
        try:
            for folder in await asyncio.to_thread(self._folder.surplus, keep):
                await asyncio.to_thread(remove, folder)
                await self.remove_elsewhere(folder)
        except RpcmpError as error:
            self._report(WarningEvent(text=f"old checkpoints stay: {error}"))

    async def left_behind(self) -> list[RunCheckpoints]:
        """What runs of this job have left because they had to end, the newest first."""
        config = self._config
        asks = config.checkpoint is not None
        return await asyncio.to_thread(left_behind, config.checkpoint_folder, config.name, asks)

    def is_too_old(self, run: RunCheckpoints) -> bool:
        """Whether what a run has left is older than `recovery.keep_days`."""
        return run.is_before(datetime.now(UTC) - timedelta(days=self._config.recovery.keep_days))

    async def remove_left_behind(self, ended_well: bool) -> None:
        """Remove what runs of this job have left because they had to end.

        Args:
            ended_well: this run did: remove what it has come further than, unless its own last
                checkpoint could not be written; else only what is older than `recovery.keep_days`.
        """
        if not self._config.takes_snapshots:
            return
        reached = max(self._progress, default=0) if ended_well and not self._failed else -1
        try:
            for run in await self.left_behind():
                is_old = self.is_too_old(run) and run.folder.path != self._folder.path
                if is_old or run.last_step <= reached:
                    for folder in run.to_remove:
                        await asyncio.to_thread(remove, folder)
                        await self.remove_elsewhere(folder)
            if self._config.checkpoint is None:
                with contextlib.suppress(OSError):  # it is not there, or not empty
                    self._config.checkpoint_folder.rmdir()
        except RpcmpError as error:
            self._report(WarningEvent(text=f"old checkpoints stay: {error}"))

    async def _save(self, worker: Member, found: CommonSnapshot) -> pb.Saved:
        """Have a worker's snapshot written by whoever holds it."""
        labels = [each.label for each in self._config.workers]
        holder = labels.index(found.holders[worker.label])
        request = pb.SaveRequest(
            job_id=self._fleet.job_id,
            stage_name=worker.stage,
            step=found.step,
        )
        async with self._fleet.client(self._fleet.addresses[holder]) as client:
            try:
                return await client.save(request)
            except RpcmpError as error:
                return pb.Saved(step=found.step, error=str(error))


def _drivers_own(progress: Message) -> Message:
    return {key: value for key, value in progress.items() if key in DRIVERS_OWN}


def _software() -> dict[str, str]:
    found = versions()
    return {"rpcmp": found.rpcmp, "torch": found.torch, "python": found.python}


async def _nowhere(folder: Path) -> None:
    pass


def _told_of(config: Config) -> Any:
    """What a manifest tells of a config; where a run is logged to is not what it computes."""
    return redacted(config.model_dump(mode="json", exclude={"log"}))


def differences(before: Any, now: Any, place: str = "") -> list[str]:
    """The dotted keys in which two configs differ, such as "optimizer.kwargs.lr"."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return [] if before == now else [place]
    keys = [*before, *(key for key in now if key not in before)]
    return [
        name
        for key in keys
        for name in differences(
            before.get(key), now.get(key), f"{place}.{key}" if place else str(key)
        )
    ]
