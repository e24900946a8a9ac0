"""Where each generation of a run begins: in memory, on a disk, or from the config."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from rpcmp.checkpoint.runs import require_none_asked_for, whole_runs
from rpcmp.config import Config
from rpcmp.errors import CheckpointError
from rpcmp.job.begin import Begin, from_memory
from rpcmp.job.checkpoints import Checkpoints
from rpcmp.job.fleet import Fleet
from rpcmp.job.restore import Holdings, newest_common
from rpcmp.job.resume import Checkpointed
from rpcmp.process.channel import Message

Start = Literal["resume", "fresh", "either"]
"""Whether a run goes on from the newest checkpoint, or begins anew, whatever there is; or begins
anew unless a config has asked for what is there."""

MOST_OTHERS = 3
"""Runs that an error names."""


class Beginning:
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
        fleet: Fleet,
        checkpoints: Checkpoints,
        report: Callable[[Message], None],
        start: Start,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._checkpoints = checkpoints
        self._report = report
        self._on_disk = Checkpointed(config, fleet, report)
        self._start = start
        self._is_first = True

    async def choose(self, assignments: list[str], holdings: dict[str, Holdings]) -> Begin:
        """The newest step that all stages can be brought to.

        Raises:
            CheckpointError: the run has to be resumed, and no checkpoint can be used.
            OtherRunError: it may be that it should have been resumed.
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
                self._report({"event": "warning", "text": str(error)})
        return Begin() if in_memory is None else from_memory(in_memory, self._config, self._fleet)

    async def _first(self, assignments: list[str]) -> Begin:
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
                self._report({"event": "warning", "text": text})
        return Begin()

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

    async def _from_disk(self, assignments: list[str], run: str | None) -> Begin:
        found = await self._on_disk.newest(assignments, run)
        if found is None:
            self._report({"event": "resumed", "step": 0, "changed": []})
            return Begin()
        begin, manifest = found
        changed = self._checkpoints.take_over(manifest)
        if run is None:
            told = {"step": begin.step, "run": manifest.run, "changed": changed}
            self._report({"event": "resumed", **told})
        return begin
