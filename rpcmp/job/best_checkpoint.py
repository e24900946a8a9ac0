"""The best checkpoint of a run: a mark in its manifest, which outlives a restart.

    evaluated ──best so far──> not saved yet ──> its manifest is written with the mark
                               saved already ──> its manifest is written again, with the mark

Marks are never removed: each has a better value than all before it, so the newest one is the best.
So there is no moment without a best checkpoint on the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from rpcmp.checkpoint.folder import CheckpointFolder, look
from rpcmp.checkpoint.manifest import BestMark, Manifest
from rpcmp.config.schema import Config
from rpcmp.errors import RpcmpError
from rpcmp.observability.events import BestEvent, BestStep, Event, WarningEvent


def mark_of(progress: Mapping[str, Any]) -> BestMark | None:
    """Return the mark of a checkpoint of this step, or None if another step is the best.

    Args:
        progress: the driver's state after the step; see rpcmp.driver.progress.
    """
    best = progress.get("best")
    if best is None or best["step"] != progress["step"]:
        return None
    return BestMark(metric=best["metric"], value=best["value"])


class BestCheckpoint:
    """The best checkpoint in a run's folder."""

    def __init__(
        self, config: Config, folder: CheckpointFolder, report: Callable[[Event], None]
    ) -> None:
        section = config.checkpoint
        self._is_on = section is not None and section.best is not None
        self._folder = folder
        self._report = report

    async def mark(self, step: int, mark: BestMark, driver: dict[str, Any]) -> bool:
        """Mark a checkpoint that was written before it turned out to be the best.

        Args:
            mark: its metric and value.
            driver: the driver's own state, which contains the best step as well.

        Returns:
            Whether it was not marked before.
        """
        manifest = self._manifest(step)
        if manifest is None or manifest.best == mark:
            return False
        manifest = manifest.model_copy(update={"driver": driver, "best": mark})
        try:
            await asyncio.to_thread(self._folder.commit, manifest)
        except RpcmpError as error:
            text = f"step {step} is the best and cannot be marked so: {error}; the run goes on"
            self._report(WarningEvent(text=text))
            return False
        self.report_if_best(manifest)
        return True

    def report_if_best(self, manifest: Manifest) -> None:
        """Report a checkpoint that has just been written, if it is the best so far."""
        if (best := manifest.best) is not None:
            self._report(BestEvent(step=manifest.step, metric=best.metric, value=best.value))

    def restored_from(self, manifest: Manifest) -> dict[str, Any]:
        """Return the "best" of the driver's state in a run that goes on from a checkpoint.

        If the best checkpoint is gone, it could not be exported: the search for the best restarts.
        """
        best: Any = manifest.driver.get("best")
        if best is None or not self._is_on:
            return {}
        marked = self._manifest(best["step"])
        if marked is not None and marked.best is not None:
            return {"best": best}
        text = f"the best checkpoint, of step {best['step']}, is gone: the best begins anew"
        self._report(WarningEvent(text=text))
        return {"best": None}

    def kept(self) -> BestStep | None:
        """Return the best checkpoint, if there is one."""
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

    def _manifest(self, step: int) -> Manifest | None:
        checkpoint = look(self._folder.path_of(step))
        return None if checkpoint is None else checkpoint.manifest
