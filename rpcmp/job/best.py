"""The best checkpoint of a run: marked in its manifest, found again after a restart.

    evaluated ──best so far──> not saved yet ──> its manifest is written with the mark
                               saved already ──> its manifest is written again, now with it

Marks stay where they are: each is of a better value than all before it, so that the newest is the
best. There is never a moment without one on the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from rpcmp.checkpoint.folder import CheckpointFolder, look
from rpcmp.checkpoint.manifest import BestMark, Manifest
from rpcmp.config.schema import Config
from rpcmp.errors import RpcmpError
from rpcmp.observability.events.definitions import BestEvent, WarningEvent
from rpcmp.observability.events.event import BestStep, Event


def mark_of(progress: Mapping[str, Any]) -> BestMark | None:
    """What a checkpoint of just this step is marked with; None where another one is the best.

    Args:
        progress: what the driver was after the step; see rpcmp.driver.progress.
    """
    best = progress.get("best")
    if best is None or best["step"] != progress["step"]:
        return None
    return BestMark(metric=best["metric"], value=best["value"])


class BestCheckpoint:
    """The best checkpoint in a run's folder.

    Args:
        config: the job.
        folder: of its checkpoints.
        report: told of each that is the best so far ("best"), and of what is wrong ("warning").
    """

    def __init__(
        self, config: Config, folder: CheckpointFolder, report: Callable[[Event], None]
    ) -> None:
        section = config.checkpoint
        self._is_on = section is not None and section.best is not None
        self._folder = folder
        self._report = report

    async def mark(self, step: int, mark: BestMark, driver: dict[str, Any]) -> bool:
        """Mark a checkpoint that was there before it was known to be the best.

        Args:
            step: its step.
            mark: by what it is.
            driver: the driver's own state, which knows it as well.

        Returns:
            whether it has been marked just now.
        """
        found = look(self._folder.path_of(step))
        if found is None or found.manifest is None or found.manifest.best == mark:
            return False
        manifest = found.manifest.model_copy(update={"driver": driver, "best": mark})
        try:
            await asyncio.to_thread(self._folder.commit, manifest)
        except RpcmpError as error:
            text = f"step {step} is the best and cannot be marked so: {error}; the run goes on"
            self._report(WarningEvent(text=text))
            return False
        self.tell(manifest)
        return True

    def tell(self, manifest: Manifest) -> None:
        """Report a checkpoint that has just been written, if it is the best so far."""
        if manifest.best is not None:
            best = manifest.best
            self._report(BestEvent(step=manifest.step, metric=best.metric, value=best.value))

    def known_to(self, manifest: Manifest) -> dict[str, Any]:
        """What a run that goes on from a checkpoint has to know of the best: its driver's "best".

        Where that is not there any more the best begins anew: it could not be exported.
        """
        best: Any = manifest.driver.get("best")
        if best is None or not self._is_on:
            return {}
        found = look(self._folder.path_of(best["step"]))
        if found is not None and found.manifest is not None and found.manifest.best is not None:
            return {"best": best}
        text = f"the best checkpoint, of step {best['step']}, is gone: the best begins anew"
        self._report(WarningEvent(text=text))
        return {"best": None}

    def kept(self) -> BestStep | None:
        """The best step that is kept; None if there is none."""
        if not self._is_on:
            return None
        try:
            manifest = self._folder.best()
        except RpcmpError as error:
            self._report(WarningEvent(text=f"which checkpoint is the best? {error}"))
            return None
        if manifest is None or manifest.best is None:
            return None
        path = str(self._folder.path_of(manifest.step))
        best = manifest.best
        return {"step": manifest.step, "metric": best.metric, "value": best.value, "path": path}
