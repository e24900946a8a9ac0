"""The runs whose checkpoints lie in one folder: each has a folder of its own there.

    <dir>/20261122-101500-3f9a2c/step-00000120/...   a run's, named after when it began
    <dir>/step-00000120/...                          `dir` is a run's folder itself

So no run is in another's way, and none prunes what another has written. What a run leaves because
it has given up is told from what a config with a [checkpoint] asked for, whether it was time or a
signal came: only the latter makes the next run ask whether it should go on, and only the former is
ever removed by another run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rpcmp.checkpoint.folder import RUN_NAME, CheckpointFolder, FoundCheckpoint
from rpcmp.checkpoint.manifest import Manifest
from rpcmp.errors import CheckpointConflictError, CheckpointError


@dataclass(frozen=True)
class RunCheckpoints:
    """The checkpoints of one run.

    Attributes:
        name: of its folder; empty: the folder that was looked into is that of the run.
        folder: where they are.
        found: all of them, damaged ones too, that of the highest step first; at least one.
    """

    name: str
    folder: CheckpointFolder
    found: list[FoundCheckpoint]

    @property
    def newest(self) -> Manifest | None:
        """The one of the highest step that is whole; None: all are damaged."""
        return next((found.manifest for found in self.found if found.manifest), None)

    @property
    def last_step(self) -> int:
        """The highest step that is whole; 0: all are damaged."""
        return self.newest.step if self.newest else 0

    @property
    def to_remove(self) -> list[Path]:
        """The folders without which nothing is left of the run."""
        return [self.folder.path] if self.name else [found.path for found in self.found]

    @property
    def was_asked_for(self) -> bool:
        """Whether the config of the run wanted one of them; a damaged one does not say."""
        return any(found.manifest.is_asked_for for found in self.found if found.manifest)

    @property
    def written(self) -> datetime:
        """When the newest was, by its manifest, or else by its folder; long ago if neither says."""
        try:
            if self.newest is None:
                return datetime.fromtimestamp(self.found[0].path.stat().st_mtime, UTC)
            written = datetime.fromisoformat(self.newest.written)
        except (OSError, ValueError):
            return datetime.min.replace(tzinfo=UTC)
        return written if written.tzinfo else written.replace(tzinfo=UTC)

    def is_before(self, since: datetime) -> bool:
        """Whether the run has written nothing since then, to the second."""
        return self.written < since.replace(microsecond=0)

    def __str__(self) -> str:
        if self.newest is None:
            return f"{self.folder.path} ({self.found[0].problem})"
        return f"{self.folder.path} (step {self.newest.step}, written {self.newest.written})"


def new_name(run: str) -> str:
    """The name of the folder of a run that begins now.

    Args:
        run: unique for each, hexadecimal.
    """
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{run[:6]}"


def runs_in(folder: Path) -> list[RunCheckpoints]:
    """The runs that have checkpoints in a folder, the one that wrote last first.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    try:
        names = [path.name for path in folder.iterdir() if RUN_NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror}") from error
    every = [("", CheckpointFolder(folder))]
    every += [(name, CheckpointFolder(folder / name)) for name in sorted(names, reverse=True)]
    looked = [RunCheckpoints(name, one, one.found()) for name, one in every]
    return sorted((run for run in looked if run.found), key=lambda run: run.written, reverse=True)


def whole_runs(folder: Path, job: str) -> list[RunCheckpoints]:
    """The runs of a job that have a checkpoint which is whole, the one that wrote last first.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    return [run for run in runs_in(folder) if run.newest and run.newest.job == job]


def newest_in(folder: Path, job: str = "") -> RunCheckpoints | None:
    """The run that wrote last; of this job, where there is one of it. None: there is no run.

    One that is damaged does not say whose it is, and is not passed over.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    found = runs_in(folder)
    ours = [run for run in found if run.newest is None or run.newest.job == job]
    return next(iter(ours or found), None)


def require_none_asked_for(folder: Path) -> None:
    """Fail where a new run would begin beside checkpoints that a config asked for.

    That is seldom meant, so whoever begins it has to say it.

    Raises:
        CheckpointConflictError: there are some.
        CheckpointError: the folder cannot be read.
    """
    for run in runs_in(folder):
        if run.was_asked_for and run.newest is not None:
            raise CheckpointConflictError(
                f"{folder} holds checkpoints of another run: job {run.newest.job!r}, step "
                f"{run.newest.step}, written {run.newest.written}; go on with --resume, or begin "
                "anew beside them with --fresh"
            )


def left_behind(folder: Path, job: str, asks: bool) -> list[RunCheckpoints]:
    """The runs of a job that left something which no config had asked for, the newest first.

    Args:
        folder: of the job's checkpoints.
        job: its name.
        asks: whether its config asks for checkpoints; where it does not, there is nothing else in
            the folder, whatever a manifest of rpcmp 0.1 says.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    return [run for run in whole_runs(folder, job) if not (asks and run.was_asked_for)]
