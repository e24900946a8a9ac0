"""Where each generation of a run begins: in memory, on a disk, or from the config."""

from __future__ import annotations

from collections.abc import Callable

from rpcmp.config import Config
from rpcmp.errors import CheckpointError
from rpcmp.job.begin import Begin, from_memory
from rpcmp.job.checkpoints import Checkpoints
from rpcmp.job.fleet import Fleet
from rpcmp.job.restore import Holdings, newest_common
from rpcmp.job.resume import Checkpointed
from rpcmp.process.channel import Message


class Beginning:
    """Chooses for one generation after the other.

    Args:
        config: the job.
        fleet: its servers.
        checkpoints: of this run.
        report: told of what cannot be used ("warning") and of a run that is resumed ("resumed").
        resume: whether the first generation goes on from a checkpoint, of whatever run.
    """

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        checkpoints: Checkpoints,
        report: Callable[[Message], None],
        resume: bool,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._checkpoints = checkpoints
        self._report = report
        self._on_disk = Checkpointed(config, fleet, report)
        self._resumes = resume
        self._is_first = True

    async def choose(self, assignments: list[str], holdings: dict[str, Holdings]) -> Begin:
        """The newest step that all stages can be brought to.

        Raises:
            CheckpointError: the run has to be resumed, and no checkpoint can be used.
        """
        self._checkpoints.note_assignments(assignments)
        if self._is_first:
            begin = await self._from_disk(assignments, run=None) if self._resumes else Begin()
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
